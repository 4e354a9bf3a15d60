"""The interfaces between a program and its role's scheduler, and between a program and its host. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.config import WorkerConfig
from pdserve.core import protocol as pr
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.attempt import AttemptKey, FailureKind
from pdserve.core.types import Role
from pdserve.engine.interface import RowOut
from pdserve.telemetry.metrics import Metrics
from pdserve.tls.certificates import ReloadingCertificates


class Scheduler(Protocol):
    """The common interface of PrefillScheduler and DecodeScheduler."""

    is_draining: bool

    @property
    def has_work(self) -> bool: ...

    def __contains__(self, key: AttemptKey) -> bool: ...

    def live(self) -> list[AttemptKey]: ...

    def load(self) -> pr.Load: ...

    def plan(self, now_s: float) -> tuple[Any, list[Any]]: ...

    def apply(self, step: Any, outs: Sequence[RowOut], now_s: float) -> list[Any]: ...

    def fail(self, key: AttemptKey, kind: FailureKind, message: str) -> list[Any]: ...

    def cancel(self, key: AttemptKey) -> list[Any]: ...

    def expire(self, now_s: float) -> list[Any]: ...

    def check(self) -> None: ...


class AsyncScheduler(Protocol):
    """A scheduler that supports asynchronous scheduling: it plans a step before the previous one is read."""

    def plan_after(self, step: Any) -> Any | None: ...

    def launched(self, step: Any) -> None: ...

    def dropped(self, step: Any) -> None: ...


# --- what the host provides -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramContext:
    config: WorkerConfig
    role: Role
    incarnation: str  # new for each start of the process
    endpoint: str  # HOST:PORT at which other processes reach this worker's gRPC server
    secret: ClusterSecret
    post: Callable[[Callable[[], None]], None]  # runs the call on the engine thread; from any thread, never blocks
    tls: ReloadingCertificates | None = None  # None: plain text
    now: Callable[[], float] = time.monotonic
    metrics: Metrics = field(default_factory=Metrics.off)

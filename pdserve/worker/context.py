"""What a host provides to its program."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.config import WorkerConfig
from pdserve.core.proof import ClusterSecret
from pdserve.core.types import Role
from pdserve.telemetry.metrics import Metrics
from pdserve.tls.certificates import ReloadingCertificates


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

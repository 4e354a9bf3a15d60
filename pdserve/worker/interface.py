"""The interface between a program and its role's batching. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey, FailureKind
from pdserve.core.blocks import BlockAllocator
from pdserve.engine.interface import RowOut


class Batching(Protocol):
    """The common interface of PrefillBatching and DecodeBatching."""

    blocks: BlockAllocator
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


class AsyncBatching(Protocol):
    """A batching that supports asynchronous scheduling: it plans a step before the previous one is read."""

    def plan_after(self, step: Any) -> Any | None: ...

    def launched(self, step: Any) -> None: ...

    def dropped(self, step: Any) -> None: ...

"""The interface between a program of either role, or its simulation, and its scheduler. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey, FailureKind
from pdserve.core.effects import StepAccount
from pdserve.engine.interface import Row, RowOut


class WorkerStep(Protocol):
    """The work of one step: PrefillStep or DecodeStep."""

    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def keys(self) -> Sequence[AttemptKey]:
        """The attempt of each row."""
        ...

    @property
    def account(self) -> StepAccount: ...


Step = TypeVar("Step", bound=WorkerStep)
Effect = TypeVar("Effect")  # PrefillEffect or DecodeEffect


class Scheduler(Protocol[Step, Effect]):
    """The common interface of PrefillScheduler and DecodeScheduler."""

    is_draining: bool

    @property
    def has_work(self) -> bool: ...

    def __contains__(self, key: AttemptKey) -> bool: ...

    def live(self) -> list[AttemptKey]: ...

    def load(self) -> pr.Load: ...

    def plan(self, now_s: float) -> tuple[Step, list[Effect]]: ...

    def apply(self, step: Step, outs: Sequence[RowOut], now_s: float) -> list[Effect]: ...

    def fail(self, key: AttemptKey, kind: FailureKind, message: str) -> list[Effect]: ...

    def cancel(self, key: AttemptKey) -> list[Effect]: ...

    def expire(self, now_s: float) -> list[Effect]: ...

    def check(self) -> None: ...

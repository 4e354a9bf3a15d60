"""A step that a program has begun, and perhaps launched; the next one may be launched before this one is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, final

from pdserve.engine.interface import AheadEngine, Flight, RowOut
from pdserve.worker.compute import Isolation, RowFailed


@dataclass(frozen=True, slots=True)
class Begun:
    step: Any
    flight: Flight | None = None  # None: it is computed when it is read


class AheadBatching(Protocol):
    """What a batching has that can plan one step ahead."""

    def plan_after(self, step: Any) -> Any | None: ...

    def launched(self, step: Any) -> None: ...

    def dropped(self, step: Any) -> None: ...


@final
class Runway:
    """Launches the steps of one batching, at most two at a time."""

    def __init__(self, engine: AheadEngine, batching: AheadBatching, isolation: Isolation) -> None:
        self._engine, self._batching, self._isolation = engine, batching, isolation
        self._next: Begun | None = None

    @property
    def is_busy(self) -> bool:
        """A step is launched that nobody has read."""
        return self._next is not None

    def take_next(self) -> Begun | None:
        """The step that was launched ahead, if there is one."""
        begun, self._next = self._next, None
        return begun

    def launch(self, step: Any, after: Flight | None = None) -> Begun:
        """Begins a step whose rows nobody has asked for after anything else changed."""
        begun = Begun(step, self._engine.launch(step.rows, after))
        self._batching.launched(step)
        return begun

    def read(self, begun: Begun) -> list[RowOut | RowFailed]:
        """Launches what can follow, then waits for the step's own rows.

        After a failure the step ahead is dropped, since it follows draws that never were, and the rows are tried one
        by one. Raises EngineBroken.
        """
        assert begun.flight is not None
        try:
            following = self._batching.plan_after(begun.step)
            if following is not None:
                self._next = self.launch(following, begun.flight)
            return list(begun.flight.wait())
        except Exception as error:  # whatever an engine may raise: the rows are tried one by one
            self._drop_next()
            rows = begun.step.rows_again()
            entries = iter(self._isolation.after_failure([row for row in rows if row is not None], error))
            return [RowOut() if row is None else next(entries) for row in rows]

    def _drop_next(self) -> None:
        dropped = self.take_next()
        if dropped is None:
            return
        try:
            if dropped.flight is not None:
                dropped.flight.wait()
        except Exception:
            pass
        self._batching.dropped(dropped.step)

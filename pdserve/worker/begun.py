"""A step that a program has begun, and perhaps launched; the next one may be launched before this one is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from pdserve.engine.interface import AheadEngine, Flight, Row, RowOut
from pdserve.worker.compute import Isolation, RowFailed
from pdserve.worker.interface import AheadBatching


@dataclass(frozen=True, slots=True)
class Begun:
    step: Any
    flight: Flight | None = None  # None: it is computed when it is read


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

    def read(self, begun: Begun) -> Sequence[RowOut | RowFailed]:
        """Samples rows that waited for the step before, launches what can follow, then waits for the step's own rows.

        After a failure the step ahead is dropped, since it follows draws that never were, and the rows are tried one
        by one. Raises EngineBroken.
        """
        flight = begun.flight
        assert flight is not None
        following = self._batching.plan_after(begun.step)

        def compute() -> Sequence[RowOut]:
            if flight.unsampled:
                flight.sample(begun.step.known_rows(flight.unsampled))
            if following is not None:
                self._next = self.launch(following, flight)
            return flight.wait()

        def again() -> list[Row | None]:
            self._drop_next()
            rows: list[Row | None] = begun.step.rows_again()
            return rows

        return self._isolation.run(compute, again)

    def _drop_next(self) -> None:
        dropped = self.take_next()
        if dropped is not None and dropped.flight is not None:
            with contextlib.suppress(Exception):  # as the step before, whose failure is told
                if dropped.flight.unsampled:
                    dropped.flight.sample({})
                dropped.flight.wait()
            self._batching.dropped(dropped.step)

"""A step that a program has begun, and possibly launched. The next step may be launched before this one is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

from pdserve.engine.async_stepper import AsyncStepper
from pdserve.engine.interface import AsyncEngine, Engine, Flight, Row, RowOut
from pdserve.worker.compute import Isolation, RowFailed
from pdserve.worker.interface import AsyncBatching


@dataclass(frozen=True, slots=True)
class Begun:
    step: Any
    flight: Flight | None = None  # None: it is computed when it is read


@final
class StepsInFlight:
    """Launches the steps of one batching, at most two at a time."""

    def __init__(self, engine: AsyncEngine, batching: AsyncBatching, isolation: Isolation) -> None:
        self._engine, self._batching, self._isolation = engine, batching, isolation
        self._next: Begun | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a launched step has not been read."""
        return self._next is not None

    def take_next(self) -> Begun | None:
        """The step that was launched before the last one was read, if there is one."""
        begun, self._next = self._next, None
        return begun

    def launch(self, step: Any, after: Flight | None = None) -> Begun:
        """Begins a step. Its rows must not have been created after a later change."""
        begun = Begun(step, self._engine.launch(step.rows, after))
        self._batching.launched(step)
        return begun

    def read(self, begun: Begun) -> Sequence[RowOut | RowFailed]:
        """Samples rows that waited for the previous step, launches the next step if possible, then waits for this
        step's rows.

        After a failure the next step is dropped, because it depends on missing tokens, and the rows are tried one by
        one. Raises EngineBroken.
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
            with contextlib.suppress(Exception):  # failed like the previous step, whose failure is reported
                if dropped.flight.unsampled:
                    dropped.flight.sample({})
                dropped.flight.wait()
            self._batching.dropped(dropped.step)


def make_steps_in_flight(
    engine: Engine, choice: str, batching: AsyncBatching, isolation: Isolation
) -> StepsInFlight | None:
    """`choice` is the setting async_scheduling. None: each step is read before the next one is launched."""
    if choice == "on" and not hasattr(engine, "launch"):
        engine = AsyncStepper(engine)
    if choice == "off" or not hasattr(engine, "launch"):
        return None
    return StepsInFlight(cast(AsyncEngine, engine), batching, isolation)

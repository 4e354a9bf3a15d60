"""Steps that are launched before the previous one is read, for engines that support it. Runs on the engine thread only.

step.py plans them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast, final

from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import DecodeStep
from pdserve.core.errors import InternalError
from pdserve.engine.interface import (
    AsyncEngine,
    Engine,
    EngineSpec,
    Flight,
    KvPool,
    OnLayer,
    Row,
    RowOut,
    compacted,
)
from pdserve.worker.steps import Begun, Isolation, RowFailed


@final
class StepsInFlight:
    """Launches the steps of one scheduler, at most two at a time."""

    def __init__(self, engine: AsyncEngine, scheduler: DecodeScheduler, isolation: Isolation) -> None:
        self._engine, self._scheduler, self._isolation = engine, scheduler, isolation
        self._next: Begun[DecodeStep] | None = None
        self.is_paused = False  # launches no step before the running one is read

    @property
    def is_busy(self) -> bool:
        """Whether a launched step has not been read."""
        return self._next is not None

    def take_next(self) -> Begun[DecodeStep] | None:
        """The step that was launched before the last one was read, if there is one."""
        begun, self._next = self._next, None
        return begun

    def launch(self, step: DecodeStep, after: Flight | None = None) -> Begun[DecodeStep]:
        """Begins a step. Its rows must not have been created after a later change."""
        begun = Begun(step, self._engine.launch(step.rows, after))
        self._scheduler.launched(step)
        return begun

    def read(self, begun: Begun[DecodeStep]) -> Sequence[RowOut | RowFailed]:
        """Samples rows that waited for the previous step, launches the next step if possible, then waits for this
        step's rows.

        After a failure the next step is dropped, because it depends on missing tokens, and the rows are tried one by
        one. Raises EngineBroken.
        """
        flight = begun.flight
        assert flight is not None
        following = None if self.is_paused else self._scheduler.plan_after(begun.step)

        def compute() -> Sequence[RowOut]:
            if flight.unsampled:
                flight.sample(begun.step.known_rows(flight.unsampled))
            if following is not None:
                self._next = self.launch(following, flight)
            return flight.wait()

        def again() -> list[Row | None]:
            self._drop_next()
            return begun.step.rows_again()

        return self._isolation.run(compute, again)

    def _drop_next(self) -> None:
        dropped = self.take_next()
        if dropped is not None and dropped.flight is not None:
            with contextlib.suppress(Exception):  # failed like the previous step, whose failure is reported
                if dropped.flight.unsampled:
                    dropped.flight.sample({})
                dropped.flight.wait()
            self._scheduler.dropped(dropped.step)


def make_steps_in_flight(
    engine: Engine, choice: str, scheduler: DecodeScheduler, isolation: Isolation
) -> StepsInFlight | None:
    """`choice` is the setting async_scheduling. None: each step is read before the next one is launched."""
    if choice == "on" and not hasattr(engine, "launch"):
        engine = AsyncStepper(engine)
    if choice == "off" or not hasattr(engine, "launch"):
        return None
    return StepsInFlight(cast(AsyncEngine, engine), scheduler, isolation)


# --- asynchronous steps of any engine -------------------------------------------------------------------------
# AsyncStepper computes a step when the caller waits for it. On a CPU this gains nothing, because the engine thread
# itself computes. It is used to test asynchronous scheduling without a GPU, token for token.


@final
class DeferredFlight:
    def __init__(self, engine: Engine, rows: Sequence[Row], after: DeferredFlight | None) -> None:
        self.outs: Sequence[RowOut] | None = None
        self._engine, self._rows, self._after = engine, list(rows), after
        self.unsampled: Sequence[int] = [
            index
            for index, row in enumerate(self._rows)
            if row.follows is not None and row.sample is not None and row.sample.needs_history
        ]

    def sample(self, rows: Mapping[int, Row]) -> None:
        for index in self.unsampled:
            self._rows[index] = rows.get(index) or replace(self._rows[index], sample=None)
        self.unsampled = ()

    def wait(self) -> Sequence[RowOut]:
        """Converts plain outputs to the compact form that asynchronous engines return."""
        if self.unsampled:
            raise InternalError(f"rows {list(self.unsampled)} were not sampled before they are waited for")
        outs = self._engine.step([self._known(row) for row in self._rows])
        self.outs = compacted(outs) or outs
        self._after = None
        return self.outs

    def _known(self, row: Row) -> Row:
        if row.follows is None:
            return row
        if self._after is None or self._after.outs is None:
            raise InternalError("a step is waited for before the one that it follows")
        sampled = self._after.outs[row.follows].sampled
        if not sampled:  # the sequence has ended: the row's output is ignored
            return replace(row, tokens=(0,), follows=None, sample=None)
        token = sampled[0].token_id
        return replace(row, tokens=(token,), history=[*row.history[: row.start], token], follows=None)


@final
class AsyncStepper:
    """An AsyncEngine around `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    @property
    def pool(self) -> KvPool:
        return self._engine.pool

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        return self._engine.step(rows, on_layer)

    def launch(self, rows: Sequence[Row], after: Flight | None) -> DeferredFlight:
        return DeferredFlight(self._engine, rows, after if isinstance(after, DeferredFlight) else None)

    def close(self) -> None:
        self._engine.close()

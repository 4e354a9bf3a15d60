"""Steps on an engine: begun, possibly launched before the previous one is read (`StepsInFlight`), and repeated without
a row that fails (`Isolation`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast, final

from pdserve.core.errors import InternalError
from pdserve.core.kv.cache import KvCache
from pdserve.engine.interface import (
    AsyncEngine,
    Engine,
    EngineSpec,
    Flight,
    KvPool,
    OnLayer,
    PlainOuts,
    Row,
    RowOut,
    plain_out,
)
from pdserve.worker.interface import AsyncScheduler

# --- rows that fail -------------------------------------------------------------------------------------------
# Runs steps so that one bad row fails alone, and distinguishes a broken engine from a bad row.

log = logging.getLogger(__name__)

MAX_BARREN_STEPS: Final = 8


class EngineBroken(InternalError):
    """The engine cannot compute any more; the process must be replaced."""

    reason = "ENGINE_BROKEN"


@dataclass(frozen=True, slots=True)
class RowFailed:
    message: str


@final
class Isolation:
    """An engine whose failed steps are repeated row by row.

    Repeating is safe: a row writes the same KV again, with no other bytes in between, and its sampled token depends
    only on the row. So layers that the failed step reported may still be read by a transfer.
    """

    def __init__(self, engine: Engine, probe: Callable[[], Row | None]) -> None:
        """`probe` makes a row that any working engine can compute, or None if there is no block for it."""
        self._engine = engine
        self._probe = probe
        self._num_barren = 0  # consecutive steps in which no row succeeded and no probe was possible

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut | RowFailed]:
        """One entry per row. Raises EngineBroken if even the probe fails. `on_layer` is called for the first try
        only."""
        engine = self._engine
        return self.run(lambda: engine.step(rows) if on_layer is None else engine.step(rows, on_layer), lambda: rows)

    def run(
        self, compute: Callable[[], Sequence[RowOut]], again: Callable[[], Sequence[Row | None]]
    ) -> Sequence[RowOut | RowFailed]:
        """Like `step`, for rows that `compute` computes. If it fails, `again` returns the rows, with None for attempts
        that have ended in the meantime."""
        try:
            outs = compute()
        except Exception as error:  # any error of an engine: the rows are tried one by one
            rows = again()
            log.error("a step failed; its rows are tried one by one", exc_info=error, extra={"rows": len(rows)})
        else:
            self._num_barren = 0
            return outs
        entries: list[RowOut | RowFailed] = [RowOut() if row is None else self._alone(row) for row in rows]
        if all(isinstance(entry, RowFailed) for row, entry in zip(rows, entries, strict=True) if row is not None):
            if any(row is not None for row in rows):
                self._suspect()
        else:
            self._num_barren = 0
        return entries

    def _suspect(self) -> None:
        """Every row failed: the rows are bad, or the engine is."""
        probe = self._probe()
        if probe is None:
            self._num_barren += 1
            if self._num_barren >= MAX_BARREN_STEPS:
                raise EngineBroken(f"no row succeeded in {self._num_barren} steps; the last error is in the log")
            return
        self._num_barren = 0
        outcome = self._alone(probe)
        if isinstance(outcome, RowFailed):
            raise EngineBroken(f"a probe failed after all rows of a step: {outcome.message}")

    def _alone(self, row: Row) -> RowOut | RowFailed:
        try:
            return self._engine.step([row])[0]
        except Exception as error:  # reported to the request's router
            return RowFailed(f"{type(error).__name__}: {error}")


def free_row(kv: KvCache) -> Row | None:
    """A row that any working engine can compute, in a free block, whose contents are unused; None if no block is
    free."""
    free = kv.extend(1)
    if free is None:
        return None
    kv.release(free)
    return Row(tokens=[0], start=0, blocks=free)


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
        token_ids = [out.sampled[0].token_id for out in outs if out.sampled]
        is_plain = len(token_ids) == len(outs) and all(out == plain_out(out.sampled[0].token_id) for out in outs)
        self.outs = PlainOuts(token_ids) if is_plain else outs
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


# --- steps in flight ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    step: Any
    flight: Flight | None = None  # None: it is computed when it is read


@final
class StepsInFlight:
    """Launches the steps of one scheduler, at most two at a time."""

    def __init__(self, engine: AsyncEngine, scheduler: AsyncScheduler, isolation: Isolation) -> None:
        self._engine, self._scheduler, self._isolation = engine, scheduler, isolation
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
        self._scheduler.launched(step)
        return begun

    def read(self, begun: Begun) -> Sequence[RowOut | RowFailed]:
        """Samples rows that waited for the previous step, launches the next step if possible, then waits for this
        step's rows.

        After a failure the next step is dropped, because it depends on missing tokens, and the rows are tried one by
        one. Raises EngineBroken.
        """
        flight = begun.flight
        assert flight is not None
        following = self._scheduler.plan_after(begun.step)

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
            self._scheduler.dropped(dropped.step)


def make_steps_in_flight(
    engine: Engine, choice: str, scheduler: AsyncScheduler, isolation: Isolation
) -> StepsInFlight | None:
    """`choice` is the setting async_scheduling. None: each step is read before the next one is launched."""
    if choice == "on" and not hasattr(engine, "launch"):
        engine = AsyncStepper(engine)
    if choice == "off" or not hasattr(engine, "launch"):
        return None
    return StepsInFlight(cast(AsyncEngine, engine), scheduler, isolation)

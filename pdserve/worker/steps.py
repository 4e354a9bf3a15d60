"""Steps on an engine. The rows of a failed step are repeated one by one, so that a bad row fails alone, and a broken
engine is distinguished from a bad row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, final

from pdserve.core.errors import InternalError
from pdserve.core.kv.cache import KvCache
from pdserve.engine.interface import Engine, Flight, OnLayer, Row, RowOut
from pdserve.worker.interface import Step

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


@dataclass(frozen=True, slots=True)
class Begun(Generic[Step]):
    step: Step
    flight: Flight | None = None  # set if the step was launched; None: it is computed when it is read

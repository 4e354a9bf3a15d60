"""Wraps any engine as an AsyncEngine that computes a step when the caller waits for it.

On a CPU this gains nothing, because the engine thread itself computes. It is used to test asynchronous scheduling
without a GPU, token for token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from pdserve.core.errors import InternalError
from pdserve.engine.interface import Engine, EngineSpec, Flight, KvPool, OnLayer, PlainOuts, Row, RowOut, plain_out


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

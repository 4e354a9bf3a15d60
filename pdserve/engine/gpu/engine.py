"""The engine of a CUDA device: decode rows go through graphs, everything else through the eager engine.

A graph row has one token and no drafts; what it asks for beyond a plain draw follows behind the graph
(redraw.py). A step of such rows alone can be launched ahead: nothing is waited for until its flight is. Others are
computed when they are launched, prompts among them, and the rows of a mixed step that can still take the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch

from pdserve.core.errors import InternalError
from pdserve.core.types import TokenOut
from pdserve.engine.gpu import buckets
from pdserve.engine.gpu.graphs import Replays
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.redraw import NO_EXTRAS, Extras, Redraw, asks_for_more
from pdserve.engine.gpu.static import StaticDecode
from pdserve.engine.gpu.tables import TableMirror
from pdserve.engine.interface import EngineSpec, Flight, OnLayer, Row, RowOut
from pdserve.engine.pool import TorchPool
from pdserve.engine.rows import check_rows
from pdserve.engine.torch_engine import TorchEngine


@final
class GraphFlight:
    """A step whose draws are on their way to the host."""

    def __init__(self, rows: Sequence[Row], host: tuple[Any, Any], extras: Extras, event: Any | None) -> None:
        self._rows, self._host, self._extras, self._event = rows, host, extras, event

    def wait(self) -> list[RowOut]:
        if self._event is not None:
            self._event.synchronize()
        count = len(self._rows)
        tokens, logprobs = self._host[0][:count].tolist(), self._host[1][:count].tolist()
        wants = [sampling_of(row).logprobs for row in self._rows]
        outs = [
            RowOut((TokenOut(token_id=token, logprob=logprob if wanted is not None else None),))
            for token, logprob, wanted in zip(tokens, logprobs, wants, strict=True)
        ]
        extras = self._extras
        for index in extras.top_of:
            [token] = outs[index].drawn
            outs[index] = RowOut((replace(token, top=extras.top(index, wants[index] or 0)),))
        for index, why in extras.failed.items():
            outs[index] = RowOut(failed=why)
        return outs


@final
class DoneFlight:
    """A step that was computed when it was launched."""

    def __init__(self, outs: list[RowOut]) -> None:
        self._outs = outs

    def wait(self) -> list[RowOut]:
        return self._outs


@final
class GraphEngine:
    """Takes steps ahead. All of them run on the stream that is current when they are launched, one after the other."""

    def __init__(self, eager: TorchEngine, decode: StaticDecode, replays: Replays) -> None:
        self._eager, self._decode, self._replays = eager, decode, replays
        self._mirror = TableMirror(decode.num_seats, decode.num_pages)
        is_cuda = self._is_cuda = decode.table_SP.device.type == "cuda"
        size = replays.buckets[-1]
        # Two, since a flight may be read while the next one is under way.
        self._hosts = [
            (
                torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda),
                torch.zeros(size, dtype=torch.float32, pin_memory=is_cuda),
            )
            for _ in range(2)
        ]
        self._turn = 0
        self._redraw = Redraw(decode, eager.grammars, eager.spec.eos_token_ids)

    @property
    def spec(self) -> EngineSpec:
        return self._eager.spec

    @property
    def pool(self) -> TorchPool:
        return self._eager.pool

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        return self._launch(rows, None, on_layer).wait()

    def launch(self, rows: Sequence[Row], after: Flight | None) -> Flight:
        return self._launch(rows, after, None)

    def close(self) -> None:
        self._eager.close()

    def _launch(self, rows: Sequence[Row], after: Flight | None, on_layer: OnLayer | None) -> Flight:
        if after is None or not isinstance(after, GraphFlight):
            if any(row.follows is not None for row in rows):
                raise InternalError("a row follows a step that does not run")
            check_rows(self.spec, rows)
        fast = [index for index, row in enumerate(rows) if is_graph_row(row)]
        if not fast or buckets.choose(self._replays.buckets, len(fast)) is None:
            return DoneFlight(self._eager.step(rows, on_layer))
        if len(fast) == len(rows):
            return self._replay(rows)
        if any(row.follows is not None for row in rows):
            raise InternalError("a step ahead has rows that no graph takes")
        flight = self._replay([rows[index] for index in fast])
        taken = set(fast)
        slow = [index for index in range(len(rows)) if index not in taken]
        outs: list[RowOut] = [RowOut()] * len(rows)
        for index, out in zip(slow, self._eager.step([rows[index] for index in slow], on_layer), strict=True):
            outs[index] = out
        for index, out in zip(fast, flight.wait(), strict=True):
            outs[index] = out
        return DoneFlight(outs)

    @torch.inference_mode()
    def _replay(self, rows: Sequence[Row]) -> GraphFlight:
        decode, count = self._decode, len(rows)
        bucket = buckets.choose(self._replays.buckets, count)
        assert bucket is not None
        update = self._mirror.update([row.blocks for row in rows])
        if update.at:
            change = torch.tensor([update.at, update.block], pin_memory=self._is_cuda)
            change = change.to(decode.table_SP.device, non_blocking=True)
            decode.table_SP.view(-1).index_copy_(0, change[0], change[1].to(torch.int32))
        decode.inputs.send(rows, update.seats, bucket)
        self._replays.replay(bucket)
        asking = [index for index, row in enumerate(rows) if asks_for_more(row)]
        extras = self._redraw.launch(rows, asking) if asking else NO_EXTRAS
        host = self._hosts[self._turn]
        self._turn = 1 - self._turn
        host[0][:count].copy_(decode.drawn_B[:count], non_blocking=True)
        host[1][:count].copy_(decode.logprob_B[:count], non_blocking=True)
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
        return GraphFlight(list(rows), host, extras, event)


def is_graph_row(row: Row) -> bool:
    """Whether a graph can compute the row, and it can be drawn there or behind it."""
    return row.sample is not None and len(row.tokens) == 1 and not row.drafts and not row.targets

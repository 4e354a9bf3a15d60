"""The engine of a CUDA device: decode rows go through graphs, everything else through the eager engine.

A graph row has one token, or one and its drafts where the engine was opened for them: a step with drafts takes a graph
of rows of several tokens. What rows ask for beyond a plain draw follows behind the graph (redraw.py). A step of graph
rows alone is launched and not waited for until its flight is, and without drafts it can be launched ahead. Others are
computed when they are launched, prompts among them, and the rows of a mixed step that can still take the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, final

import numpy as np
import torch

from pdserve.core.errors import InternalError
from pdserve.core.types import TokenOut
from pdserve.engine.gpu import buckets
from pdserve.engine.gpu.graphs import Replays
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.redraw import NO_EXTRAS, Extras, Redraw
from pdserve.engine.gpu.static import StaticDecode
from pdserve.engine.gpu.tables import TableMirror
from pdserve.engine.interface import EngineSpec, Flight, OnLayer, PlainOuts, Row, RowOut
from pdserve.engine.memory_plan import MemoryPlan
from pdserve.engine.pool import TorchPool
from pdserve.engine.rows import CheckedTables, check_rows
from pdserve.engine.torch_engine import TorchEngine, row_out


@final
class GraphFlight:
    """A step whose draws are on their way to the host."""

    def __init__(
        self,
        rows: Sequence[Row],
        host: tuple[Any, Any],
        extras: Extras,
        event: Any | None,
        *,
        has_drafts: bool,
        has_logprobs: bool,
    ) -> None:
        """`has_logprobs`: some row's sampling asks for them."""
        self.has_drafts, self._has_logprobs = has_drafts, has_logprobs
        self._rows, self._host, self._extras, self._event = rows, host, extras, event

    def wait(self) -> Sequence[RowOut]:
        if self._event is not None:
            self._event.synchronize()
        count = sum(row.num_queries for row in self._rows) if self.has_drafts else len(self._rows)
        tokens = self._host[0][:count].tolist()
        if not (self.has_drafts or self._has_logprobs or self._extras.masks_of):  # nearly every step
            return PlainOuts(tokens)
        logprobs = self._host[1][:count].tolist()
        wants = [sampling_of(row).logprobs for row in self._rows]
        if self.has_drafts:
            wants = [wanted for row, wanted in zip(self._rows, wants, strict=True) for _ in range(row.num_queries)]
        drawn = [
            TokenOut(token_id=token, logprob=logprob if wanted is not None else None)
            for token, logprob, wanted in zip(tokens, logprobs, wants, strict=True)
        ]
        extras = self._extras
        for at in extras.top_of:
            drawn[at] = replace(drawn[at], top=extras.top(at, wants[at] or 0))
        if not self.has_drafts and not extras.masks_of:
            return [RowOut((one,)) for one in drawn]
        left = iter(drawn)
        return [
            row_out(row, list(islice(left, row.num_queries)), extras.masks_of.get(index))
            for index, row in enumerate(self._rows)
        ]


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

    def __init__(
        self, eager: TorchEngine, decode: StaticDecode, replays: Replays, verify: Replays | None = None
    ) -> None:
        """`verify`: of steps with drafts, whose buckets are of tokens."""
        self._eager, self._decode, self._replays, self._verify = eager, decode, replays, verify
        self._tables = CheckedTables(2 * decode.num_seats)
        self._mirror = TableMirror(decode.num_seats, decode.num_pages)
        is_cuda = self._is_cuda = decode.table_SP.device.type == "cuda"
        size = len(decode.drawn_B)
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
        self._redraw.warm()

    @property
    def spec(self) -> EngineSpec:
        return self._eager.spec

    @property
    def pool(self) -> TorchPool:
        return self._eager.pool

    @property
    def memory(self) -> MemoryPlan | None:
        return self._eager.memory

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        return self._launch(rows, None, on_layer).wait()

    def launch(self, rows: Sequence[Row], after: Flight | None) -> Flight:
        return self._launch(rows, after, None)

    def close(self) -> None:
        self._eager.close()

    def _launch(self, rows: Sequence[Row], after: Flight | None, on_layer: OnLayer | None) -> Flight:
        if not isinstance(after, GraphFlight) or after.has_drafts:
            if any(row.follows is not None for row in rows):
                raise InternalError("a row follows a step that does not run")
            check_rows(self._eager.spec, rows, self._tables)
        fast = self._takes(rows)
        if not fast:
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

    def _takes(self, rows: Sequence[Row]) -> list[int]:
        """The rows that go through a graph together."""
        most_queries = self._decode.most_queries
        fast = [index for index, row in enumerate(rows) if is_graph_row(row, most_queries)]
        if self._verify is not None and any(rows[index].drafts for index in fast):
            if buckets.choose(self._verify.buckets, sum(rows[index].num_queries for index in fast)) is not None:
                return fast
            fast = [index for index in fast if not rows[index].drafts]
        return fast if buckets.choose(self._replays.buckets, len(fast)) is not None else []

    @torch.inference_mode()
    def _replay(self, rows: Sequence[Row]) -> GraphFlight:
        decode = self._decode
        update = self._mirror.update([row.blocks for row in rows])
        if update.at:
            change = torch.tensor([update.at, update.block], pin_memory=self._is_cuda)
            change = change.to(decode.table_SP.device, non_blocking=True)
            decode.table_SP.view(-1).index_copy_(0, change[0], change[1].to(torch.int32))
        firsts: Sequence[int] = range(len(rows))
        replays, send, count = self._replays, decode.inputs.send, len(rows)
        has_drafts = self._verify is not None and any(row.drafts for row in rows)
        if has_drafts:
            assert self._verify is not None
            *firsts, count = accumulate((row.num_queries for row in rows), initial=0)
            replays, send = self._verify, decode.inputs.send_drafted
        bucket = buckets.choose(replays.buckets, count)
        assert bucket is not None
        send(rows, update.seats, bucket)
        replays.replay(bucket)
        asking, has_logprobs = self._asking(rows, update.seats)
        extras = self._redraw.launch(rows, firsts, asking) if asking else NO_EXTRAS
        host = self._hosts[self._turn]
        self._turn = 1 - self._turn
        host[0][:count].copy_(decode.drawn_B[:count], non_blocking=True)
        host[1][:count].copy_(decode.logprob_B[:count], non_blocking=True)
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
        return GraphFlight(list(rows), host, extras, event, has_drafts=has_drafts, has_logprobs=has_logprobs)

    def _asking(self, rows: Sequence[Row], seats: Sequence[int]) -> tuple[list[int], bool]:
        """The rows that ask for more than a graph draws, and whether a row asks for logprobs."""
        samplings, seat_B = self._decode.inputs.samplings, np.array(seats, np.int64)
        asks_B, min_tokens_B = samplings.asks_S[seat_B], samplings.min_tokens_S[seat_B]
        if min_tokens_B.any():
            num_output_B = np.array([row.start + 1 - row.prompt_len for row in rows], np.int64)
            asks_B |= num_output_B < min_tokens_B
        return np.flatnonzero(asks_B).tolist(), bool(samplings.has_logprobs_S[seat_B].any())


def is_graph_row(row: Row, most_queries: int) -> bool:
    """Whether a graph can compute the row, and it can be drawn there or behind it."""
    is_token = row.sample is not None and len(row.tokens) == 1 and not row.targets
    return is_token and len(row.drafts) < most_queries

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
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.core.types import TokenOut
from pdserve.engine.gpu import buckets
from pdserve.engine.gpu.graphs import Replays
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.plain_rows import PlainRows, follow, read
from pdserve.engine.gpu.redraw import NO_EXTRAS, Extras, Redraw
from pdserve.engine.gpu.static import StaticDecode
from pdserve.engine.gpu.tables import TableMirror, Update
from pdserve.engine.grammars import RowMasks
from pdserve.engine.interface import NEW_ROW, ChainedRows, EngineSpec, Flight, OnLayer, PlainOuts, Row, RowOut
from pdserve.engine.memory_plan import MemoryPlan
from pdserve.engine.pool import TorchPool
from pdserve.engine.rows import CheckedTables, check_rows
from pdserve.engine.torch_engine import TorchEngine, row_out


@final
class GraphFlight:
    """A step whose draws are on their way to the host."""

    def __init__(
        self,
        count: int,
        host: tuple[Any, Any],
        extras: Extras,
        event: Any | None,
        *,
        drafted: list[Row] | None,
        wants: list[int | None] | None,
    ) -> None:
        """`count` draws. `drafted`: the rows, of a step with drafts; `wants`: of a step in which some row's sampling
        asks for logprobs, what each draw's asks for."""
        self.has_drafts = drafted is not None
        self._count, self._drafted, self._wants = count, drafted, wants
        self._host, self._extras, self._event = host, extras, event

    def wait(self) -> Sequence[RowOut]:
        if self._event is not None:
            self._event.synchronize()
        tokens = self._host[0][: self._count].tolist()
        extras, masks_of = self._extras, self._extras.masks_of
        is_plain = self._drafted is None and self._wants is None
        if is_plain and not any(masks.failed or not masks.masks for masks in masks_of.values()):  # nearly every step
            return PlainOuts(tokens)
        wants = self._wants or [None] * self._count
        logprobs = self._host[1][: self._count].tolist()
        drawn = [
            TokenOut(token_id=token, logprob=logprob if wanted is not None else None)
            for token, logprob, wanted in zip(tokens, logprobs, wants, strict=True)
        ]
        for at in extras.top_of:
            drawn[at] = replace(drawn[at], top=extras.top(at, wants[at] or 0))
        left = iter(drawn)
        if self._drafted is None:
            return [_out(one, masks_of.get(index)) for index, one in enumerate(drawn)]
        return [
            row_out(row, list(islice(left, row.num_queries)), masks_of.get(index))
            for index, row in enumerate(self._drafted)
        ]


def _out(token: TokenOut, masks: RowMasks | None) -> RowOut:
    """Of a row without drafts; under a grammar its draw counts only if it had a mask."""
    if masks is None:
        return RowOut((token,))
    return RowOut((token,) if masks.masks else (), failed=masks.failed)


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
        self._last: PlainRows | None = None  # of the last launch, where its draws are still on the device
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
        last, self._last = self._last, None
        number = 0
        if isinstance(rows, ChainedRows):
            if last is not None and last.number == rows.before and (flight := self._follow(last, rows, after)):
                return flight
            number, rows = rows.number, list(rows)
        if not isinstance(after, GraphFlight) or after.has_drafts:
            if any(row.follows is not None for row in rows):
                raise InternalError("a row follows a step that does not run")
            check_rows(self._eager.spec, rows, self._tables)
        fast = self._takes(rows)
        if not fast:
            return DoneFlight(self._eager.step(rows, on_layer))
        if len(fast) == len(rows):
            return self._replay(rows, number)
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

    def _follow(self, last: PlainRows, rows: ChainedRows, after: Flight | None) -> GraphFlight | None:
        """Of rows that continue the last step; None where a row needs to be looked at otherwise."""
        new = {index: rows[index] for index, place in enumerate(rows.places) if place == NEW_ROW}
        is_running = isinstance(after, GraphFlight) and not after.has_drafts
        if len(new) == len(rows) or (rows.is_ahead and not is_running):
            return None
        bucket = buckets.choose(self._replays.buckets, len(rows))
        if bucket is None or not all(is_graph_row(row, self._decode.most_queries) for row in new.values()):
            return None
        check_rows(self._eager.spec, list(new.values()), self._tables)
        plain, update = follow(last, rows, new, self._mirror, self._eager.spec.block_size)
        self._decode.inputs.samplings.update(
            [int(plain.seat_B[index]) for index in new], [sampling_of(row) for row in new.values()]
        )
        return self._replay_plain(rows, plain, update, bucket)

    def _replay(self, rows: Sequence[Row], number: int = 0) -> GraphFlight:
        decode = self._decode
        if self._verify is not None and any(row.drafts for row in rows):
            return self._replay_drafted(rows, self._verify)
        plain, update = read(rows, self._mirror, self._eager.spec.block_size, number)
        bucket = buckets.choose(self._replays.buckets, len(rows))
        assert bucket is not None
        decode.inputs.samplings.update(update.seats, [sampling_of(row) for row in rows])
        return self._replay_plain(rows, plain, update, bucket)

    @torch.inference_mode()
    def _replay_plain(self, rows: Sequence[Row], plain: PlainRows, update: Update, bucket: int) -> GraphFlight:
        decode = self._decode
        self._send_tables(update)
        decode.inputs.send(plain, bucket)
        self._replays.replay(bucket)
        asking, has_logprobs = self._asking(plain.seat_B, plain.start_B + 1 - plain.prompt_len_B)
        extras = self._redraw.launch(rows, range(len(rows)), asking) if asking else NO_EXTRAS
        wants = decode.inputs.samplings.logprobs(plain.seat_B.tolist()) if has_logprobs else None
        host, event = self._fetch(len(rows))
        self._last = plain if plain.number else None
        return GraphFlight(len(rows), host, extras, event, drafted=None, wants=wants)

    @torch.inference_mode()
    def _replay_drafted(self, rows: Sequence[Row], verify: Replays) -> GraphFlight:
        decode = self._decode
        update = self._mirror.update([row.blocks for row in rows])
        self._send_tables(update)
        *firsts, count = accumulate((row.num_queries for row in rows), initial=0)
        bucket = buckets.choose(verify.buckets, count)
        assert bucket is not None
        decode.inputs.send_drafted(rows, update.seats, bucket)
        verify.replay(bucket)
        num_output_B = np.array([row.start + 1 - row.prompt_len for row in rows], np.int64)
        asking, has_logprobs = self._asking(np.array(update.seats, np.int64), num_output_B)
        extras = self._redraw.launch(rows, firsts, asking) if asking else NO_EXTRAS
        wants = [sampling_of(row).logprobs for row in rows for _ in range(row.num_queries)] if has_logprobs else None
        host, event = self._fetch(count)
        return GraphFlight(count, host, extras, event, drafted=list(rows), wants=wants)

    def _send_tables(self, update: Update) -> None:
        if update.at:
            table_SP = self._decode.table_SP
            change = torch.tensor([update.at, update.block], pin_memory=self._is_cuda)
            change = change.to(table_SP.device, non_blocking=True)
            table_SP.view(-1).index_copy_(0, change[0], change[1].to(torch.int32))

    def _fetch(self, count: int) -> tuple[tuple[Tensor, Tensor], Any | None]:
        """Where the first `count` draws will be on the host, and the event behind which they are there."""
        decode, host = self._decode, self._hosts[self._turn]
        self._turn = 1 - self._turn
        host[0][:count].copy_(decode.drawn_B[:count], non_blocking=True)
        host[1][:count].copy_(decode.logprob_B[:count], non_blocking=True)
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
        return host, event

    def _asking(self, seat_B: Any, num_output_B: Any) -> tuple[list[int], bool]:
        """The rows that ask for more than a graph draws, and whether a row asks for logprobs."""
        samplings = self._decode.inputs.samplings
        asks_B, min_tokens_B = samplings.asks_S[seat_B], samplings.min_tokens_S[seat_B]
        if min_tokens_B.any():
            asks_B |= num_output_B < min_tokens_B
        return np.flatnonzero(asks_B).tolist(), bool(samplings.has_logprobs_S[seat_B].any())


def is_graph_row(row: Row, most_queries: int) -> bool:
    """Whether a graph can compute the row, and it can be drawn there or behind it."""
    is_token = row.sample is not None and len(row.tokens) == 1 and not row.targets
    return is_token and len(row.drafts) < most_queries

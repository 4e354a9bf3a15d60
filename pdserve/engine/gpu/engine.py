"""The engine of a CUDA device: decode rows use graphs, everything else the eager engine.

A graph row has one token, or one token and drafts if the engine was opened for them; a step with drafts uses a graph
for rows of several tokens. Everything beyond plain sampling is launched after the graph (resample.py). A step of graph
rows only is launched without waiting until `Flight.wait`, and without drafts it can be launched while the previous step
runs (asynchronous scheduling). Other steps are computed at launch: prompts, and the rows of a mixed step that can still
use the graph.

In a step that was scheduled asynchronously, the graph computes the logits and samples for plain rows. If a row's
sampling needs the token of the previous step (a grammar, bad words), the work after the graph waits until the host
knows it; the device computes in the meantime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.core.types import TokenOut
from pdserve.engine.gpu.graphs import Replays, StaticDecode
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.kernels import fixed_shapes
from pdserve.engine.gpu.plain_rows import (
    PlainRows,
    TableMirror,
    Update,
    Words,
    drafted_words,
    follow,
    from_words,
    plain_words,
    read,
    row_words,
)
from pdserve.engine.gpu.resample import NO_EXTRAS, Extras, ResampledRows, Resampler, RowsByNumber
from pdserve.engine.interface import NEW_ROW, ContinuedRows, EngineSpec, Flight, OnLayer, PlainOuts, Row, RowOut
from pdserve.engine.memory.plan import MemoryPlan
from pdserve.engine.memory.pool import TorchPool
from pdserve.engine.rows import CheckedTables, check_rows
from pdserve.engine.sampling.grammars import Moves, RowMasks
from pdserve.engine.torch_engine import TorchEngine, row_out

# --- launched steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of a step that are being copied to the host."""

    host: tuple[Any, Any]  # tokens and logprobs
    event: Any | None  # event after which they are there; None without a device
    extras: Extras


@final
class GraphFlight:
    """A step whose results are being copied to the host, or whose forward pass runs before its sampling is launched."""

    def __init__(
        self,
        count: int,
        sampled: Sampled | Callable[[Mapping[int, Row]], Sampled],
        *,
        drafted: list[Row] | None = None,
        wants: list[int | None] | None = None,
        unsampled: Sequence[int] = (),
    ) -> None:
        """`count` sampled tokens. `drafted`: the rows of a step with drafts. `wants`: the requested logprobs of each
        sampled token, if any row requests some. `sampled`: the function that samples the unsampled rows, if there are
        any."""
        self.has_drafts = drafted is not None
        self.unsampled = unsampled
        self._token_ids: list[int] = []  # once it was waited for
        self._count, self._drafted, self._wants = count, drafted, wants
        self._sampled = sampled

    def moves(self, places: list[int]) -> Moves:
        """For rows of the next step, by their places in this one: the cursors of their grammars, if any, and the tokens
        that they have sampled. Called after `wait`."""
        extras = self._sampled.extras if isinstance(self._sampled, Sampled) else NO_EXTRAS
        token_ids = [self._token_ids[place] for place in places]
        if places == extras.bound:  # nearly every step
            return extras.cursors, token_ids
        cursor_of = dict(zip(extras.bound, extras.cursors, strict=True))
        return [cursor_of.get(place) for place in places], token_ids

    def sample(self, rows: Mapping[int, Row]) -> None:
        assert not isinstance(self._sampled, Sampled), "it was sampled before"
        self._sampled = self._sampled(rows)
        self.unsampled = ()

    def wait(self) -> Sequence[RowOut]:
        sampled = self._sampled
        if not isinstance(sampled, Sampled):
            raise InternalError(f"{len(self.unsampled)} rows were not sampled before they are waited for")
        if sampled.event is not None:
            sampled.event.synchronize()
        tokens = self._token_ids = sampled.host[0][: self._count].tolist()
        extras, masks_of = sampled.extras, sampled.extras.masks_of
        is_plain = self._drafted is None and self._wants is None
        if is_plain and not any(masks.failed or not masks.masks for masks in masks_of.values()):  # the usual case
            return PlainOuts(tokens)
        wants = self._wants or [None] * self._count
        logprobs = sampled.host[1][: self._count].tolist()
        outs = [
            TokenOut(token_id=token, logprob=logprob if wanted is not None else None)
            for token, logprob, wanted in zip(tokens, logprobs, wants, strict=True)
        ]
        for at in extras.top_of:
            outs[at] = replace(outs[at], top=extras.top(at, wants[at] or 0))
        left = iter(outs)
        if self._drafted is None:
            return [_out(one, masks_of.get(index)) for index, one in enumerate(outs)]
        return [
            row_out(row, list(islice(left, row.num_queries)), masks_of.get(index))
            for index, row in enumerate(self._drafted)
        ]


def _out(token: TokenOut, masks: RowMasks | None) -> RowOut:
    """For a row without drafts. With a grammar, its token is valid only if it had a mask."""
    if masks is None:
        return RowOut((token,))
    return RowOut((token,) if masks.masks else (), failed=masks.failed)


@final
class DoneFlight:
    """A step that was computed at launch."""

    unsampled: Sequence[int] = ()

    def __init__(self, outs: list[RowOut]) -> None:
        self._outs = outs

    def sample(self, rows: Mapping[int, Row]) -> None:
        raise InternalError("every row of the step was sampled when it was launched")

    def wait(self) -> list[RowOut]:
        return self._outs


# --- engine ---------------------------------------------------------------------------------------------------

SendWords = Callable[[Words], None]


@final
class GraphEngine:
    """Supports asynchronous scheduling. All steps run in order on the stream that is current when they are launched."""

    def __init__(
        self, eager: TorchEngine, decode: StaticDecode, replays: Replays, verify: Replays | None = None
    ) -> None:
        """`verify`: graphs of steps with drafts, with buckets of tokens."""
        self._eager, self._decode, self._replays, self._verify = eager, decode, replays, verify
        self._tables = CheckedTables(2 * decode.num_seq_slots)
        self._mirror = TableMirror(decode.num_seq_slots, decode.num_pages)
        is_cuda = self._is_cuda = decode.table_SP.device.type == "cuda"
        size = len(decode.sampled_B)
        # Two, because a flight may be read while the next one is running.
        self._hosts = [
            (
                torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda),
                torch.zeros(size, dtype=torch.float32, pin_memory=is_cuda),
            )
            for _ in range(2)
        ]
        self._turn = 0
        self._send_words: SendWords | None = None
        self._followed: deque[Any] = deque(maxlen=2)  # events of the last graphs that this rank has followed
        self._last: PlainRows | None = None  # number of the last launch, if its sampled tokens are still on the device
        self._resampler = Resampler(decode, eager.grammars, eager.spec.eos_token_ids)
        if decode.is_leader:  # other ranks do not sample
            self._resampler.warm()

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

    def send_steps_to_ranks(self, send: SendWords) -> None:
        """For the leader of tensor-parallel ranks: `send` is called before every computation in which the others take
        part, with the arguments of their `follow`."""
        self._send_words = send

    @torch.inference_mode()
    def follow(self, words: Sequence[int]) -> None:
        """Takes part in a step for which another rank samples, and returns while the device computes it."""
        part = from_words(words, self._eager.spec.block_size)
        if part.rows:
            self._eager.follow(part.rows)
            return
        if len(self._followed) == self._followed.maxlen and self._is_cuda:
            self._followed[0].synchronize()  # pinned inputs alternate; a follower's flights are not waited for
        if part.plain is not None:
            self._begin_plain(part.plain, part.update, self._bucket(self._replays, len(part.plain.seq_slot_B)))
        else:
            assert self._verify is not None
            self._begin_drafted(part.drafted, part.update, self._verify)
        self._followed.append(self._recorded())

    def close(self) -> None:
        self._eager.close()

    def _launch(self, rows: Sequence[Row], after: Flight | None, on_layer: OnLayer | None) -> Flight:
        if isinstance(after, GraphFlight) and after.unsampled:
            raise InternalError(
                f"{len(after.unsampled)} rows of the step before were not sampled before the next launch"
            )
        last, self._last = self._last, None
        number = 0
        if isinstance(rows, ContinuedRows):
            if last is not None and last.number == rows.before and (flight := self._follow(last, rows, after)):
                return flight
            number, rows = rows.number, list(rows)
        if not isinstance(after, GraphFlight) or after.has_drafts:
            if any(row.follows is not None for row in rows):
                raise InternalError("a row follows a step that does not run")
            check_rows(self._eager.spec, rows, self._tables)
        fast = self._takes(rows)
        if not fast:
            return DoneFlight(self._compute(rows, on_layer))
        if len(fast) == len(rows):
            return self._replay(rows, number, after)
        if any(row.follows is not None for row in rows):
            raise InternalError("a step that was scheduled asynchronously has rows that no graph can compute")
        flight = self._replay([rows[index] for index in fast])
        taken = set(fast)
        slow = [index for index in range(len(rows)) if index not in taken]
        outs: list[RowOut] = [RowOut()] * len(rows)
        for index, out in zip(slow, self._compute([rows[index] for index in slow], on_layer), strict=True):
            outs[index] = out
        for index, out in zip(fast, flight.wait(), strict=True):
            outs[index] = out
        return DoneFlight(outs)

    def _compute(self, rows: Sequence[Row], on_layer: OnLayer | None) -> list[RowOut]:
        """Computes rows without a graph."""
        if self._send_words is not None and rows:
            self._send_words(row_words(rows))
        return self._eager.step(rows, on_layer)

    def _takes(self, rows: Sequence[Row]) -> list[int]:
        """Launches rows that use one graph together."""
        most_queries = self._decode.most_queries
        fast = [index for index, row in enumerate(rows) if is_graph_row(row, most_queries)]
        if self._verify is not None and any(rows[index].drafts for index in fast):
            if fixed_shapes.choose(self._verify.buckets, sum(rows[index].num_queries for index in fast)) is not None:
                return fast
            fast = [index for index in fast if not rows[index].drafts]
        return fast if fixed_shapes.choose(self._replays.buckets, len(fast)) is not None else []

    def _follow(self, last: PlainRows, rows: ContinuedRows, after: Flight | None) -> GraphFlight | None:
        """Launches rows that continue the last step; None if a row needs another path."""
        new = {index: rows[index] for index, place in enumerate(rows.places) if place == NEW_ROW}
        is_running = isinstance(after, GraphFlight) and not after.has_drafts
        if len(new) == len(rows) or (rows.is_async and not is_running):
            return None
        bucket = fixed_shapes.choose(self._replays.buckets, len(rows))
        if bucket is None or not all(is_graph_row(row, self._decode.most_queries) for row in new.values()):
            return None
        check_rows(self._eager.spec, list(new.values()), self._tables)
        plain, update = follow(last, rows, new, self._mirror, self._eager.spec.block_size)
        self._decode.inputs.samplings.update(
            [int(plain.seq_slot_B[index]) for index in new], [sampling_of(row) for row in new.values()]
        )
        return self._replay_plain(rows, plain, update, bucket, after)

    def _replay(self, rows: Sequence[Row], number: int = 0, after: Flight | None = None) -> GraphFlight:
        decode = self._decode
        if self._verify is not None and any(row.drafts for row in rows):
            return self._replay_drafted(rows, self._verify)
        plain, update = read(rows, self._mirror, self._eager.spec.block_size, number)
        bucket = self._bucket(self._replays, len(rows))
        decode.inputs.samplings.update(update.seq_slots, [sampling_of(row) for row in rows])
        return self._replay_plain(rows, plain, update, bucket, after)

    @torch.inference_mode()
    def _replay_plain(
        self, rows: Sequence[Row], plain: PlainRows, update: Update, bucket: int, after: Flight | None
    ) -> GraphFlight:
        decode = self._decode
        if self._send_words is not None:
            self._send_words(plain_words(plain, update))
        self._begin_plain(plain, update, bucket)
        resampled = self._resampled_rows(plain.seq_slot_B, plain.start_B + 1 - plain.prompt_len_B)
        wants = decode.inputs.samplings.logprobs(plain.seq_slot_B.tolist()) if resampled.has_logprobs else None
        self._last = plain if plain.number else None
        if resampled.rows and isinstance(after, GraphFlight) and self._awaits_tokens(rows, plain):
            later = partial(self._sample_known, plain, resampled, after)
            return GraphFlight(len(rows), later, wants=wants, unsampled=resampled.rows)
        return GraphFlight(len(rows), self._sample(rows, range(len(rows)), resampled, len(rows)), wants=wants)

    def _awaits_tokens(self, rows: Sequence[Row], plain: PlainRows) -> bool:
        """Whether the sampling of any row needs a token that the previous step samples."""
        if isinstance(rows, ContinuedRows) and not rows.is_async:
            return False
        needs_history_B = self._decode.inputs.samplings.needs_history_S[plain.seq_slot_B]
        return bool((needs_history_B & (plain.follows_B != NEW_ROW)).any())

    @torch.inference_mode()
    def _sample_known(
        self, plain: PlainRows, resampled: ResampledRows, before: GraphFlight, rows: Mapping[int, Row]
    ) -> Sampled:
        """The part after the graph of a step whose rows follow `before`, for those of `resampled` in `rows`."""
        resampled, count = resampled.of(rows), len(plain.follows_B)
        moves = before.moves(plain.follows_B[resampled.bound].tolist()) if resampled.bound else None
        return self._sample(rows, range(count), resampled, count, moves)

    def _sample(
        self,
        rows: RowsByNumber,
        firsts: Sequence[int],
        resampled: ResampledRows,
        count: int,
        moves: Moves | None = None,
    ) -> Sampled:
        """Launches everything beyond the graph for the rows, and the copy of all results to the host."""
        extras = self._resampler.launch(rows, firsts, resampled, moves) if resampled.rows else NO_EXTRAS
        host, event = self._fetch(count)
        return Sampled(host, event, extras)

    @torch.inference_mode()
    def _replay_drafted(self, rows: Sequence[Row], verify: Replays) -> GraphFlight:
        update = self._mirror.update([row.blocks for row in rows])
        if self._send_words is not None:
            self._send_words(drafted_words(rows, update, self._eager.spec.block_size))
        firsts, count = self._begin_drafted(rows, update, verify)
        num_output_B = np.array([row.start + 1 - row.prompt_len for row in rows], np.int64)
        resampled = self._resampled_rows(np.array(update.seq_slots, np.int64), num_output_B)
        # A grammar's mask changes after a draft, so these rows are masked one by one.
        resampled = ResampledRows(
            rows=resampled.rows, bound=[], others=resampled.rows, has_logprobs=resampled.has_logprobs
        )
        has_logprobs = resampled.has_logprobs
        wants = [sampling_of(row).logprobs for row in rows for _ in range(row.num_queries)] if has_logprobs else None
        return GraphFlight(count, self._sample(rows, firsts, resampled, count), drafted=list(rows), wants=wants)

    def _begin_plain(self, plain: PlainRows, update: Update, bucket: int) -> None:
        self._send_tables(update)
        self._decode.inputs.send(plain, bucket)
        self._replays.replay(bucket)

    def _begin_drafted(self, rows: Sequence[Row], update: Update, verify: Replays) -> tuple[Sequence[int], int]:
        """The first token of each row, and the number of tokens."""
        *firsts, count = accumulate((row.num_queries for row in rows), initial=0)
        bucket = self._bucket(verify, count)
        self._send_tables(update)
        self._decode.inputs.send_drafted(rows, update.seq_slots, bucket)
        verify.replay(bucket)
        return firsts, count

    def _bucket(self, replays: Replays, count: int) -> int:
        bucket = fixed_shapes.choose(replays.buckets, count)
        assert bucket is not None
        return bucket

    def _send_tables(self, update: Update) -> None:
        if update.at:
            table_SP = self._decode.table_SP
            change = torch.tensor([update.at, update.block], pin_memory=self._is_cuda)
            change = change.to(table_SP.device, non_blocking=True)
            table_SP.view(-1).index_copy_(0, change[0], change[1].to(torch.int32))

    def _fetch(self, count: int) -> tuple[tuple[Tensor, Tensor], Any | None]:
        """The host memory for the first `count` results, and the event after which they are there."""
        decode, host = self._decode, self._hosts[self._turn]
        self._turn = 1 - self._turn
        host[0][:count].copy_(decode.sampled_B[:count], non_blocking=True)
        host[1][:count].copy_(decode.logprob_B[:count], non_blocking=True)
        return host, self._recorded()

    def _recorded(self) -> Any | None:
        """An event after the queued work; None without a device."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _resampled_rows(self, seq_slot_B: Any, num_output_B: Any) -> ResampledRows:
        samplings = self._decode.inputs.samplings
        is_resampled_B, min_tokens_B = samplings.is_resampled_S[seq_slot_B], samplings.min_tokens_S[seq_slot_B]
        if min_tokens_B.any():
            is_resampled_B |= num_output_B < min_tokens_B
        rows = np.flatnonzero(is_resampled_B).tolist()
        has_logprobs = bool(samplings.has_logprobs_S[seq_slot_B].any())
        if not rows:
            return ResampledRows(rows=[], bound=[], others=[], has_logprobs=has_logprobs)
        is_bound_B = samplings.is_bound_S[seq_slot_B]
        return ResampledRows(
            rows=rows,
            bound=np.flatnonzero(is_resampled_B & is_bound_B).tolist(),
            others=np.flatnonzero(is_resampled_B & ~is_bound_B).tolist(),
            has_logprobs=has_logprobs,
        )


def is_graph_row(row: Row, most_queries: int) -> bool:
    """Whether a graph can compute the row, and it can be sampled in or after the graph."""
    is_token = row.sample is not None and len(row.tokens) == 1 and not row.targets
    return is_token and len(row.drafts) < most_queries

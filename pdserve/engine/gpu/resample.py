"""Samples again, after a graph, the rows that need more: grammars, bans, bias, penalties, top_n_sigma. Also reports the
top logprobs.

The graph computes every row's logits and samples from them unchanged. Additional work for few rows is launched kernel
by kernel while the graph runs, so the host's part of it (grammar masks, launches) costs no time, and batches without
such rows are not affected. Order and meaning are those of sampling.py. Nothing waits for the device.
"""

# Shapes: B rows of a bucket, S rows that are sampled again, R of them under bans, P with penalties, N biases, L rows
# whose logprobs are reported, K likeliest tokens, V vocabulary, W words of 32 tokens.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine.gpu.bans import Bans
from pdserve.engine.gpu.forbid import forbid
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.penalties import Penalties
from pdserve.engine.gpu.static import StaticDecode
from pdserve.engine.grammars import Cursor, Grammars, Moves
from pdserve.engine.host_to_device import to_device
from pdserve.engine.interface import Row
from pdserve.engine.matchers import RowMasks
from pdserve.engine.sampling import keep_top_sigma

RowsByNumber = Sequence[Row] | Mapping[int, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledRows:
    """Which rows of a step need more than the graph's sampling, by number, and whether any row needs logprobs."""

    rows: list[int]  # `bound` and `others`
    bound: list[int]  # they need a grammar's mask and nothing else, and have no drafts
    others: list[int]
    has_logprobs: bool = False

    def of(self, rows: Mapping[int, Row]) -> Self:
        """Those in `rows`."""
        if len(rows) == len(self.rows):
            return self
        bound, others = ([index for index in each if index in rows] for each in (self.bound, self.others))
        return replace(self, rows=sorted(rows), bound=bound, others=others)


@dataclass(frozen=True, slots=True)
class Extras:
    """Results of a step besides tokens and logprobs."""

    masks_of: dict[int, RowMasks] = field(default_factory=dict)  # by row: result of its grammar
    bound: list[int] = field(default_factory=list)  # rows whose masks were filled together
    cursors: Sequence[Cursor | None] = ()  # of each of them, for the next step
    top_of: dict[int, int] = field(default_factory=dict)  # by token of the step: the row of `tops`
    tops: tuple[Tensor, Tensor] | None = None  # token ids and logprobs [L, K] on the host, once the step has ended

    def top(self, token: int, count: int) -> tuple[tuple[int, float], ...]:
        if self.tops is None or token not in self.top_of:
            return ()
        at = self.top_of[token]
        token_K, logprob_K = (each[at, :count].tolist() for each in self.tops)
        return tuple(zip(token_K, logprob_K, strict=True))


NO_EXTRAS = Extras()


def draws_of(row: Row) -> Iterator[Row]:
    """The row, and one row after each of its drafts, as if that draft and the previous ones were accepted."""
    if not row.drafts:
        yield row
        return
    text = [*row.history, *row.drafts]
    for at in range(row.num_queries):
        end = len(row.history) + at
        yield replace(row, tokens=(text[end - 1],), start=row.start + at, history=text[:end], drafts=())


@final
class Resampler:
    def __init__(self, decode: StaticDecode, grammars: Grammars, eos_token_ids: Sequence[int]) -> None:
        self._decode, self._grammars = decode, grammars
        most_tokens, vocab_size = decode.logits_BV.shape
        self._bans = Bans(vocab_size, eos_token_ids, 2 * most_tokens)
        self._device = decode.logits_BV.device
        self._penalties = Penalties(vocab_size, most_tokens, self._device)
        self._is_cuda = self._device.type == "cuda"
        self._mask_words = max(self._bans.num_words, grammars.num_words)
        # Used in turns, because the copy of the last step's masks may not have ended; at most two steps run.
        self._masks = [torch.empty((0, self._mask_words), dtype=torch.int32) for _ in range(2)]
        self._turn = 0

    @torch.inference_mode()
    def warm(self) -> None:
        """Compiles the kernels that no capture contains, so that the first such row does not wait for a compiler."""
        sampling = Sampling(
            temperature=0.0,
            allowed_token_ids=(0,),
            logit_bias=((0, 1.0),),
            repetition_penalty=2.0,
            top_n_sigma=1.0,
            logprobs=1,
        )
        row = Row(tokens=(0,), start=0, blocks=(), sample=sampling, history=[0], prompt_len=1)
        self.launch([row], [0], ResampledRows(rows=[0], bound=[], others=[0]))

    def launch(
        self, rows: RowsByNumber, firsts: Sequence[int], resampled: ResampledRows, moves: Moves | None = None
    ) -> Extras:
        """Called after the replay of `rows`, for those that need more; `firsts`: the first token of each row. `moves`:
        for each of `resampled.bound`, the cursor of the previous step, if any, and the token that it sampled."""
        others = resampled.others
        resampled_rows = [rows[index] for index in others]
        masks_by_number = self._grammars.masks_of(resampled_rows) if resampled_rows else {}
        masks_of = {others[number]: masks for number, masks in masks_by_number.items()}
        sampled_by: dict[int, Row] = {}  # by token of the step, as all below
        words_of: dict[int, Any] = {}
        for index, resampled_row in zip(others, resampled_rows, strict=True):
            masks = masks_of.get(index)
            for at, row in enumerate(draws_of(resampled_row)):
                # Tokens after a draft that the grammar forbids are ignored.
                if masks is not None and at >= len(masks.masks):
                    break
                sampled_by[firsts[index] + at] = row
                words = self._bans.words(row, None if masks is None else masks.masks[at])
                if words is not None:
                    words_of[firsts[index] + at] = words
        bound = resampled.bound
        mask_RW = self._take_masks(len(bound) + len(words_of))
        cursors: Sequence[Cursor | None] = ()
        if bound:
            words_RW = mask_RW[: len(bound)].numpy()
            filled = self._grammars.fill(lambda at: rows[bound[at]], words_RW, moves)
            cursors = filled.cursors
            for number, reason in filled.failed.items():
                words_RW[number] = -1  # every token is allowed; the sampled one is ignored
                masks_of[bound[number]] = RowMasks(failed=reason)
        for at, words in enumerate(words_of.values(), len(bound)):
            mask_RW[at].numpy()[: len(words)] = words.view("int32")
        again = [token for token, row in sampled_by.items() if token in words_of or sampling_of(row).adjusts_logits]
        if again or bound:
            self._draw(sampled_by, again, [firsts[index] for index in bound], list(words_of), mask_RW)
        top_of, tops = self._logprobs(sampled_by, set(again))
        return Extras(masks_of, bound, cursors, top_of, tops)

    def _take_masks(self, count: int) -> Tensor:
        """Memory for the masks of one step, int32 [count, W], pinned if there is a device. Masks are written there once
        and copied from there."""
        self._turn = 1 - self._turn
        have = len(self._masks[self._turn])
        if have < count:
            size = max(count, 2 * have), self._mask_words
            self._masks[self._turn] = torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)
        return self._masks[self._turn][:count]

    def _draw(
        self,
        rows: Mapping[int, Row],
        again: Sequence[int],
        bound: Sequence[int],
        masked: Sequence[int],
        mask_RW: Tensor,
    ) -> None:
        """`mask_RW` are those of the tokens `bound` and of `masked`, which are among `again`."""
        decode = self._decode
        row_S = to_device(np.array([*bound, *again]), self._device)
        logits_SV = decode.logits_BV.index_select(0, row_S).float()
        place = {index: at for at, index in enumerate(again, len(bound))}
        if len(mask_RW):
            row_R = to_device(np.array([*range(len(bound)), *(place[index] for index in masked)]), self._device)
            forbid(logits_SV, mask_RW.to(self._device, non_blocking=True), row_R)
        size = logits_SV.shape[1]
        biases = [
            (place[index] * size + token, bias)
            for index in again
            for token, bias in sampling_of(rows[index]).logit_bias
        ]
        if biases:
            at_N = to_device([at for at, _ in biases], self._device)
            logits_SV.view(-1).index_add_(0, at_N, to_device([bias for _, bias in biases], self._device, torch.float32))
        penalised = [index for index in again if sampling_of(rows[index]).is_penalised]
        if penalised:
            row_P = to_device([place[index] for index in penalised], self._device)
            slot_P = self._penalties.apply([rows[index] for index in penalised], logits_SV, row_P)
        limited = [index for index in again if sampling_of(rows[index]).top_n_sigma > 0.0]
        if limited:
            row_R = to_device([place[index] for index in limited], self._device)
            sigma_R = to_device(
                [sampling_of(rows[index]).top_n_sigma for index in limited], self._device, torch.float32
            )
            logits_SV.index_copy_(0, row_R, keep_top_sigma(logits_SV.index_select(0, row_R), sigma_R))
        sampled_S, _ = decode.sampler.draw(logits_SV, decode.inputs.draws_of(row_S), parts=decode.sampler.most_parts)
        if penalised:
            self._penalties.count(slot_P, sampled_S.index_select(0, row_P))
        decode.sampled_B.index_copy_(0, row_S, sampled_S)

    def _logprobs(
        self, rows: Mapping[int, Row], again: set[int]
    ) -> tuple[dict[int, int], tuple[Tensor, Tensor] | None]:
        """Logprobs of the tokens that were sampled again, and the most likely tokens, from the model's unchanged
        logits."""
        counts = {index: sampling_of(row).logprobs for index, row in rows.items()}
        reported = [index for index in counts if counts[index] or (counts[index] == 0 and index in again)]
        if not reported:
            return {}, None
        decode = self._decode
        row_L = to_device(reported, self._device)
        logprob_LV = decode.logits_BV.index_select(0, row_L).log_softmax(dim=-1, dtype=torch.float32)
        sampled_L1 = decode.sampled_B.index_select(0, row_L)[:, None]
        decode.logprob_B.index_copy_(0, row_L, logprob_LV.gather(1, sampled_L1)[:, 0])
        most = min(max(counts[index] or 0 for index in reported), logprob_LV.shape[1])
        if not most:
            return {}, None
        top_LK = logprob_LV.topk(most, dim=-1)
        tops = self._fetch(top_LK.indices), self._fetch(top_LK.values)
        return {index: at for at, index in enumerate(reported)}, tops

    def _fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda)
        return host.copy_(tensor, non_blocking=True)

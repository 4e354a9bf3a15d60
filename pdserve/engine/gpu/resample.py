"""Samples again, after a graph, the rows that need more: grammars, bans, bias, penalties, top_n_sigma. Also reports the
top logprobs.

The graph computes every row's logits and samples from them unchanged. Additional work for few rows is launched kernel
by kernel while the graph runs, so the host's part of it (grammar masks, launches) costs no time, and batches without
such rows are not affected. Order and meaning are those of engine/sampling/sampler.py. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine.gpu.graphs import StaticDecode
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.kernels.fixed_shapes import CountSlots
from pdserve.engine.interface import Row
from pdserve.engine.model.batch import to_device
from pdserve.engine.sampling.grammars import Cursor, Grammars, Moves, RowMasks
from pdserve.engine.sampling.sampler import BANS, Draw, forbid, keep_top_sigma, mask, may_ban

# --- banned tokens as bits ------------------------------------------------------------------------------------
# The tokens that a row may sample: grammars and bans. The bits are computed by applying engine/sampling/sampler.py,
# which defines these rules, to a row of zeros.

# Shapes: V vocabulary, W words of 32 tokens.


@final
class Bans:
    """Caches the bits of rows whose bans do not change, for up to `most_rows` rows."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], most_rows: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._vocab_size, self._ends, self._most_rows = vocab_size, tuple(eos_token_ids), most_rows
        # By identity, with the sampling itself so that its identity is not reused. Hashing it could take longer.
        self._still: OrderedDict[tuple[int, bool], tuple[Sampling, Any]] = OrderedDict()

    def words(self, row: Row, allowed: bytes | memoryview | None) -> Any | None:
        """Bit t % 32 of word t // 32 is set if token t may be sampled, uint32 [W]; None if all may.

        `allowed`: the mask of the row's grammar, if it has one.
        """
        sampling = row.sample
        assert sampling is not None
        if not may_ban(sampling):  # the usual case
            return None if allowed is None else self._padded(np.frombuffer(allowed, np.uint8))
        # If a row's last token is not known yet, only the number of tokens may be used.
        history = row.history if row.follows is None else range(row.start + 1)
        draw = Draw(sampling, history, row.prompt_len, allowed)
        if not any(one.applies(draw) for one in BANS):
            return None if allowed is None else self._padded(np.frombuffer(allowed, np.uint8))
        if sampling.needs_history:
            return self._words(draw)
        key = id(sampling), draw.num_output < sampling.min_tokens
        if key not in self._still:
            self._still[key] = sampling, self._words(draw)
            if len(self._still) > self._most_rows:
                self._still.popitem(last=False)
        self._still.move_to_end(key)
        return self._still[key][1]

    def _words(self, draw: Draw) -> Any:
        allowed_1V = forbid(torch.zeros(1, self._vocab_size), [draw])
        left_1V = allowed_1V.clone()
        mask(left_1V, allowed_1V, {0: draw}, self._ends)
        return self._padded(np.packbits(left_1V[0].numpy() > -math.inf, bitorder="little"))

    def _padded(self, given: Any) -> Any:
        """Like masks.forbid: a shorter mask bans the remaining tokens, and extra bits of a longer one are ignored."""
        if len(given) == 4 * self.num_words:
            return given.view(np.uint32)
        words = np.zeros(self.num_words, np.uint32)
        count = min(len(given), 4 * self.num_words)
        words.view(np.uint8)[:count] = given[:count]
        return words


# --- banned tokens in the logits ------------------------------------------------------------------------------
# Sets their logits to minus infinity. A mask has one bit per token.

# Shapes: S rows of logits, R those of them with bits, V vocabulary, W words of 32 tokens.

_BLOCK: Final = 1024


@triton.jit
def _forbid(logits, words, row_of, stride, num_words, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_of + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    word = tl.load(words + index * num_words + token // 32, mask=inside, other=0)
    is_banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * stride + token, float("-inf"), mask=inside & is_banned)


def forbid_tokens(logits_SV: Tensor, word_RW: Tensor, row_R: Tensor) -> None:
    """In place. Bit t % 32 of word t // 32 (int32) is set if token t is allowed; `row_R`: int64, each row once."""
    size, num_words = logits_SV.shape[1], word_RW.shape[1]
    if num_words * 32 < size or len(word_RW) != len(row_R):
        raise InternalError(f"bits {tuple(word_RW.shape)} for {len(row_R)} rows of {size} tokens")
    if len(row_R):
        grid = (len(row_R), triton.cdiv(size, _BLOCK))
        _forbid[grid](logits_SV, word_RW, row_R, logits_SV.stride(0), num_words, size, BLOCK=_BLOCK)


# --- penalties ------------------------------------------------------------------------------------------------
# Repetition, presence and frequency penalties, from counts of tokens that stay on the device.
#
# For each penalised row the device holds one word per token of the vocabulary: twice its count in the output, plus one
# if it is in the prompt. Sampled tokens are counted there immediately, so a row can be penalised for a token that the
# host has not read. Same arithmetic in the same order as `sampler.penalise`, in float32.

# Shapes: S rows of logits, P those of them with penalties, V vocabulary, N tokens that a row has seen.

_FEWEST_SLOTS: Final = 8


# The three arrays are adjacent, so their alignment depends on the number of rows.
@triton.jit(do_not_specialize_on_alignment=["repetition_of", "presence_of", "frequency_of"])
def _penalise(
    logits,
    words,
    row_of,
    slot_of,
    repetition_of,
    presence_of,
    frequency_of,
    stride,
    size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    word = tl.load(words + tl.load(slot_of + index) * size + token, mask=inside, other=0)
    if tl.max(word, axis=0) > 0:  # most tokens have not occurred
        at = logits + tl.load(row_of + index) * stride + token
        logit = tl.load(at, mask=inside, other=0.0)
        factor = tl.load(repetition_of + index) + tl.zeros_like(logit)
        logit = tl.where(word > 0, tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor), logit)
        count = word >> 1
        lost = tl.load(presence_of + index) + tl.load(frequency_of + index) * count.to(tl.float32)
        tl.store(at, tl.where(count > 0, logit - lost, logit), mask=inside)


def penalise(logits_SV: Tensor, word_CV: Tensor, row_P: Tensor, slot_P: Tensor, penalty_3P: Tensor) -> None:
    """In place. `word_CV`: int32, `row_P` and `slot_P`: int64; repetition, presence and frequency are float32."""
    size = logits_SV.shape[1]
    if word_CV.shape[1] != size or len(row_P) != len(slot_P):
        raise InternalError(f"counts {tuple(word_CV.shape)} for {len(row_P)} rows of {size} tokens")
    if len(row_P):
        # Products and sums are rounded separately, as in torch.
        _penalise[(len(row_P), triton.cdiv(size, _BLOCK))](
            logits_SV,
            word_CV,
            row_P,
            slot_P,
            *penalty_3P.unbind(),
            logits_SV.stride(0),
            size,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def penalty_bytes(most_rows: int, vocab_size: int) -> int:
    """Bytes of all counts if every row of a full batch has penalties."""
    return 2 * most_rows * vocab_size * 4


@final
class Penalties:
    """The counts of the rows of one engine. Memory is allocated when rows with penalties come: 4 bytes per row and
    token of the vocabulary. `send` copies numbers to the device without blocking."""

    def __init__(self, vocab_size: int, most_rows: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._slots = CountSlots(2 * most_rows)
        self._word_CV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def apply(self, rows: Sequence[Row], logits_SV: Tensor, row_P: Tensor) -> Tensor:
        """Penalises the logits of `rows`, which are `row_P` of `logits_SV`; their slots, for `count`."""
        taken = self._slots.take([(row.history, row.start + 1) for row in rows])
        self._grow(max(slot for slot, _ in taken) + 1)
        for row, (slot, is_known) in zip(rows, taken, strict=True):
            if not is_known:
                self._fill(row, slot)
        slot_P = to_device([slot for slot, _ in taken], self._device)
        samplings = [row.sample for row in rows if row.sample is not None]
        numbers = [
            [one.repetition_penalty for one in samplings],
            [one.presence_penalty for one in samplings],
            [one.frequency_penalty for one in samplings],
        ]
        penalise(logits_SV, self._word_CV, row_P, slot_P, to_device(numbers, self._device, torch.float32))
        return slot_P

    def count(self, slot_P: Tensor, sampled_P: Tensor) -> None:
        """Counts the sampled tokens of the rows, int64."""
        two_P = torch.full_like(sampled_P, 2, dtype=torch.int32)
        self._word_CV.view(-1).index_add_(0, slot_P * self._vocab_size + sampled_P, two_P)

    def _fill(self, row: Row, slot: int) -> None:
        """Counts all tokens of the row."""
        if row.follows is not None:
            raise InternalError("a row with penalties follows a draw that was not counted")
        history = np.fromiter(row.history, np.int64, len(row.history))
        token_N, count_N = np.unique(history[row.prompt_len :], return_counts=True)
        word_V = np.zeros(self._vocab_size, np.int32)
        word_V[token_N] = 2 * count_N
        word_V[history[: row.prompt_len]] |= 1
        self._word_CV[slot].copy_(to_device(word_V, self._device, torch.int32))

    def _grow(self, num_slots: int) -> None:
        have = len(self._word_CV)
        if num_slots > have:
            word_CV = self._word_CV.new_zeros((max(num_slots, 2 * have, _FEWEST_SLOTS), self._vocab_size))
            word_CV[:have] = self._word_CV
            self._word_CV = word_CV


# --- work after a graph ---------------------------------------------------------------------------------------

# Shapes: B rows of a bucket, S rows that are sampled again, R of them under bans, P with penalties, N biases, L rows
# whose logprobs are reported, K likeliest tokens, V vocabulary, W words of 32 tokens.

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
            forbid_tokens(logits_SV, mask_RW.to(self._device, non_blocking=True), row_R)
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

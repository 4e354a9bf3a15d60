"""Repetition, presence and frequency penalties, from counts of tokens that stay on the device.

For each penalised row the device holds one word per token of the vocabulary: twice its count in the output, plus one if
it is in the prompt. Sampled tokens are counted there immediately, so a row can be penalised for a token that the host
has not read. Same arithmetic in the same order as sampling.penalise, in float32.
"""

# Shapes: S rows of logits, P those of them with penalties, V vocabulary, N tokens that a row has seen.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.count_slots import CountSlots
from pdserve.engine.host_to_device import to_device
from pdserve.engine.interface import Row

_BLOCK: Final = 1024
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

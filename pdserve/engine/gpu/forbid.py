"""Sets the logits of banned tokens to minus infinity. A mask has one bit per token."""

# Shapes: S rows of logits, R those of them with bits, V vocabulary, W words of 32 tokens.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError

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


def forbid(logits_SV: Tensor, word_RW: Tensor, row_R: Tensor) -> None:
    """In place. Bit t % 32 of word t // 32 (int32) is set if token t is allowed; `row_R`: int64, each row once."""
    size, num_words = logits_SV.shape[1], word_RW.shape[1]
    if num_words * 32 < size or len(word_RW) != len(row_R):
        raise InternalError(f"bits {tuple(word_RW.shape)} for {len(row_R)} rows of {size} tokens")
    if len(row_R):
        grid = (len(row_R), triton.cdiv(size, _BLOCK))
        _forbid[grid](logits_SV, word_RW, row_R, logits_SV.stride(0), num_words, size, BLOCK=_BLOCK)

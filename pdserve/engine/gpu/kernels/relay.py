"""Copies whole blocks from one pool to another on a device, and computes their checksums.

The checksums are those of extent.checksum for each block, so both ends of a transfer can compare the bytes read and
written. Without a target it only computes checksums. Does not wait for the device.
"""

# Shapes: B blocks, W words of 4 bytes of a block.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels import extent as rule
from pdserve.engine.gpu.kernels.extent import WORD_BYTES

_BLOCK: Final = 4096

_GOLDEN = tl.constexpr(rule.GOLDEN)
_MIX = tl.constexpr(rule.MIX)


@triton.jit
def _relay(
    source,  # int32 words
    target,  # unread unless STORES
    source_of,  # [B] int32
    target_of,
    sums,  # [B] int64
    source_stride,
    target_stride,
    size,  # W
    STORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    word = tl.load(source + tl.load(source_of + index).to(tl.int64) * source_stride + at, mask=inside, other=0)
    if STORES:
        tl.store(target + tl.load(target_of + index).to(tl.int64) * target_stride + at, word, mask=inside)
    mixed = (word.to(tl.uint32, bitcast=True).to(tl.uint64) + (at.to(tl.uint64) + 1) * _GOLDEN) * _MIX
    mixed = tl.where(inside, mixed ^ (mixed >> 32), 0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + index, tl.sum(mixed, axis=0), sem="relaxed")


def relay(source: Tensor, source_B: Tensor, target: Tensor | None = None, target_B: Tensor | None = None) -> Tensor:
    """Copies blocks of `source` [N, block_bytes] to blocks of `target`; returns the int64 checksums [B]. Block numbers
    are int32."""
    into, into_B = (source, source_B) if target is None or target_B is None else (target, target_B)
    size = source.shape[1]
    if size != into.shape[1] or size % WORD_BYTES or len(source_B) != len(into_B):
        raise InternalError(f"{len(source_B)} blocks of {size} bytes to {len(into_B)} of {into.shape[1]}")
    sums_B = torch.zeros(len(source_B), dtype=torch.int64, device=source.device)
    if len(source_B):
        words = size // WORD_BYTES
        _relay[(len(source_B), triton.cdiv(words, _BLOCK))](
            source.view(torch.int32),
            into.view(torch.int32),
            source_B,
            into_B,
            sums_B,
            source.stride(0) // WORD_BYTES,
            into.stride(0) // WORD_BYTES,
            words,
            STORES=target is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return sums_B

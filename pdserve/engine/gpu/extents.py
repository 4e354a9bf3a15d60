"""Copies an extent of many pool blocks into one staging buffer, or out of it, and computes checksums.

    gather   pool -> staging     fills the header: stamps, checksum, length
    scatter  staging -> pool     writes only blocks with the expected stamps, and reports the error of each block

A header is HEADER_WORDS int64 for each block: the stamp's two words (the contents' name; the grant's generation and the
parts' mask), the checksum of extent.py, and the number of bytes. Neither call waits for the device, which holds the
status. A block with a wrong checksum has been written, so it must not be used before its status is known to be good.
"""

# Shapes: B blocks, W words of 4 bytes of one extent.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu import extent as rule
from pdserve.engine.gpu.extent import WORD_BYTES, StridedExtent

HEADER_WORDS: Final = 4
WRONG_STAMP: Final = 1
WRONG_CHECKSUM: Final = 2  # or length
_BLOCK: Final = 4096

_GOLDEN = tl.constexpr(rule.GOLDEN)
_MIX = tl.constexpr(rule.MIX)
_HEADER = tl.constexpr(HEADER_WORDS)


@triton.jit
def _move(
    pool,  # int32 words
    staging,
    block_of,  # [B] int32
    header,  # [B, HEADER_WORDS] int64
    expected,  # [B, 2] int64: stamps; unread when packing
    sums,  # [B] int64
    sums_stride,
    pool_stride,
    staging_stride,
    first,
    run_stride,
    size,  # W
    RUN: tl.constexpr,  # words of a run; 0: the extent is one run
    IS_PACKING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if not IS_PACKING:
        is_wanted = tl.load(header + index * _HEADER) == tl.load(expected + index * 2)
        is_wanted = is_wanted & (tl.load(header + index * _HEADER + 1) == tl.load(expected + index * 2 + 1))
        if not is_wanted:
            return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if RUN > 0:
        within = (at // RUN) * run_stride + at % RUN
    else:
        within = at
    there = pool + tl.load(block_of + index).to(tl.int64) * pool_stride + first + within
    here = staging + index * staging_stride + at
    if IS_PACKING:
        word = tl.load(there, mask=inside, other=0)
        tl.store(here, word, mask=inside)
    else:
        word = tl.load(here, mask=inside, other=0)
        tl.store(there, word, mask=inside)
    mixed = (word.to(tl.uint32, bitcast=True).to(tl.uint64) + (at.to(tl.uint64) + 1) * _GOLDEN) * _MIX
    mixed = tl.where(inside, mixed ^ (mixed >> 32), 0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + index * sums_stride, tl.sum(mixed, axis=0), sem="relaxed")


def gather(
    raw: Tensor, block_B: Tensor, extent: StridedExtent, stamp_B2: Tensor, staging: Tensor, header: Tensor
) -> None:
    """Packs blocks of a pool's `raw` [N, block_bytes] into the rows of `staging` [B, at least the extent's bytes].

    `block_B` is int32, `stamp_B2` int64; `header` [B, HEADER_WORDS] int64 is filled.
    """
    header[:, :2] = stamp_B2
    header[:, 2] = 0
    header[:, 3] = extent.num_bytes
    _launch(raw, block_B, extent, staging, header, header, header[:, 2], is_packing=True)


def scatter(
    raw: Tensor, block_B: Tensor, extent: StridedExtent, stamp_B2: Tensor, staging: Tensor, header: Tensor
) -> Tensor:
    """Writes packed blocks of `gather` into another pool; int32 [B]: 0, or WRONG_STAMP, WRONG_CHECKSUM or both.

    `stamp_B2` are the expected stamps. A block with another stamp is not written.
    """
    sum_B = torch.zeros(len(block_B), dtype=torch.int64, device=raw.device)
    _launch(raw, block_B, extent, staging, header, stamp_B2, sum_B, is_packing=False)
    is_other = (header[:, :2] != stamp_B2).any(dim=1)
    is_broken = (header[:, 2] != sum_B) | (header[:, 3] != extent.num_bytes)
    return is_other.int() * WRONG_STAMP + (is_broken & ~is_other).int() * WRONG_CHECKSUM


def _launch(
    raw: Tensor,
    block_B: Tensor,
    extent: StridedExtent,
    staging: Tensor,
    header: Tensor,
    expected: Tensor,
    sums: Tensor,
    *,
    is_packing: bool,
) -> None:
    numbers = (raw.stride(0), staging.stride(0), extent.first, extent.run_bytes, extent.stride_bytes)
    if any(number % WORD_BYTES for number in numbers):
        raise InternalError(f"pool, staging and extent in bytes: {numbers}; the kernel moves words of 4")
    end = extent.first + (extent.num_runs - 1) * extent.stride_bytes + extent.run_bytes
    if end > raw.shape[1] or extent.num_bytes > staging.shape[1] or len(block_B) > staging.shape[0]:
        raise InternalError(f"{extent} of {len(block_B)} blocks: blocks {raw.shape}, staging {tuple(staging.shape)}")
    if not len(block_B):
        return
    words = extent.num_bytes // WORD_BYTES
    _move[(len(block_B), triton.cdiv(words, _BLOCK))](
        raw.view(torch.int32),
        staging.view(torch.int32),
        block_B,
        header,
        expected,
        sums,
        sums.stride(0),
        raw.stride(0) // WORD_BYTES,
        staging.stride(0) // WORD_BYTES,
        extent.first // WORD_BYTES,
        extent.stride_bytes // WORD_BYTES,
        words,
        RUN=0 if extent.num_runs == 1 else extent.run_bytes // WORD_BYTES,
        IS_PACKING=is_packing,
        BLOCK=_BLOCK,
        num_warps=8,
    )

"""Copies the paged keys and values of rows into two contiguous tensors for attention over prompts.

A prefill chunk attends to its prompt's earlier positions in the pool. The copy costs a few percent of the products, and
any varlen attention can use the result. int8 and fp8 values are multiplied by their scales during the copy.
"""

# Shapes: B rows, P pages of a table, S positions of all rows, K kv heads, D head dim.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.casts import cast
from pdserve.engine.pool import TorchPool

_TILE: Final = 16
_COLUMNS: Final = 256


@triton.jit(do_not_specialize=["table_stride"])  # of each prompt its own
def _flatten(
    stored,  # the layer's first key in block 0
    scales,  # and its scale; unread unless SCALED
    table,  # [B, P] int32
    first_of,  # [B + 1]: where each row begins in the output; the last is S
    keys,
    values,
    table_stride,
    block_stride,
    scale_block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):
    WIDTH: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    row = tl.program_id(1)
    first = tl.load(first_of + row).to(tl.int64)
    length = tl.load(first_of + row + 1) - first
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = position < length
    inside = exists[:, None] & (column < WIDTH)[None, :]
    block = tl.load(table + row * table_stride + position // PAGE, mask=exists, other=0).to(tl.int64)
    offset = position % PAGE
    head = column // HEAD_DIM
    of_head = column if HEAD_STRIDE == HEAD_DIM else head * HEAD_STRIDE + column % HEAD_DIM
    there = stored + (block * block_stride + offset * TOKEN_STRIDE)[:, None] + of_head[None, :]
    key = tl.load(there, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(there + PAGE * WIDTH, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        scale = (block * scale_block_stride + offset * (TOKEN_STRIDE // HEAD_DIM))[:, None]
        scale += (head * (HEAD_STRIDE // HEAD_DIM))[None, :]
        key *= tl.load(scales + scale, mask=inside, other=0.0)
        value *= tl.load(scales + scale + PAGE * NUM_KV_HEADS, mask=inside, other=0.0)
    here = (first + position)[:, None] * WIDTH + column[None, :]
    tl.store(keys + here, cast(key, keys.dtype.element_ty), mask=inside)
    tl.store(values + here, cast(value, values.dtype.element_ty), mask=inside)


def flatten(
    pool: TorchPool,
    layer: int,
    table_BP: Tensor,
    first_B1: Tensor,
    num_positions: int,
    most_positions: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values, [S, K, D] each: row b's positions 0, 1, .. are at first[b] .. first[b + 1] - 1.

    `table_BP` is int32, `first_B1` int32 [B + 1] as for varlen attention; `num_positions` is its last entry and
    `most_positions` the length of the longest row, both known on the host.
    """
    shape = pool.shape
    num_rows, num_pages = table_BP.shape
    if most_positions > num_pages * shape.block_size:
        raise InternalError(f"{most_positions} positions of a row, its table has {num_pages} blocks")
    size = (num_positions, shape.num_kv_heads, shape.head_dim)
    k_SKD, v_SKD = (torch.empty(size, dtype=dtype, device=table_BP.device) for _ in range(2))
    if not num_positions:
        return k_SKD, v_SKD
    stored, scales = pool.tensor[:, layer], None if pool.scales is None else pool.scales[:, layer]
    width = shape.num_kv_heads * shape.head_dim
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _flatten[(triton.cdiv(most_positions, _TILE), num_rows, triton.cdiv(width, columns))](
        stored,
        stored if scales is None else scales,
        table_BP,
        first_B1,
        k_SKD,
        v_SKD,
        table_BP.stride(0),
        stored.stride(0),
        0 if scales is None else scales.stride(0),
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE=shape.block_size,
        TOKEN_STRIDE=stored.stride(2),
        HEAD_STRIDE=stored.stride(3),
        TILE=_TILE,
        COLUMNS=columns,
        SCALED=scales is not None,
        num_warps=4,
    )
    return k_SKD, v_SKD

"""Keys and values into the paged pool (`place`), out of it into contiguous tensors (`flatten`), and whole blocks to
another pool (`relay`).

`place` rotates queries and keys, after a norm if the model has one, and stores keys and values, in one launch per
layer. Stored int8 and fp8 values and their scales are bit for bit those of memory/pool.py's `quantise` for the same
input; the rotation is computed in float32 and rounded once, where torch rounds each product to the compute dtype.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels import extent as rule
from pdserve.engine.gpu.kernels.casts import begin, cast, overlap_options, rint
from pdserve.engine.gpu.kernels.extent import WORD_BYTES
from pdserve.engine.memory.pool import TorchPool
from pdserve.engine.model.attention import rotation

# Shapes: T tokens, N = H + 2 K heads of q, k and v, D head dim, R = D / 2 rotated pairs, P positions,
#         C tokens per block.

NOWHERE: Final = -1  # as a slot: a padding token, whose keys and values are not stored
_MOST_HEADS: Final = 8  # of one program

_INT8_MAX = tl.constexpr(127.0)
_INT8_STEP = tl.constexpr(1 / 127)
_FP8_MAX = tl.constexpr(448.0)
_FP8_STEP = tl.constexpr(1 / 448)
_LEAST = tl.constexpr(2.0**-120)  # as in memory/pool.py


@triton.jit
def _place(
    qkv,  # [T, N, D]
    q_norm,  # [D], and of keys; unread without HAS_NORM
    k_norm,
    table,  # [P, 2 R]: cosines, then sines
    slot,  # [T] int64: block * C + offset, or NOWHERE
    position,  # [T] int64
    q_out,  # [T, H, D]
    stored,  # the layer's first key in block 0
    scales,  # and its scale; unread unless SCALED
    qkv_stride,
    block_stride,  # in values, then in scales
    scale_block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MOST: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_PROGRAMS: tl.constexpr = (NUM_HEADS + MOST - 1) // MOST
    KV_PROGRAMS: tl.constexpr = (NUM_KV_HEADS + MOST - 1) // MOST
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    is_query = program < Q_PROGRAMS
    is_value = program >= Q_PROGRAMS + KV_PROGRAMS
    kv_program = tl.where(is_value, program - Q_PROGRAMS - KV_PROGRAMS, program - Q_PROGRAMS)
    head = tl.where(is_query, program, kv_program) * MOST + tl.arange(0, MOST)
    num_heads = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    first = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    pair = tl.arange(0, BLOCK_R)
    in_half = pair < HALF
    inside = (head < num_heads)[:, None] & in_half[None, :]
    source = qkv + token * qkv_stride + (first + head)[:, None] * HEAD_DIM + pair[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if not is_value:
        if HAS_NORM:
            if is_query:
                low_norm = tl.load(q_norm + pair, mask=in_half, other=0.0).to(tl.float32)
                high_norm = tl.load(q_norm + HALF + pair, mask=in_half, other=0.0).to(tl.float32)
            else:
                low_norm = tl.load(k_norm + pair, mask=in_half, other=0.0).to(tl.float32)
                high_norm = tl.load(k_norm + HALF + pair, mask=in_half, other=0.0).to(tl.float32)
            squares = tl.sum(low * low + high * high, axis=1)
            factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            low = low * factor * low_norm[None, :]
            high = high * factor * high_norm[None, :]
        angle = table + tl.load(position + token) * HEAD_DIM + pair
        cos = tl.load(angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(angle + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if is_query:
        into = q_out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + pair[None, :]
        tl.store(into, cast(low, q_out.dtype.element_ty), mask=inside)
        tl.store(into + HALF, cast(high, q_out.dtype.element_ty), mask=inside)
    else:
        where = tl.load(slot + token)
        if where >= 0:
            # A block contains the keys of all its tokens, then the values.
            plane = tl.where(is_value, PAGE * NUM_KV_HEADS * HEAD_DIM, 0)
            row = plane + where % PAGE * TOKEN_STRIDE + head * HEAD_STRIDE
            if SCALED:
                # Rounded to the compute dtype first, like the input of pool.write.
                low = cast(low, qkv.dtype.element_ty).to(tl.float32)
                high = cast(high, qkv.dtype.element_ty).to(tl.float32)
                largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
                broken = tl.max(((low != low) | (high != high)).to(tl.int32), axis=1) > 0
                largest = tl.where(broken, float("nan"), largest)
                if stored.dtype.element_ty == tl.int8:
                    inverse = tl.where(
                        largest > _LEAST, tl.div_rn(tl.full([MOST], _INT8_MAX, tl.float32), largest), 0.0
                    )
                    scale = largest * _INT8_STEP
                    low = rint(low * inverse[:, None])
                    high = rint(high * inverse[:, None])
                else:
                    inverse = tl.where(largest > _LEAST, tl.div_rn(tl.full([MOST], _FP8_MAX, tl.float32), largest), 0.0)
                    scale = largest * _FP8_STEP
                    low = low * inverse[:, None]
                    high = high * inverse[:, None]
                low = tl.where(low == low, low, 0.0)
                high = tl.where(high == high, high, 0.0)
                at = scales + where // PAGE * scale_block_stride + row // HEAD_DIM
                tl.store(at, scale, mask=head < NUM_KV_HEADS)
            into = stored + where // PAGE * block_stride + row[:, None] + pair[None, :]
            tl.store(into, cast(low, stored.dtype.element_ty), mask=inside)
            tl.store(into + HALF, cast(high, stored.dtype.element_ty), mask=inside)


def place(
    pool: TorchPool,
    layer: int,
    qkv_TND: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    table_PD: Tensor,
    *,
    num_heads: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Stores the keys and values of the step's tokens; returns the rotated queries, [T, H, D].

    `qkv_TND` has contiguous heads; its tokens may be apart. `slot_T` and `position_T` are int64; slots are block * C +
    offset, or NOWHERE. Rows of `table_PD` are what `make_table` makes.
    """
    num_tokens, _, head_dim = qkv_TND.shape
    shape = pool.shape
    q_out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TND.dtype, device=qkv_TND.device)
    if not num_tokens:
        return q_out_THD
    stored, scales = pool.tensor[:, layer], None if pool.scales is None else pool.scales[:, layer]
    has_norm = q_norm_D is not None and k_norm_D is not None
    grid = (num_tokens, triton.cdiv(num_heads, _MOST_HEADS) + 2 * triton.cdiv(shape.num_kv_heads, _MOST_HEADS))
    _place[grid](
        qkv_TND,
        q_norm_D if has_norm else qkv_TND,
        k_norm_D if has_norm else qkv_TND,
        table_PD,
        slot_T,
        position_T,
        q_out_THD,
        stored,
        stored if scales is None else scales,
        qkv_TND.stride(0),
        stored.stride(0),
        0 if scales is None else scales.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=triton.next_power_of_2(head_dim // 2),
        MOST=_MOST_HEADS,
        PAGE=shape.block_size,
        TOKEN_STRIDE=stored.stride(2),
        HEAD_STRIDE=stored.stride(3),
        HAS_NORM=has_norm,
        SCALED=scales is not None,
        num_warps=1 if head_dim <= 128 else 2,
        enable_fp_fusion=False,  # a fused multiply-add would round differently from pool.quantise
        **overlap_options(),
    )
    return q_out_THD


def make_table(frequency_R: Tensor, attention_factor: float, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of positions 0 .. num_positions - 1, [P, D]; see attention.rotation."""
    position_P = torch.arange(num_positions, device=frequency_R.device)
    cos_P1R, sin_P1R = rotation(frequency_R, attention_factor, position_P, dtype)
    return torch.cat((cos_P1R, sin_P1R), dim=-1)[:, 0].contiguous()


# --- contiguous keys and values -------------------------------------------------------------------------------
# `flatten` copies them for attention over prompts: a prefill chunk attends to its prompt's earlier positions in the
# pool. The copy costs a few percent of the products, and any varlen attention can use the result. int8 and fp8 values
# are multiplied by their scales during the copy.

# Shapes: B rows, P pages of a table, S positions of all rows, K kv heads, D head dim.

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


# --- relay ----------------------------------------------------------------------------------------------------
# Copies whole blocks from one pool to another on a device, and computes their checksums.
#
# The checksums are those of extent.checksum for each block, so both ends of a transfer can compare the bytes read and
# written. Without a target it only computes checksums. Does not wait for the device.

# Shapes: B blocks, W words of 4 bytes of a block.

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

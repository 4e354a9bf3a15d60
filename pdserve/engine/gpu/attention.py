"""Attention of decode rows over the paged pool: each row's positions in parts (flash decoding), then a merge.

    attend(pool, layer, q_THD, rows, make_scratch(...)) -> out_TN

A row brings 1 to 16 queries: its last token, and drafts behind it to be verified. The G query heads of a kv head and
the row's queries are the rows of one product, so keys and values are read once for all of them. The grid is
rows x kv heads x parts whatever the lengths are, so that it can be captured; a program without positions returns, and
a row of length 0, which pads a bucket, yields zeros. int8 and fp8 blocks stay as they are in the products: scales go
to the scores and to the weights, in float32. Softmax is taken in powers of two.
"""

# Shapes: B rows, Q queries of each row, T = B * Q, H query heads, K kv heads, G = H / K, D head dim, C tokens per
#         block, M >= G * Q queries of a program, N positions of a tile, S parts.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.casts import cast, operand
from pdserve.engine.gpu.gated import tanh
from pdserve.engine.gpu.splits import LEAST_POSITIONS
from pdserve.engine.pool import TorchPool

MOST_QUERIES: Final = 16
_LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True)
class Rows:
    """The rows of a step, on the device. A graph's rows all have `num_queries`; others may have fewer."""

    num_queries: int  # at most, of a row
    table_BP: Tensor  # int32: the row's blocks, in order
    start_B: Tensor  # int32: position of the first query
    length_B: Tensor  # int32: positions that exist, the queries' included; 0 is a padding row
    first_B1: Tensor | None = None  # int32 [B + 1]: each row's first token, and the end; None: num_queries apart


@dataclass(frozen=True)
class Tiling:
    """How a program walks: positions at a time, warps, and how many loads are in flight."""

    positions: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Scratch:
    """What the parts leave for the merge; one for all layers and graphs of a stream."""

    num_splits: int
    most_splits: int  # what the merge is compiled for, a power of two
    out: Tensor  # float32 [T, H, S, D]
    weight: Tensor  # float32 [T, H, S]: log2 of the sum of exponentials


def make_scratch(
    num_splits: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    most_splits: int | None = None,
) -> Scratch:
    """`most_splits`: at least `num_splits`, and the same for all steps that shall share one compiled merge."""
    size = (num_tokens, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    out, weight = torch.empty((*size, head_dim), device=device), torch.empty(size, device=device)
    return Scratch(num_splits, most_splits or num_splits, out, weight)


def choose_tiling(head_dim: int, dtype: torch.dtype, num_query_rows: int) -> Tiling:
    """By shared memory: a tile's keys and values are at most 16 KiB each. See tests/gpu/check_kernels.py --tune."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    positions = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    # Stages count the load of the block's number too: with five, two tiles are under way; float32 would spill.
    if num_query_rows >= 64:
        return Tiling(positions, 8, 3)
    return Tiling(positions, 4, 3 if dtype == torch.float32 else 5)


@triton.jit
def _range(start, length, splits, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr):
    """First tile that any query of the row sees, the end of its tiles, and tiles per part."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(start - WINDOW + 1, 0) // TILE
    end = tl.cdiv(length, TILE)
    per_part = tl.maximum(tl.cdiv(end - first, splits), LEAST)
    return first, end, per_part


@triton.jit
def _tokens(first_of, row, NUM_QUERIES: tl.constexpr, RAGGED: tl.constexpr):
    """The row's first token and how many it has."""
    first = row * NUM_QUERIES
    count = row * 0 + NUM_QUERIES
    if RAGGED:
        first = tl.load(first_of + row)
        count = tl.load(first_of + row + 1) - first
    return first, count


# What changes from step to step must not name a kernel of its own: it would be compiled while requests wait.
@triton.jit(do_not_specialize=["table_stride", "splits"])
def _attend(
    q,  # [T, H, D], tokens apart
    stored,  # the layer's first key in block 0
    scales,  # and its scale; unread unless SCALED
    table,  # [B, P]
    start_of,  # [B]
    length_of,  # [B]
    first_of,  # [B + 1]; unread unless RAGGED
    out,  # [T, H * D]
    part_out,
    part_weight,
    q_stride,
    table_stride,
    block_stride,
    scale_block_stride,
    splits,
    score_scale,  # of q k, with log2(e) where there is no softcap
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # times log2(e)
    IS_SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    SCALED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(start_of + row)
    length = tl.load(length_of + row)
    first_tile, end_tile, per_part = _range(start, length, splits, WINDOW, TILE, LEAST)
    begin = first_tile + part * per_part
    end = tl.minimum(begin + per_part, end_tile)
    if IS_SPLIT & (begin >= end):
        return

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    in_head = d < HEAD_DIM
    first_token, num_queries = _tokens(first_of, row, NUM_QUERIES, RAGGED)
    token = first_token.to(tl.int64) + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_query = m < GROUP * num_queries
    asked = start + m // GROUP
    q_MD = tl.load(
        q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :],
        mask=is_query[:, None] & in_head[None, :],
        other=0.0,
    )
    q_MD = operand(q_MD, q.dtype.element_ty)

    most_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(begin, end):
        position = tile * TILE + n
        exists = position < length
        if PAGE >= TILE:
            block_N = tl.load(table + row * table_stride + tile * TILE // PAGE).to(tl.int64) + tl.zeros_like(n)
        else:
            block_N = tl.load(table + row * table_stride + position // PAGE, mask=exists, other=0).to(tl.int64)
        place_N = block_N * block_stride + (position % PAGE) * TOKEN + kv_head * HEAD_DIM
        inside = exists[:, None] & in_head[None, :]
        k_ND = tl.load(stored + place_N[:, None] + d[None, :], mask=inside, other=0.0)
        k_ND = operand(k_ND, q.dtype.element_ty)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * score_scale
        if SCALED:
            scale_N = block_N * scale_block_stride + (position % PAGE) * NUM_KV_HEADS + kv_head
            score_MN *= tl.load(scales + scale_N, mask=exists, other=0.0)[None, :]
        if SOFTCAP > 0.0:
            score_MN = tanh(score_MN) * SOFTCAP
        seen = (position[None, :] <= asked[:, None]) & exists[None, :]
        if WINDOW > 0:
            seen = seen & (position[None, :] > asked[:, None] - WINDOW)
        score_MN = tl.where(seen, score_MN, float("-inf"))
        higher_M = tl.maximum(most_M, tl.max(score_MN, axis=1))
        # A query that has seen nothing yet stays at -inf; its difference must not be NaN.
        anchor_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        p_MN = tl.exp2(score_MN - anchor_M[:, None])
        fade_M = tl.exp2(most_M - anchor_M)
        sum_M = sum_M * fade_M + tl.sum(p_MN, axis=1)
        most_M = higher_M
        if SCALED:
            p_MN *= tl.load(scales + scale_N + PAGE * NUM_KV_HEADS, mask=exists, other=0.0)[None, :]
        v_ND = tl.load(stored + PAGE * TOKEN + place_N[:, None] + d[None, :], mask=inside, other=0.0)
        v_ND = operand(v_ND, q.dtype.element_ty)
        p_MN = operand(p_MN, q.dtype.element_ty)
        acc_MD = tl.dot(p_MN, v_ND, acc_MD * fade_M[:, None], input_precision="ieee")

    share_M = tl.where(sum_M > 0.0, sum_M, 1.0)
    acc_MD = acc_MD / share_M[:, None]
    is_out = is_query[:, None] & in_head[None, :]
    if not IS_SPLIT:
        into = out + (token[:, None] * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
        tl.store(into, cast(acc_MD, out.dtype.element_ty), mask=is_out)
    else:
        at = (token * NUM_HEADS + head) * splits + part
        tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], acc_MD, mask=is_out)
        tl.store(part_weight + at, most_M + tl.log2(share_M), mask=is_query)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    out,
    part_out,
    part_weight,
    start_of,
    length_of,
    first_of,
    splits,
    NUM_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """One token and head: the parts that its row has, each by its share of the exponentials."""
    row = tl.program_id(0) // NUM_QUERIES
    first_token, num_queries = _tokens(first_of, row, NUM_QUERIES, RAGGED)
    query = tl.program_id(0) % NUM_QUERIES
    if query >= num_queries:
        return
    token = (first_token + query).to(tl.int64)
    at = token * tl.num_programs(1) + tl.program_id(1)
    first, end, per_part = _range(tl.load(start_of + row), tl.load(length_of + row), splits, WINDOW, TILE, LEAST)
    part = tl.arange(0, MOST_SPLITS)
    d = tl.arange(0, BLOCK_D)
    has_part = part < tl.cdiv(end - first, per_part)
    weight_S = tl.load(part_weight + at * splits + part, mask=has_part, other=float("-inf"))
    most = tl.max(weight_S, axis=0)
    share_S = tl.exp2(weight_S - tl.where(most == float("-inf"), 0.0, most))
    inside = has_part[:, None] & (d < HEAD_DIM)[None, :]
    out_SD = tl.load(part_out + (at * splits + part)[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    total = tl.sum(share_S, axis=0)
    out_D = tl.sum(out_SD * share_S[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + at * HEAD_DIM + d, cast(out_D, out.dtype.element_ty), mask=d < HEAD_DIM)


def attend(
    pool: TorchPool,
    layer: int,
    q_THD: Tensor,
    rows: Rows,
    scratch: Scratch,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """What every query gets, [T, H * D]; see engine.attention.attend for scale and softcap.

    Queries at or behind the row's length, as of drafts that a row has fewer of than its bucket, yield numbers without
    meaning, but no NaN.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    shape = pool.shape
    num_kv_heads, page = shape.num_kv_heads, shape.block_size
    group = num_heads // num_kv_heads
    num_rows = rows.length_B.shape[0]
    is_whole = rows.first_B1 is not None or num_rows * rows.num_queries == num_tokens
    if not is_whole or not 1 <= rows.num_queries <= MOST_QUERIES:
        raise InternalError(f"{num_tokens} tokens for {num_rows} rows of {rows.num_queries} queries (at most 16)")
    if page < 8 or page & (page - 1):
        raise InternalError(f"blocks of {page} tokens: the kernel takes powers of two from 8 on")
    out_TN = torch.empty((num_tokens, num_heads * head_dim), dtype=q_THD.dtype, device=q_THD.device)
    if not num_tokens:
        return out_TN
    scale = head_dim**-0.5 if scale is None else scale
    block_d = triton.next_power_of_2(head_dim)
    block_m = max(16, triton.next_power_of_2(group * rows.num_queries))
    tiling = tiling or choose_tiling(head_dim, q_THD.dtype, block_m)
    stored, scales = pool.tensor[:, layer], None if pool.scales is None else pool.scales[:, layer]
    ranges = {
        "WINDOW": window or 0,
        "TILE": tiling.positions,
        "LEAST": max(1, LEAST_POSITIONS // tiling.positions),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "NUM_QUERIES": rows.num_queries,
        "RAGGED": rows.first_B1 is not None,
    }
    first = rows.start_B if rows.first_B1 is None else rows.first_B1
    _attend[(num_rows, num_kv_heads, scratch.num_splits)](
        q_THD,
        stored,
        stored if scales is None else scales,
        rows.table_BP,
        rows.start_B,
        rows.length_B,
        first,
        out_TN,
        scratch.out,
        scratch.weight,
        q_THD.stride(0),
        rows.table_BP.stride(0),
        stored.stride(0),
        0 if scales is None else scales.stride(0),
        scratch.num_splits,
        scale * _LOG2_E if softcap is None else scale / softcap,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_M=block_m,
        PAGE=page,
        SOFTCAP=0.0 if softcap is None else softcap * _LOG2_E,
        IS_SPLIT=scratch.num_splits > 1,
        SCALED=scales is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **ranges,
    )
    if scratch.num_splits > 1:
        _merge[(num_rows * rows.num_queries, num_heads)](
            out_TN,
            scratch.out,
            scratch.weight,
            rows.start_B,
            rows.length_B,
            first,
            scratch.num_splits,
            MOST_SPLITS=scratch.most_splits,
            num_warps=2,
            **ranges,
        )
    return out_TN

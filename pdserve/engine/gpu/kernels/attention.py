"""Attention of decode rows over the paged pool: equal shares of all rows' positions (flash decoding), then a merge.

    attend(pool, layer, q_THD, rows, scratch) -> out_TN

A row has 1 to 16 queries: its last token, and drafts to be verified. The G query heads of a kv head and the row's
queries are the rows of one product, so keys and values are read once for all of them. The grid is kv heads x programs
for any rows and lengths, so that it can be captured: a program iterates over its share of the positions of all rows
(fixed_shapes.py). A padding row of length 0 yields zeros. int8 and fp8 values are multiplied unscaled, and scales are
applied to the scores and the weights in float32. Softmax uses powers of two.

The merge is a second kernel, or, with the switch merge=fused, the work of the program that finishes a row's last part.
A program stores its part, then counts itself at the row's counter. A barrier orders the stores of its threads before
the addition, which releases them and acquires those of the programs that were counted before (acq_rel, device scope).
So the program that finds all others counted sees all parts. It adds them in their order, not in that of arrival, and
sets the counter to 0 for the next launch. The interpreter runs one program after the other, in random order in the
tests: it shows that any program can be the last one and that counters return to 0, but no error in the order of memory.
"""

# Shapes: B rows, Q queries of each row, T = B * Q, H query heads, K kv heads, G = H / K, D head dim, C tokens per
#         block, M >= G * Q queries of a program, N positions of a tile, W programs of a kv head, S partial results.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.attention_plan import (
    HEAD_WORDS,
    MOST_QUERIES,
    AttentionScratch,
    Division,
    Rows,
    Tiling,
    block_of,
    choose_tiling,
    tile_range,
)
from pdserve.engine.gpu.kernels.casts import begin as begin_kernel
from pdserve.engine.gpu.kernels.casts import cast, operand, overlap_options
from pdserve.engine.gpu.kernels.norms import tanh
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.memory.pool import TorchPool

_LOG2_E: Final = 1.4426950408889634
_PARTS: Final = 16  # parts that the merge reads at a time


@triton.jit
def _tokens(first_of, row, NUM_QUERIES: tl.constexpr, RAGGED: tl.constexpr):
    """The row's first token and its number of tokens."""
    first = row * NUM_QUERIES
    count = row * 0 + NUM_QUERIES
    if RAGGED:
        first = tl.load(first_of + row)
        count = tl.load(first_of + row + 1) - first
    return first, count


# Values that change from step to step must not specialise the kernel, which would then be compiled while requests wait.
@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q,  # [T, H, D], tokens apart
    stored,  # the layer's first key in block 0
    scales,  # and its scale; unread unless SCALED
    table,  # [B, P]
    start_of,  # [B]
    length_of,  # [B]
    first_of,  # [B + 1]; unread unless RAGGED
    work,  # of work.split
    out,  # [T, H * D]
    part_out,
    part_weight,
    counts,  # [K, W]: parts of the row that begins in a program and ends in another; unread unless FUSED
    q_stride,
    table_stride,
    block_stride,
    scale_block_stride,
    score_scale,  # scale of q k, including log2(e) if there is no softcap
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # times log2(e)
    HEAD: tl.constexpr,
    SCALED: tl.constexpr,
    RAGGED: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_kernel(PDL)
    kv_head = tl.program_id(0)  # varies fastest, because the heads of a token are contiguous
    program = tl.program_id(1)
    num_programs = tl.num_programs(1)
    share = tl.load(work)
    total = tl.load(work + 1)
    first_row = tl.load(work + HEAD + program)
    last_row = tl.load(work + HEAD + num_programs + program)
    edges = work + HEAD + 2 * num_programs
    my_begin = program * share
    my_end = tl.minimum(my_begin + share, total)

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    PLANE: tl.constexpr = PAGE * NUM_KV_HEADS * HEAD_DIM  # of keys, before the values
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    in_head = d < HEAD_DIM
    head = kv_head * GROUP + m % GROUP
    for row in range(first_row, last_row + 1):
        row_begin = tl.load(edges + row)
        row_end = tl.load(edges + row + 1)
        start = tl.load(start_of + row)
        length = tl.load(length_of + row)
        first_tile, _ = tile_range(start, length, WINDOW, TILE)
        begin = first_tile + tl.maximum(my_begin - row_begin, 0)
        end = first_tile + tl.minimum(my_end, row_end) - row_begin

        first_token, num_queries = _tokens(first_of, row, NUM_QUERIES, RAGGED)
        token = first_token.to(tl.int64) + m // GROUP
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
                # A row without positions has no block.
                block = tl.load(table + row * table_stride + tile * TILE // PAGE, mask=length > 0, other=0)
                block_N = block.to(tl.int64) + tl.zeros_like(n)
            else:
                block_N = tl.load(table + row * table_stride + position // PAGE, mask=exists, other=0).to(tl.int64)
            place_N = block_N * block_stride + (position % PAGE) * TOKEN_STRIDE + kv_head * HEAD_STRIDE
            inside = exists[:, None] & in_head[None, :]
            k_ND = tl.load(stored + place_N[:, None] + d[None, :], mask=inside, other=0.0)
            k_ND = operand(k_ND, q.dtype.element_ty)
            score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * score_scale
            if SCALED:
                scale_N = block_N * scale_block_stride + (position % PAGE) * (TOKEN_STRIDE // HEAD_DIM)
                scale_N += kv_head * (HEAD_STRIDE // HEAD_DIM)
                score_MN *= tl.load(scales + scale_N, mask=exists, other=0.0)[None, :]
            if SOFTCAP > 0.0:
                score_MN = tanh(score_MN) * SOFTCAP
            seen = (position[None, :] <= asked[:, None]) & exists[None, :]
            if WINDOW > 0:
                seen = seen & (position[None, :] > asked[:, None] - WINDOW)
            score_MN = tl.where(seen, score_MN, float("-inf"))
            higher_M = tl.maximum(most_M, tl.max(score_MN, axis=1))
            # The maximum of a query without visible positions stays -inf; the difference must not be NaN.
            anchor_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
            p_MN = tl.exp2(score_MN - anchor_M[:, None])
            fade_M = tl.exp2(most_M - anchor_M)
            sum_M = sum_M * fade_M + tl.sum(p_MN, axis=1)
            most_M = higher_M
            if SCALED:
                p_MN *= tl.load(scales + scale_N + PLANE // HEAD_DIM, mask=exists, other=0.0)[None, :]
            v_ND = tl.load(stored + PLANE + place_N[:, None] + d[None, :], mask=inside, other=0.0)
            v_ND = operand(v_ND, q.dtype.element_ty)
            p_MN = operand(p_MN, q.dtype.element_ty)
            acc_MD = tl.dot(p_MN, v_ND, acc_MD * fade_M[:, None], input_precision="ieee")

        share_M = tl.where(sum_M > 0.0, sum_M, 1.0)
        acc_MD = acc_MD / share_M[:, None]
        is_out = is_query[:, None] & in_head[None, :]
        if (row_begin >= my_begin) & (row_end <= my_end):
            into = out + (token[:, None] * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
            tl.store(into, cast(acc_MD, out.dtype.element_ty), mask=is_out)
        else:
            slot = 2 * program + (row_begin > my_begin).to(tl.int32)
            at = (kv_head * 2 * num_programs + slot) * (GROUP * NUM_QUERIES) + m
            tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], acc_MD, mask=is_out)
            tl.store(part_weight + at, most_M + tl.log2(share_M), mask=is_query)
            if FUSED:
                first = row_begin // share
                last = (row_end - 1) // share
                count = counts + kv_head * num_programs + first
                tl.debug_barrier()
                if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == last - first:
                    merged_MD = _merged(
                        part_out, part_weight, kv_head, first, last, row_begin > first * share, num_programs, m, d,
                        is_query, in_head, NUM_QUERIES, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M,
                    )  # fmt: skip
                    into = out + (token[:, None] * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
                    tl.store(into, cast(merged_MD, out.dtype.element_ty), mask=is_out)
                    tl.store(count, 0)


@triton.jit
def _merged(
    part_out, part_weight, kv_head, first, last, is_second, num_programs, m, d, is_query, in_head,
    NUM_QUERIES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The sum of a row's parts, of all queries of a kv head; `is_second`: the first program has another row before."""
    most_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    inside = is_query[:, None] & in_head[None, :]
    for program in range(first, last + 1):
        slot = 2 * program + ((program == first) & is_second).to(tl.int32)
        at = (kv_head * 2 * num_programs + slot) * (GROUP * NUM_QUERIES) + m
        weight_M = tl.load(part_weight + at, mask=is_query, other=float("-inf"))
        part_MD = tl.load(part_out + at[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
        higher_M = tl.maximum(most_M, weight_M)
        anchor_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        share_M = tl.exp2(weight_M - anchor_M)
        fade_M = tl.exp2(most_M - anchor_M)
        total_M = total_M * fade_M + share_M
        acc_MD = acc_MD * fade_M[:, None] + part_MD * share_M[:, None]
        most_M = higher_M
    return acc_MD / tl.where(total_M > 0.0, total_M, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_programs"])
def _merge(
    out,
    part_out,
    part_weight,
    first_of,
    work,
    num_programs,
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges one token and head of a row that several programs share: each part is weighted by its sum of
    exponentials."""
    begin_kernel(PDL)
    row = tl.program_id(0) // NUM_QUERIES
    head = tl.program_id(1)
    share = tl.load(work)
    edges = work + HEAD + 2 * num_programs
    row_begin = tl.load(edges + row)
    first = row_begin // share
    last = (tl.load(edges + row + 1) - 1) // share
    first_token, num_queries = _tokens(first_of, row, NUM_QUERIES, RAGGED)
    query = tl.program_id(0) % NUM_QUERIES
    if (first == last) | (query >= num_queries):
        return
    d = tl.arange(0, BLOCK_D)
    m = query * GROUP + head % GROUP
    # log2 of the sum is above -inf in each part that any query of the row sees. A query whose window begins after a
    # part has -inf there.
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc_D = tl.zeros([BLOCK_D], tl.float32)
    for base in range(first, last + 1, PARTS):
        program = base + tl.arange(0, PARTS)
        has_part = program <= last
        slot = 2 * program + ((program == first) & (row_begin > first * share)).to(tl.int32)
        at_S = ((head // GROUP) * 2 * num_programs + slot) * (GROUP * NUM_QUERIES) + m
        weight_S = tl.load(part_weight + at_S, mask=has_part, other=float("-inf"))
        inside = has_part[:, None] & (d < HEAD_DIM)[None, :]
        out_SD = tl.load(part_out + at_S[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
        higher = tl.maximum(most, tl.max(weight_S, axis=0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        share_S = tl.exp2(weight_S - anchor)
        fade = tl.exp2(most - anchor)
        total = total * fade + tl.sum(share_S, axis=0)
        acc_D = acc_D * fade + tl.sum(out_SD * share_S[:, None], axis=0)
        most = higher
    out_D = acc_D / tl.where(total > 0.0, total, 1.0)
    token = (first_token + query).to(tl.int64)
    at = token * tl.num_programs(1) + head
    tl.store(out + at * HEAD_DIM + d, cast(out_D, out.dtype.element_ty), mask=d < HEAD_DIM)


def attend(
    pool: TorchPool,
    layer: int,
    q_THD: Tensor,
    rows: Rows,
    scratch: AttentionScratch,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    tiling: Tiling | None = None,
    is_fused: bool | None = None,
) -> Tensor:
    """The output of every query, [T, H * D]; see engine.attention.attend for scale and softcap.

    Queries at or after the row's length (padding for drafts that a row lacks) yield undefined numbers, but no NaN.
    `is_fused`: the merge is part of the kernel; None: as the switches say.
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
    block_m = block_of(group * rows.num_queries)
    tiling = tiling or choose_tiling(head_dim, q_THD.dtype, block_m, is_scaled=pool.scales is not None)
    stored, scales = pool.tensor[:, layer], None if pool.scales is None else pool.scales[:, layer]
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "NUM_QUERIES": rows.num_queries,
        "GROUP": group,
        "HEAD": HEAD_WORDS,
        "RAGGED": rows.first_B1 is not None,
        **overlap_options(),
    }
    is_fused = gpu_switches().merge == "fused" if is_fused is None else is_fused
    first = rows.start_B if rows.first_B1 is None else rows.first_B1
    programs = scratch.num_programs
    work = rows.work_of(Division(programs, tiling.positions, window))
    _attend[(num_kv_heads, programs)](
        q_THD,
        stored,
        stored if scales is None else scales,
        rows.table_BP,
        rows.start_B,
        rows.length_B,
        first,
        work,
        out_TN,
        scratch.out,
        scratch.weight,
        scratch.counts,
        q_THD.stride(0),
        rows.table_BP.stride(0),
        stored.stride(0),
        0 if scales is None else scales.stride(0),
        scale * _LOG2_E if softcap is None else scale / softcap,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_M=block_m,
        TILE=tiling.positions,
        PAGE=page,
        TOKEN_STRIDE=stored.stride(2),
        HEAD_STRIDE=stored.stride(3),
        WINDOW=window or 0,
        SOFTCAP=0.0 if softcap is None else softcap * _LOG2_E,
        SCALED=scales is not None,
        FUSED=is_fused and programs > 1,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.most_registers,
        **shared,
    )
    if programs > 1 and not is_fused:
        _merge[(num_rows * rows.num_queries, num_heads)](
            out_TN, scratch.out, scratch.weight, first, work, programs, PARTS=_PARTS, num_warps=2, **shared
        )
    return out_TN

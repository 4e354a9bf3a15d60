"""Matrix products of few rows, which read each weight once: with the norm in front, and the gate behind.

    multiply(x_TK, weight_NK, bias_N, scratch)                              -> y_TN
    multiply(x_TK, ..., norm=Norm(delta_TK, weight_K, eps), gate="silu")    -> (x + delta)_TK, y_TF

The blocks of all outputs and inputs form one sequence, output tile by output tile, which a fixed number of programs
share equally (stream-K), so that all processors read until the end, for matrices of any shape. A tile that several
programs share has a partial sum of each. The program that finishes the last one adds them in the order of programs, as
attention.py merges, and with the same order of memory (the interpreter cannot show an error in it).

The norm costs no pass over x: y = factor * sum over k of (x + delta)[k] * weight[k] * w[n, k]. Each program sums the
squares of the inputs that it reads, and the factor multiplies the finished sum. x + delta is rounded to its dtype, then
its product with the norm's weight is; a norm alone rounds once more, after the factor. The programs of the first tile
store x + delta in new memory, because others still read x. The gate is computed from float32 sums.

Sums are in float32, over the same blocks in the same order for any number of rows, so a row's result does not depend
on the others. (A tensor core's result of a row does not either; only a device can show it.)
"""

# Shapes: T rows, K inputs, N outputs, F = N / 2 of a gate, W programs, M >= T rows of a tile.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.casts import INTERPRETED, begin, cast, operand, overlap_options
from pdserve.engine.gpu.kernels.norms import gate_times_up
from pdserve.engine.model.config_schema import Activation

MOST_ROWS: Final = 32
Gate = Literal["", Activation]

_OUTPUTS: Final = 64  # of a tile; of a gate: half of them gates, half of them ups
_BLOCK_BYTES: Final = 256  # of an output's weights at a time
_LINES = tl.constexpr(4)  # of 128 bytes of each output, asked for while the kernel before still runs: two blocks
_PER_PROCESSOR: Final = 2  # programs that a multiprocessor holds at once
_LEAST_BLOCKS: Final = 4  # of a program: with fewer, its start and the sum of the parts cost more than they gain


@triton.jit
def _prefetch(weight, n, first, N: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr, LINE: tl.constexpr):
    """Asks the L2 cache for COUNT lines of LINE weights of outputs n, from input `first` on."""
    k = tl.minimum(first + LINE * tl.arange(0, COUNT), K - 1)
    address_NK = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address_NK], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,  # [T, K], rows apart
    delta,  # the same; unread unless HAS_DELTA
    norm,  # [K]; unread unless NORMED
    weight,  # [N, K]
    bias,  # [N]; unread unless HAS_BIAS
    kept,  # [T, K]: x + delta; unwritten unless HAS_DELTA
    out,  # [T, N], or [T, N / 2] of a gate
    parts,  # [2 W, 1 or 2 of a gate, MOST, BLOCK_N]
    squares,  # [2 W, MOST]
    counts,  # [W]: parts of the tile that begins in a program and ends in another
    num_rows,
    x_stride,
    delta_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,  # of a gate: half of the outputs
    SHARE: tl.constexpr,  # blocks of a program
    TOTAL: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K  # of a tile
    HALVES: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    my_begin = program * SHARE
    if PDL and not INTERPRETED:  # no kernel writes weights, so they need not wait for the kernel before
        n = (my_begin // BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        _prefetch(weight, n, (my_begin % BLOCKS) * BLOCK_K, N, K, _LINES, BLOCK_K // 2)
        if GATED:
            _prefetch(weight + N * K, n, (my_begin % BLOCKS) * BLOCK_K, N, K, _LINES, BLOCK_K // 2)
    begin(PDL)
    my_end = tl.minimum(my_begin + SHARE, TOTAL)
    m = tl.arange(0, BLOCK_M)
    is_row = m < num_rows
    for tile in range(my_begin // BLOCKS, (my_end - 1) // BLOCKS + 1):
        tile_begin = tile * BLOCKS
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = n < N
        weight_row = weight + n.to(tl.int64)[:, None] * K
        acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        square_M = tl.zeros([BLOCK_M], tl.float32)
        for block in range(tl.maximum(my_begin - tile_begin, 0), tl.minimum(my_end - tile_begin, BLOCKS)):
            k = block * BLOCK_K + tl.arange(0, BLOCK_K)
            is_input = k < K
            inside = is_row[:, None] & is_input[None, :]
            x_MK = tl.load(x + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
            if HAS_DELTA:
                sum_MK = x_MK.to(tl.float32)
                sum_MK += tl.load(delta + m[:, None] * delta_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
                x_MK = cast(sum_MK, dtype)
                tl.store(kept + m[:, None] * K + k[None, :], x_MK, mask=inside & (tile == 0))
            if NORMED:
                wide_MK = x_MK.to(tl.float32)
                square_M += tl.sum(wide_MK * wide_MK, axis=1)
                scale_K = tl.load(norm + k, mask=is_input, other=0.0).to(tl.float32)
                x_MK = cast(wide_MK * scale_K[None, :], dtype)
            x_MK = operand(x_MK, dtype)
            is_weight = is_output[:, None] & is_input[None, :]
            w_NK = operand(tl.load(weight_row + k[None, :], mask=is_weight, other=0.0), dtype)
            acc_MN = tl.dot(x_MK, tl.trans(w_NK), acc_MN, input_precision="ieee")
            if GATED:
                up_NK = operand(tl.load(weight_row + N * K + k[None, :], mask=is_weight, other=0.0), dtype)
                up_MN = tl.dot(x_MK, tl.trans(up_NK), up_MN, input_precision="ieee")

        first = tile_begin // SHARE
        last = (tile_begin + BLOCKS - 1) // SHARE
        is_done = first == last
        if first != last:
            place_MN = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            slot = 2 * program + (tile_begin > my_begin).to(tl.int32)
            mine = parts + slot * (HALVES * MOST * BLOCK_N) + place_MN
            tl.store(mine, acc_MN, mask=is_row[:, None])
            if GATED:
                tl.store(mine + MOST * BLOCK_N, up_MN, mask=is_row[:, None])
            if NORMED:
                tl.store(squares + slot * MOST + m, square_M, mask=is_row)
            tl.debug_barrier()
            is_done = tl.atomic_add(counts + first, 1, sem="acq_rel", scope="gpu") == last - first
            if is_done:
                acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                square_M = tl.zeros([BLOCK_M], tl.float32)
                for other in range(first, last + 1):
                    slot = 2 * other + ((other == first) & (tile_begin > first * SHARE)).to(tl.int32)
                    theirs = parts + slot * (HALVES * MOST * BLOCK_N) + place_MN
                    acc_MN += tl.load(theirs, mask=is_row[:, None], other=0.0)
                    if GATED:
                        up_MN += tl.load(theirs + MOST * BLOCK_N, mask=is_row[:, None], other=0.0)
                    if NORMED:
                        square_M += tl.load(squares + slot * MOST + m, mask=is_row, other=0.0)
                tl.store(counts + first, 0)
        if is_done:
            if NORMED:
                factor_M = tl.rsqrt(square_M / K + eps)
                acc_MN *= factor_M[:, None]
                up_MN *= factor_M[:, None]
            if HAS_BIAS:
                acc_MN += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
                if GATED:
                    up_MN += tl.load(bias + N + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
            if GATED:
                acc_MN = gate_times_up(acc_MN, up_MN, IS_GELU)
            into = out + m[:, None] * N + n[None, :]
            tl.store(into, cast(acc_MN, out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@dataclass(frozen=True)
class ProductScratch:
    """Partial sums; one for all products of a stream. Captured graphs contain its addresses."""

    num_programs: int  # W
    parts: Tensor  # float32
    squares: Tensor  # float32
    counts: Tensor  # int32: 0 between two launches


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of a product's inputs, after `delta_TK`, if any, is added to them."""

    delta_TK: Tensor | None
    weight_K: Tensor
    eps: float


def product_scratch(num_processors: int, device: torch.device) -> ProductScratch:
    """`num_processors`: multiprocessors of the device."""
    programs = _PER_PROCESSOR * num_processors
    return ProductScratch(
        programs,
        parts=torch.empty((2 * programs, MOST_ROWS, _OUTPUTS), device=device),
        squares=torch.empty((2 * programs, MOST_ROWS), device=device),
        counts=torch.zeros(programs, dtype=torch.int32, device=device),
    )


def multiply(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    scratch: ProductScratch,
    *,
    norm: Norm | None = None,
    gate: Gate = "",
    out_TN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x, or x + delta with a norm's delta, and the product: at most 32 rows of the weights' dtype.

    With `gate`, the first half of the outputs are gates and the result is [T, F].
    """
    num_rows, num_inputs = x_TK.shape
    num_outputs = weight_NK.shape[0] // 2 if gate else weight_NK.shape[0]
    if num_rows > MOST_ROWS or x_TK.dtype != weight_NK.dtype or not weight_NK.is_contiguous():
        raise InternalError(f"{num_rows} rows of {x_TK.dtype} times {weight_NK.dtype}; at most 32 of one dtype")
    if out_TN is None:
        out_TN = torch.empty((num_rows, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
    delta_TK = norm.delta_TK if norm is not None else None
    kept_TK = x_TK if delta_TK is None else torch.empty(x_TK.shape, dtype=x_TK.dtype, device=x_TK.device)
    if not num_rows:
        return kept_TK, out_TN
    block_n, block_k = _OUTPUTS // 2 if gate else _OUTPUTS, _BLOCK_BYTES // weight_NK.itemsize
    total = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_inputs, block_k)
    share = max(_LEAST_BLOCKS, triton.cdiv(total, scratch.num_programs))
    _product[(triton.cdiv(total, share),)](
        x_TK,
        x_TK if delta_TK is None else delta_TK,
        x_TK if norm is None else norm.weight_K,
        weight_NK,
        x_TK if bias_N is None else bias_N,
        kept_TK,
        out_TN,
        scratch.parts,
        scratch.squares,
        scratch.counts,
        num_rows,
        x_TK.stride(0),
        0 if delta_TK is None else delta_TK.stride(0),
        0.0 if norm is None else norm.eps,
        K=num_inputs,
        N=num_outputs,
        SHARE=share,
        TOTAL=total,
        MOST=MOST_ROWS,
        BLOCK_M=16 if num_rows <= 16 else MOST_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_DELTA=delta_TK is not None,
        NORMED=norm is not None,
        HAS_BIAS=bias_N is not None,
        GATED=bool(gate),
        IS_GELU=gate != "silu",
        num_warps=4,
        num_stages=4,
        **overlap_options(),
    )
    return kept_TK, out_TN

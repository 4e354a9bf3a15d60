"""Rounds activations to fp8 (e4m3) with a scale for each token, in the kernel that computes them, for a rowwise scaled
product.

x[t, k] is about values[t, k] * scale[t], with scale = max_k |x[t, k]| / 448: the operands of torch._scaled_mm, with
weights that have a scale for each output. A fused operation rounds its float32 result once.
"""

# Shapes: T tokens, E row length, F mlp size.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.kernels.casts import begin, cast, overlap_options
from pdserve.engine.gpu.kernels.norms import gate_times_up

MOST = 448.0
_MOST = tl.constexpr(MOST)
_STEP = tl.constexpr(1 / MOST)
_LEAST = tl.constexpr(2.0**-100)  # so that the scale of a row of zeros is not zero


@triton.jit
def _store(value, values, scales, row, at, inside, SIZE: tl.constexpr):
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), _LEAST)
    scaled = tl.minimum(tl.maximum(value * (_MOST / largest), -448.0), 448.0)
    tl.store(values + row * SIZE + at, cast(scaled, values.dtype.element_ty), mask=inside)
    tl.store(scales + row, largest * _STEP)


@triton.jit
def _norm(
    x, delta, weight, values, scales, x_stride, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * delta_stride + at, mask=inside, other=0.0).to(tl.float32)
        kept = cast(value, x.dtype.element_ty)
        tl.store(x + row * x_stride + at, kept, mask=inside)
        value = kept.to(tl.float32)
    if HAS_WEIGHT:
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        value = value * factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    _store(value, values, scales, row, at, inside, SIZE)


@triton.jit
def _gate(
    gate_up, values, scales, stride, SIZE: tl.constexpr, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    _store(gate_times_up(gate, up, IS_GELU), values, scales, row, at, inside, SIZE)


def quantise(x_TE: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 [T, E] and float32 scales [T, 1]; rows may be apart."""
    return _launch_norm(x_TE, None, None, 0.0)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x, rounded as by `quantise`."""
    return _launch_norm(x_TE, None, weight_E, eps)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds `delta_TE` to `x_TE` in place; the norm of the sum."""
    return _launch_norm(x_TE, delta_TE, weight_E, eps)


def silu_mul(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up for [T, 2F]: gate, then up."""
    return _launch_gate(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(gate) * up, with the tanh form of gelu."""
    return _launch_gate(gate_up, is_gelu=True)


def _outputs(num_rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty((num_rows, 1), dtype=torch.float32, device=device)


def _launch_norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, size = x_TE.shape
    values, scales = _outputs(num_rows, size, x_TE.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        delta = x_TE if delta_TE is None else delta_TE
        _norm[(num_rows,)](
            x_TE,
            delta,
            x_TE if weight_E is None else weight_E,
            values,
            scales,
            x_TE.stride(0),
            delta.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            HAS_DELTA=delta_TE is not None,
            HAS_WEIGHT=weight_E is not None,
            num_warps=_num_warps(block),
            **overlap_options(),
        )
    return values, scales


def _launch_gate(gate_up: Tensor, *, is_gelu: bool) -> tuple[Tensor, Tensor]:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    values, scales = _outputs(num_rows, size, gate_up.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _gate[(num_rows,)](
            gate_up,
            values,
            scales,
            gate_up.stride(0),
            SIZE=size,
            IS_GELU=is_gelu,
            BLOCK=block,
            num_warps=_num_warps(block),
            **overlap_options(),
        )
    return values, scales


def _num_warps(block: int) -> int:
    return min(32, max(1, block // 512))

"""Passes over rows between the products: RMS norm, alone or after the addition of the previous sublayer's output, and
the gate of an mlp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.kernels.casts import begin, cast, overlap_options

# Shapes: T tokens (or tokens times heads), E row length.


@triton.jit
def _norm(
    x,
    delta,
    weight,
    out,
    x_stride,
    delta_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
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
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, cast(value * factor * scale, out.dtype.element_ty), mask=inside)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Like ops.rms_norm, for two axes; rows may be apart."""
    return _launch_norm(x_TE, None, weight_E, eps)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta_TE` to `x_TE` in place, rounds to its dtype, and returns the norm of the sum."""
    return _launch_norm(x_TE, delta_TE, weight_E, eps)


def _launch_norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
    num_rows, size = x_TE.shape
    out_TE = torch.empty((num_rows, size), dtype=x_TE.dtype, device=x_TE.device)
    if not num_rows:
        return out_TE
    block = triton.next_power_of_2(size)
    delta = x_TE if delta_TE is None else delta_TE
    _norm[(num_rows,)](
        x_TE,
        delta,
        weight_E,
        out_TE,
        x_TE.stride(0),
        delta.stride(0),
        out_TE.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=delta_TE is not None,
        num_warps=min(16, max(1, block // 512)),
        **overlap_options(),
    )
    return out_TE


# --- gate of an mlp -------------------------------------------------------------------------------------------
# activation(gate) * up in one pass over [T, 2F].

_TWO_LOG2_E = tl.constexpr(2.885390081777927)
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_GELU_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_BLOCK = 1024


@triton.jit
def tanh(x):
    """By exp2, which saturates at both ends without a NaN."""
    return 1.0 - 2.0 / (tl.exp2(x * _TWO_LOG2_E) + 1.0)


@triton.jit
def gate_times_up(gate, up, IS_GELU: tl.constexpr):
    if IS_GELU:
        active = 0.5 * gate * (1.0 + tanh((gate + 0.044715 * gate * gate * gate) * _GELU_SLOPE))
    else:
        active = gate / (1.0 + tl.exp2(gate * _MINUS_LOG2_E))
    return active * up


@triton.jit
def _gate(gate_up, out, stride, size, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, cast(gate_times_up(gate, up, IS_GELU), out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2F]: gate, then up."""
    return _launch_gate(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of gelu."""
    return _launch_gate(gate_up, is_gelu=True)


def _launch_gate(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out_TF = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _gate[grid](
            gate_up, out_TF, gate_up.stride(0), size, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4, **overlap_options()
        )
    return out_TF

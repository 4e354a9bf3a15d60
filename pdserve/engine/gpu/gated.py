"""The gate of an mlp: activation(gate) * up in one pass over [T, 2F]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.casts import cast
from pdserve.engine.gpu.overlap import begin, overlap_options

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
    return _launch(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of gelu."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out_TF = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _gate[grid](
            gate_up, out_TF, gate_up.stride(0), size, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4, **overlap_options()
        )
    return out_TF

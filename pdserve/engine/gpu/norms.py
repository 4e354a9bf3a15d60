"""RMS norm of rows, alone or after the addition of the previous sublayer's output."""

# Shapes: T tokens (or tokens times heads), E row length.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.casts import cast
from pdserve.engine.gpu.overlap import begin, overlap_options


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
    return _launch(x_TE, None, weight_E, eps)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta_TE` to `x_TE` in place, rounds to its dtype, and returns the norm of the sum."""
    return _launch(x_TE, delta_TE, weight_E, eps)


def _launch(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
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

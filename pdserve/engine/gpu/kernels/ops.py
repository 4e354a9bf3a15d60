"""engine.ops in Triton: the operations between the products, on a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from pdserve.engine.cpu.ops import RoundedOps
from pdserve.engine.gpu.kernels import fp8, norms
from pdserve.engine.gpu.kernels.norms import gelu_mul, silu_mul

__all__ = ["ROUNDED", "add_rms_norm", "gelu_mul", "rms_norm", "silu_mul"]

ROUNDED: Final[Mapping[str, RoundedOps]] = {"fp8": fp8}


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    return norms.rms_norm(x.reshape(-1, x.shape[-1]), weight_E, eps).view(x.shape)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta_TE` to `x_TE` in place, and returns the norm of the sum."""
    return norms.add_rms_norm(x_TE, delta_TE, weight_E, eps)

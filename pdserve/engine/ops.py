"""Operations between the matrix products, in the fastest form for the device."""

# Shapes: T tokens, E hidden size, F mlp size.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.kernels import rows


class RoundedOps(Protocol):
    """Functions of Ops with rounded results (values and scales), as Fp8Linear.product expects them."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate_up: Tensor) -> tuple[Tensor, Tensor]: ...
    def gelu_mul(self, gate_up: Tensor) -> tuple[Tensor, Tensor]: ...


class Ops(Protocol):
    """This module, or another with the same functions for another device."""

    @property
    def fp8(self) -> RoundedOps | None:
        """None if rounding is a separate operation."""
        ...

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...


fp8: RoundedOps | None = None


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    if x_TE.ndim == 2 and rows.fits(x_TE, weight_E):
        return rows.rms_norm(x_TE, weight_E, eps)
    return _rms_norm(x_TE, weight_E, eps)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta_TE` to `x_TE` in place, and returns the norm of the sum."""
    if rows.fits(x_TE, delta_TE, weight_E):
        return rows.add_rms_norm(x_TE, delta_TE, weight_E, eps)
    return _rms_norm(x_TE.add_(delta_TE), weight_E, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2F]: gate, then up."""
    return rows.silu_mul(gate_up) if rows.fits(gate_up) else _gate(F.silu, gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of gelu."""
    return rows.gelu_mul(gate_up) if rows.fits(gate_up) else _gate(partial(F.gelu, approximate="tanh"), gate_up)


def _gate(activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up.chunk(2, dim=-1)
    return activate(gate_TF) * up_TF


def _rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A float32 weight is multiplied before the result is rounded to x's dtype."""
    if weight_E.dtype == x_TE.dtype:
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    return F.rms_norm(x_TE.float(), weight_E.shape, weight_E, eps).to(x_TE.dtype)

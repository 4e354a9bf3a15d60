"""Operations between the matrix products: norms, gated activations, rounding. This module is the `Ops` of a CPU.

float32 tensors on a CPU, and bfloat16 results of products there, use the kernels of kernels/rows.py, if numba is
installed; all others use torch. gpu/kernels/ops.py has the same functions for a GPU. ROUNDED has those whose results a
product takes rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.kernels.rounding import LEAST_SCALE, LEVELS, ZERO_POINT

# Shapes: T tokens, E hidden size, F mlp size, K inputs of a product.

if jit.is_available():
    from pdserve.engine.cpu.kernels import rows
    from pdserve.engine.cpu.kernels.task import empty


class RoundedOps(Protocol):
    """Functions of Ops with rounded results, as `product` of a Linear expects them: values, and scales if any."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, ...]: ...
    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, ...]: ...
    def silu_mul(self, gate_up: Tensor) -> tuple[Tensor, ...]: ...
    def gelu_mul(self, gate_up: Tensor) -> tuple[Tensor, ...]: ...


class Ops(Protocol):
    """The functions of this module, on some device: this module, or gpu/kernels/ops.py."""

    @property
    def ROUNDED(self) -> Mapping[str, RoundedOps]:
        """By the `rounding` of a product; for others, rounding is a separate operation."""
        ...

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...


_HAS_KERNELS: Final = jit.is_available()
_READABLE: Final = (torch.float32, torch.bfloat16)


def is_readable(x: Tensor) -> bool:
    """Whether the kernels can read this tensor, which may be the result of a bfloat16 product."""
    return _HAS_KERNELS and x.is_cpu and x.dtype in _READABLE and x.is_contiguous()


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels can write these tensors."""
    return all(tensor.dtype == torch.float32 and is_readable(tensor) for tensor in tensors)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    if x_TE.ndim != 2 or not fits(weight_E) or not is_readable(x_TE):
        return _torch_rms_norm(x_TE, weight_E, eps)
    out_TE = empty(x_TE.shape)
    rows.norm(x_TE, None, weight_E, eps, out_TE, out_TE)
    return out_TE


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta_TE` to `x_TE` in place, and returns the norm of the sum."""
    if not fits(x_TE, weight_E) or not is_readable(delta_TE):
        return _torch_rms_norm(x_TE.add_(delta_TE), weight_E, eps)
    out_TE = empty(x_TE.shape)
    rows.norm(x_TE, delta_TE, weight_E, eps, out_TE, out_TE)
    return out_TE


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2F]: gate, then up."""
    return _gate("silu", F.silu, gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of gelu."""
    return _gate("gelu", partial(F.gelu, approximate="tanh"), gate_up)


def _gate(name: str, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    if not is_readable(gate_up):
        gate_TF, up_TF = gate_up.chunk(2, dim=-1)
        return activate(gate_TF) * up_TF
    out_TF = empty((gate_up.shape[0], gate_up.shape[1] // 2))
    rows.gate(name, gate_up, out_TF, out_TF)
    return out_TF


def add_bias(x_TN: Tensor, bias_N: Tensor | None) -> Tensor:
    """`x_TN`, after the float32 bias, if any, was added in place."""
    if bias_N is None:
        return x_TN
    if not is_readable(x_TN) or not fits(bias_N):
        return x_TN.add_(bias_N)
    rows.add_bias(x_TN, bias_N)
    return x_TN


def argmax(x_TV: Tensor) -> list[int]:
    """The first of the largest values of each row."""
    if not fits(x_TV):
        return x_TV.argmax(dim=-1).tolist()  # type: ignore[no-any-return]  # documented to return the first
    best_T = torch.empty(x_TV.shape[0], dtype=torch.int64)
    rows.argmax(x_TV, best_T)
    return best_T.tolist()  # type: ignore[no-any-return]


def _torch_rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A float32 weight is multiplied before the result is rounded to x's dtype."""
    if weight_E.dtype == x_TE.dtype:
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    return F.rms_norm(x_TE.float(), weight_E.shape, weight_E, eps).to(x_TE.dtype)


def quantise(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """x / scale rounded to [-127, 127], stored as uint8 around 128; and the scale of each token [T, 1]."""
    if not is_readable(x_TK):
        scale_T1 = x_TK.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_SCALE).div_(LEVELS)
        return (x_TK / scale_T1).round_().add_(ZERO_POINT).to(torch.uint8), scale_T1
    rounded_TK, scale_T1 = empty(x_TK.shape, torch.uint8), torch.empty(x_TK.shape[0], 1)
    rows.rounded(x_TK, rounded_TK, scale_T1)
    return rounded_TK, scale_T1


def to_bfloat16(x_TK: Tensor) -> Tensor:
    if x_TK.dtype == torch.bfloat16 or x_TK.ndim != 2 or not is_readable(x_TK):
        return x_TK.bfloat16()
    rounded_TK = empty(x_TK.shape, torch.bfloat16)
    rows.rounded(x_TK, rounded_TK, rounded_TK)
    return rounded_TK


# --- operations with rounded results --------------------------------------------------------------------------
# Each row is rounded while it is in the cache. Without numba they are the operations above, followed by the rounding.
#
#     int8       uint8 around 128 [T, K], and the scale of each token [T, 1]: what int8 and int4 products multiply
#     bfloat16   bfloat16 [T, K]: what bfloat16 products multiply

Rounded = tuple[Tensor, ...]


@final
class HostRoundedOps:
    """`RoundedOps` for one kind of rounding."""

    def __init__(self, dtype: torch.dtype, round_rows: Callable[[Tensor], Rounded]) -> None:
        """`dtype` of the rounded values."""
        self._dtype, self._round_rows = dtype, round_rows

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Rounded:
        if not fits(weight_E) or not is_readable(x_TE):
            return self._round_rows(rms_norm(x_TE, weight_E, eps))
        out_TE, scale_T1 = self._empty(x_TE.shape[0], x_TE.shape[1])
        rows.norm(x_TE, None, weight_E, eps, out_TE, scale_T1)
        return self._taken(out_TE, scale_T1)

    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Rounded:
        if not fits(x_TE, weight_E) or not is_readable(delta_TE):
            return self._round_rows(add_rms_norm(x_TE, delta_TE, weight_E, eps))
        out_TE, scale_T1 = self._empty(x_TE.shape[0], x_TE.shape[1])
        rows.norm(x_TE, delta_TE, weight_E, eps, out_TE, scale_T1)
        return self._taken(out_TE, scale_T1)

    def silu_mul(self, gate_up: Tensor) -> Rounded:
        return self._gate("silu", silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Rounded:
        return self._gate("gelu", gelu_mul, gate_up)

    def _gate(self, name: str, plain: Callable[[Tensor], Tensor], gate_up: Tensor) -> Rounded:
        if not is_readable(gate_up):
            return self._round_rows(plain(gate_up))
        out_TF, scale_T1 = self._empty(gate_up.shape[0], gate_up.shape[1] // 2)
        rows.gate(name, gate_up, out_TF, scale_T1)
        return self._taken(out_TF, scale_T1)

    def _empty(self, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """The result, and its scales; without scales the result twice."""
        out = empty((num_rows, num_columns), self._dtype)
        return out, torch.empty(num_rows, 1) if self._dtype == torch.uint8 else out

    def _taken(self, out: Tensor, scale_T1: Tensor) -> Rounded:
        return (out, scale_T1) if self._dtype == torch.uint8 else (out,)


ROUNDED: Final[Mapping[str, HostRoundedOps]] = {
    "int8": HostRoundedOps(torch.uint8, quantise),
    "bfloat16": HostRoundedOps(torch.bfloat16, lambda x_TK: (to_bfloat16(x_TK),)),
}

"""Operations between the matrix products: norms, gated activations, rounding to int8.

float32 tensors on a CPU, and bfloat16 results of products there, use the kernels of kernels/rows.py, if numba is
installed; all others use torch. engine/gpu/ops.py has the same functions for a GPU, and rounded_ops.py those whose
results are rounded.
"""

# Shapes: T tokens, E hidden size, F mlp size, K inputs of a product.

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.kernels import jit
from pdserve.engine.rounding import LEAST_SCALE, LEVELS, ZERO_POINT

if jit.is_available():
    from pdserve.engine.kernels import rows
    from pdserve.engine.kernels.results import empty


class RoundedOps(Protocol):
    """Functions of Ops with rounded results, as RoundingLinear.product expects them: values, and scales if any."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, ...]: ...
    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, ...]: ...
    def silu_mul(self, gate_up: Tensor) -> tuple[Tensor, ...]: ...
    def gelu_mul(self, gate_up: Tensor) -> tuple[Tensor, ...]: ...


class Ops(Protocol):
    """The functions of this module, on some device: cpu_ops.py or gpu/ops.py."""

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

"""Operations between the matrix products: norms, gated activations, rounding to int8.

float32 tensors on a CPU use numba kernels, if numba is installed, with one pass over memory each; all others use torch.
The results of products may be bfloat16 there. Each row is computed independently, always in the same order.
engine/gpu/ops.py has the same functions for a GPU, and rounded_ops.py those whose results are rounded.

numba caches machine code by the time stamp of this file, and exponential.py and bfloat16.py are inlined here. A change
there must also change this file; otherwise cached kernels stay in use. Revision of the inlined parts: 4.
"""

# Shapes: T tokens, E hidden size, F mlp size, K inputs of a product.

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.kernels import jit
from pdserve.engine.kernels.bfloat16 import widen, words
from pdserve.engine.kernels.exponential import exp

LEAST_SCALE: Final = 1e-12  # a token of zeros would divide by zero
LEVELS: Final = 127  # int8 without -128, so that rounding is symmetric
ZERO_POINT: Final = 128  # VNNI multiplies unsigned by signed


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


def is_readable(x: Tensor) -> bool:
    """Whether the kernels can read this tensor, which may be the result of a bfloat16 product."""
    is_wide = x.dtype in (torch.float32, torch.bfloat16)
    return is_wide and jit.is_available() and x.device.type == "cpu" and x.is_contiguous()


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels support these tensors."""
    return jit.is_available() and all(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    if x_TE.ndim != 2 or not fits(weight_E) or not is_readable(x_TE):
        return _torch_rms_norm(x_TE, weight_E, eps)
    out_TE = torch.empty(x_TE.shape)
    x, weight, out = words(x_TE), weight_E.numpy(), out_TE.numpy()
    jit.split_rows(lambda first, end: _rms_norm(x, weight, np.float32(eps), out, first, end), len(x), x.size)
    return out_TE


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `delta_TE` to `x_TE` in place, and returns the norm of the sum."""
    if not fits(x_TE, weight_E) or not is_readable(delta_TE):
        return _torch_rms_norm(x_TE.add_(delta_TE), weight_E, eps)
    out_TE = torch.empty_like(x_TE)
    x, delta, weight, out = x_TE.numpy(), words(delta_TE), weight_E.numpy(), out_TE.numpy()
    jit.split_rows(lambda first, end: _add_rms_norm(x, delta, weight, np.float32(eps), out, first, end), len(x), x.size)
    return out_TE


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2F]: gate, then up."""
    return _gate(_silu_mul, F.silu, gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of gelu."""
    return _gate(_gelu_mul, partial(F.gelu, approximate="tanh"), gate_up)


def _gate(kernel: Callable[..., Any], activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    if not is_readable(gate_up):
        gate_TF, up_TF = gate_up.chunk(2, dim=-1)
        return activate(gate_TF) * up_TF
    out_TF = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    source, out = words(gate_up), out_TF.numpy()
    jit.split_rows(lambda first, end: kernel(source, out, first, end), len(out), 8 * out.size)
    return out_TF


def _torch_rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A float32 weight is multiplied before the result is rounded to x's dtype."""
    if weight_E.dtype == x_TE.dtype:
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    return F.rms_norm(x_TE.float(), weight_E.shape, weight_E, eps).to(x_TE.dtype)


def quantise(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """x / scale rounded to [-127, 127], stored as uint8 around 128; and the scale of each token [T, 1]."""
    if not fits(x_TK):
        scale_T1 = x_TK.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_SCALE).div_(LEVELS)
        return (x_TK / scale_T1).round_().add_(ZERO_POINT).to(torch.uint8), scale_T1
    rounded_TK = torch.empty(x_TK.shape, dtype=torch.uint8)
    scale_T1 = x_TK.new_empty(x_TK.shape[0], 1)
    x, rounded, scale = x_TK.numpy(), rounded_TK.numpy(), scale_T1.numpy()
    jit.split_rows(lambda first, end: _quantise(x, rounded, scale, first, end), len(x), x.size)
    return rounded_TK, scale_T1


@jit.compiled
def _rms_norm(x: Any, weight: Any, eps: Any, out: Any, first: int, end: int) -> None:
    size = np.uint64(x.shape[1])
    for row in range(first, end):
        source, target, total = x[row], out[row], np.float32(0)
        for i in range(size):
            value = widen(source[i])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            target[i] = widen(source[i]) * factor * weight[i]


@jit.compiled
def _add_rms_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any, first: int, end: int) -> None:
    size = np.uint64(x.shape[1])
    for row in range(first, end):
        source, change, target, total = x[row], delta[row], out[row], np.float32(0)
        for i in range(size):
            value = source[i] + widen(change[i])
            source[i] = value
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            target[i] = source[i] * factor * weight[i]


@jit.compiled
def _silu_mul(gate_up: Any, out: Any, first: int, end: int) -> None:
    size = np.uint64(out.shape[1])
    for row in range(first, end):
        gate, up, target = gate_up[row, : out.shape[1]], gate_up[row, out.shape[1] :], out[row]
        for i in range(size):
            x = widen(gate[i])
            target[i] = x / (np.float32(1) + exp(-x)) * widen(up[i])


@jit.compiled
def _gelu_mul(gate_up: Any, out: Any, first: int, end: int) -> None:
    """(1 + tanh(u)) / 2 is 1 / (1 + e^-2u): one exponential, and no cancellation if tanh is near -1."""
    size = np.uint64(out.shape[1])
    for row in range(first, end):
        gate, up, target = gate_up[row, : out.shape[1]], gate_up[row, out.shape[1] :], out[row]
        for i in range(size):
            x = widen(gate[i])
            u2 = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)  # 2 sqrt(2 / pi)
            target[i] = x / (np.float32(1) + exp(-u2)) * widen(up[i])


@jit.compiled
def _quantise(x: Any, rounded: Any, scale: Any, first: int, end: int) -> None:
    size = np.uint64(x.shape[1])
    for row in range(first, end):
        source, target, most = x[row], rounded[row], np.float32(LEAST_SCALE)
        for i in range(size):
            most = max(most, abs(source[i]))
        scale[row, 0] = most / np.float32(LEVELS)
        factor = np.float32(LEVELS) / most
        for i in range(size):
            target[i] = np.uint8(np.int32(np.rint(source[i] * factor)) + np.int32(ZERO_POINT))

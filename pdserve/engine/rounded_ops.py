"""Operations whose results a product takes rounded, on a CPU: each row is rounded while it is in the cache.

int8       uint8 around 128 [T, K], and the scale of each token [T, 1]: what Int8Linear multiplies
bfloat16   bfloat16 [T, K]: what Bf16Linear multiplies

Without numba they are the operations of ops.py, followed by the rounding.

numba caches machine code by the time stamp of this file, and exponential.py and bfloat16.py are inlined here. A change
there must also change this file; otherwise cached kernels stay in use. Revision of the inlined parts: 1.
"""

# Shapes: T tokens, E hidden size, F mlp size.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from pdserve.engine import ops
from pdserve.engine.kernels import jit
from pdserve.engine.kernels.bfloat16 import narrow, widen, words
from pdserve.engine.kernels.exponential import exp

Rounded = tuple[Tensor, ...]


@final
class HostRoundedOps:
    """`ops.RoundedOps` for one kind of rounding."""

    def __init__(self, dtype: torch.dtype, round_rows: Callable[[Tensor], Rounded]) -> None:
        """`dtype` of the rounded values."""
        self._dtype, self._round_rows = dtype, round_rows

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Rounded:
        return self._round_rows(ops.rms_norm(x_TE, weight_E, eps))

    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Rounded:
        if not ops.fits(x_TE, weight_E) or not ops.is_readable(delta_TE):
            return self._round_rows(ops.add_rms_norm(x_TE, delta_TE, weight_E, eps))
        out_TE, scale_T1 = self._empty(x_TE.shape[0], x_TE.shape[1])
        x, delta, weight = x_TE.numpy(), words(delta_TE), weight_E.numpy()
        out, scale, least = words(out_TE), scale_T1.numpy(), np.float32(eps)
        jit.split_rows(
            lambda first, end: _add_rms_norm(x, delta, weight, least, out, scale, first, end), len(x), x.size
        )
        return self._taken(out_TE, scale_T1)

    def silu_mul(self, gate_up: Tensor) -> Rounded:
        return self._gate(_silu_mul, ops.silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Rounded:
        return self._gate(_gelu_mul, ops.gelu_mul, gate_up)

    def _gate(self, kernel: Callable[..., Any], plain: Callable[[Tensor], Tensor], gate_up: Tensor) -> Rounded:
        if not ops.is_readable(gate_up):
            return self._round_rows(plain(gate_up))
        out_TF, scale_T1 = self._empty(gate_up.shape[0], gate_up.shape[1] // 2)
        source, out, scale = words(gate_up), words(out_TF), scale_T1.numpy()
        jit.split_rows(lambda first, end: kernel(source, out, scale, first, end), len(source), 8 * out_TF.numel())
        return self._taken(out_TF, scale_T1)

    def _empty(self, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
        return torch.empty((num_rows, num_columns), dtype=self._dtype), torch.empty(num_rows, 1)

    def _taken(self, out: Tensor, scale_T1: Tensor) -> Rounded:
        return (out, scale_T1) if self._dtype == torch.uint8 else (out,)


def _to_bfloat16(x: Tensor) -> Rounded:
    return (x.bfloat16(),)


def store(held: Any, out: Any, scale: Any, row: Any) -> Any:
    """Rounds the row `held`, in float32, to out[row], by the dtype of `out`. For kernels."""
    raise NotImplementedError


if jit.is_available():
    from numba import types
    from numba.extending import overload

    @overload(store, inline="always")
    def _store(held: Any, out: Any, scale: Any, row: Any) -> Any:
        if out.dtype == types.uint16:
            return _store_bfloat16
        return _store_int8


def _store_bfloat16(held: Any, out: Any, scale: Any, row: Any) -> Any:
    target = out[row]
    for i in range(np.uint64(held.size)):
        target[i] = narrow(held[i])


def _store_int8(held: Any, out: Any, scale: Any, row: Any) -> Any:
    target, most = out[row], np.float32(ops.LEAST_SCALE)
    for i in range(np.uint64(held.size)):
        most = max(most, abs(held[i]))
    scale[row, 0] = most / np.float32(ops.LEVELS)
    factor = np.float32(ops.LEVELS) / most
    for i in range(np.uint64(held.size)):
        target[i] = np.uint8(np.int32(np.rint(held[i] * factor)) + np.int32(ops.ZERO_POINT))


@jit.compiled
def _add_rms_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any, scale: Any, first: int, end: int) -> None:
    size, held = np.uint64(x.shape[1]), np.empty(x.shape[1], np.float32)
    for row in range(first, end):
        source, change, total = x[row], delta[row], np.float32(0)
        for i in range(size):
            value = source[i] + widen(change[i])
            source[i] = value
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            held[i] = source[i] * factor * weight[i]
        store(held, out, scale, row)


@jit.compiled
def _silu_mul(gate_up: Any, out: Any, scale: Any, first: int, end: int) -> None:
    size, held = np.uint64(out.shape[1]), np.empty(out.shape[1], np.float32)
    for row in range(first, end):
        gate, up = gate_up[row, : out.shape[1]], gate_up[row, out.shape[1] :]
        for i in range(size):
            x = widen(gate[i])
            held[i] = x / (np.float32(1) + exp(-x)) * widen(up[i])
        store(held, out, scale, row)


@jit.compiled
def _gelu_mul(gate_up: Any, out: Any, scale: Any, first: int, end: int) -> None:
    size, held = np.uint64(out.shape[1]), np.empty(out.shape[1], np.float32)
    for row in range(first, end):
        gate, up = gate_up[row, : out.shape[1]], gate_up[row, out.shape[1] :]
        for i in range(size):
            x = widen(gate[i])
            u2 = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)  # 2 sqrt(2 / pi)
            held[i] = x / (np.float32(1) + exp(-u2)) * widen(up[i])
        store(held, out, scale, row)


ROUNDED: Final[Mapping[str, HostRoundedOps]] = {
    "int8": HostRoundedOps(torch.uint8, ops.quantise),
    "bfloat16": HostRoundedOps(torch.bfloat16, _to_bfloat16),
}

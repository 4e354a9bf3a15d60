"""Operations whose results a product takes rounded, on a CPU: each row is rounded while it is in the cache.

int8       uint8 around 128 [T, K], and the scale of each token [T, 1]: what Int8Linear multiplies
bfloat16   bfloat16 [T, K]: what Bf16Linear multiplies

Without numba they are the operations of ops.py, followed by the rounding.
"""

# Shapes: T tokens, E hidden size, F mlp size.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, final

import torch
from torch import Tensor

from pdserve.engine import ops
from pdserve.engine.kernels import jit

if jit.is_available():
    from pdserve.engine.kernels import rows
    from pdserve.engine.kernels.results import empty

Rounded = tuple[Tensor, ...]


@final
class HostRoundedOps:
    """`ops.RoundedOps` for one kind of rounding."""

    def __init__(self, dtype: torch.dtype, round_rows: Callable[[Tensor], Rounded]) -> None:
        """`dtype` of the rounded values."""
        self._dtype, self._round_rows = dtype, round_rows

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Rounded:
        if not ops.fits(weight_E) or not ops.is_readable(x_TE):
            return self._round_rows(ops.rms_norm(x_TE, weight_E, eps))
        out_TE, scale_T1 = self._empty(x_TE.shape[0], x_TE.shape[1])
        rows.norm(x_TE, None, weight_E, eps, out_TE, scale_T1)
        return self._taken(out_TE, scale_T1)

    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor, weight_E: Tensor, eps: float) -> Rounded:
        if not ops.fits(x_TE, weight_E) or not ops.is_readable(delta_TE):
            return self._round_rows(ops.add_rms_norm(x_TE, delta_TE, weight_E, eps))
        out_TE, scale_T1 = self._empty(x_TE.shape[0], x_TE.shape[1])
        rows.norm(x_TE, delta_TE, weight_E, eps, out_TE, scale_T1)
        return self._taken(out_TE, scale_T1)

    def silu_mul(self, gate_up: Tensor) -> Rounded:
        return self._gate("silu", ops.silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Rounded:
        return self._gate("gelu", ops.gelu_mul, gate_up)

    def _gate(self, name: str, plain: Callable[[Tensor], Tensor], gate_up: Tensor) -> Rounded:
        if not ops.is_readable(gate_up):
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
    "int8": HostRoundedOps(torch.uint8, ops.quantise),
    "bfloat16": HostRoundedOps(torch.bfloat16, lambda x_TK: (ops.to_bfloat16(x_TK),)),
}

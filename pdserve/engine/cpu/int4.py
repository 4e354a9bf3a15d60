"""Products with 4-bit weights in groups of inputs, on a CPU. Activations are rounded per token, as for int8.

Weights are stored as kernels/int4_layout.py says, with a group's scale in half precision, relative to the largest scale
of the matrix. kernels/int4_gemm.py multiplies them. It needs AVX-512 VNNI, or AVX2 on a CPU without AVX-512. Elsewhere
a few outputs at a time are dequantised and multiplied by torch, which is slow. With AMX, so are many rows of groups
that are not a multiple of 64 inputs; then bfloat16 is faster than VNNI.
"""

# Shapes: T tokens, K inputs, N outputs, G groups of inputs, S inputs of a group.

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.kernels.int4_layout import LEVELS, PANEL, dequantise, pack
from pdserve.engine.cpu.kernels.rounding import LEAST_SCALE, WEIGHTS_AT_ONCE, ZERO_POINT
from pdserve.engine.cpu.ops import add_bias, quantise

GROUP: Final = 64  # inputs that share a scale, for weights that are rounded here
_LARGEST_EXPONENT: Final = 15  # of a scale in half precision
_MOST_BEFORE_AMX: Final = 64


@final
class Int4Linear:
    """(`rounded_NK` - `zero_NG`) * `scale_NG` are the weights; all inputs are in groups of equal size."""

    rounding: Literal["int8"] = "int8"  # of its inputs

    def __init__(self, rounded_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor, bias_N: Tensor | None) -> None:
        self._num_outputs, self._num_inputs = rounded_NK.shape
        self._size = self._num_inputs // scale_NG.shape[1]
        exponent = _LARGEST_EXPONENT - math.frexp(float(scale_NG.amax()))[1]
        self._factor = 2.0**-exponent
        self._blocks = pack(rounded_NK, torch.ldexp(scale_NG.float(), torch.tensor(exponent)), zero_NG, self._size)
        self._bias_N = None if bias_N is None else bias_N.float()
        self._most_rows = sys.maxsize if has_kernel() else 0
        if has_kernel() and has_amx() and not has_tiles(self._size):
            self._most_rows = _MOST_BEFORE_AMX

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self.product(*quantise(x_TK))

    def product(self, quantised_TK: Tensor, scale_T1: Tensor) -> Tensor:
        """Of the results of `ops.quantise`, in float32."""
        if quantised_TK.shape[0] <= self._most_rows:
            from pdserve.engine.cpu.kernels.int4_gemm import multiply

            out_TN = multiply(self._blocks, self._factor, self._size, self._num_outputs, quantised_TK, scale_T1)
        else:
            out_TN = self._dequantised_product(quantised_TK, scale_T1)
        return add_bias(out_TN, self._bias_N)

    def _dequantised_product(self, quantised_TK: Tensor, scale_T1: Tensor) -> Tensor:
        dtype = torch.bfloat16 if has_amx() else torch.float32
        x_TK = (quantised_TK.float() - ZERO_POINT).to(dtype)  # exact
        x_TK = F.pad(x_TK, (0, self._blocks.shape[1] * self._size - x_TK.shape[1]))
        num_panels = max(1, WEIGHTS_AT_ONCE // (PANEL * x_TK.shape[1]))
        parts = [F.linear(x_TK, dequantise(part, self._size).to(dtype)) for part in self._blocks.split(num_panels)]
        return torch.cat(parts, dim=1)[:, : self._num_outputs].float() * (scale_T1 * self._factor)


def make_int4_linear(weight_NK: Tensor, bias_N: Tensor | None) -> Int4Linear:
    """Rounds to nearest, in groups of 64 inputs. The last group is filled with zeros."""
    return Int4Linear(*round_groups(F.pad(weight_NK, (0, -weight_NK.shape[1] % GROUP))), bias_N)


def round_groups(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [N, K] from 0 to 15, and each group's scale and zero [N, G]. A group's range includes 0, which is exact."""
    num_outputs, num_inputs = weight_NK.shape
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.uint8)
    scale_NG = torch.empty(num_outputs, num_inputs // GROUP)
    zero_NG = torch.empty(scale_NG.shape, dtype=torch.uint8)
    num_at_once = max(1, WEIGHTS_AT_ONCE // num_inputs)
    parts = (tensor.split(num_at_once) for tensor in (weight_NK, rounded_NK, scale_NG, zero_NG))
    for weight_PK, rounded_PK, scale_PG, zero_PG in zip(*parts, strict=True):
        weight_PGS = weight_PK.float().view(*scale_PG.shape, GROUP)
        least_PG, most_PG = weight_PGS.amin(-1).clamp_(max=0), weight_PGS.amax(-1).clamp_(min=0)
        torch.div(most_PG - least_PG, LEVELS, out=scale_PG).clamp_(min=LEAST_SCALE)
        zero = least_PG.div_(scale_PG).neg_().round_()
        zero_PG.copy_(zero)
        rounded_PGS = (weight_PGS / scale_PG[..., None]).round_().add_(zero[..., None]).clamp_(0, LEVELS)
        rounded_PK.copy_(rounded_PGS.view_as(weight_PK))
    return rounded_NK, scale_NG, zero_NG


@cache
def has_kernel() -> bool:
    """Whether 4-bit weights are multiplied without dequantising them first."""
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels.int4_gemm import is_supported

    return is_supported()


def has_tiles(size: int) -> bool:
    """Whether groups of that size are multiplied by AMX without dequantising them first."""
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels.amx_int4 import is_supported

    return is_supported(size)


@cache
def has_amx() -> bool:
    """Whether oneDNN may use AMX. It does not say; NUMBA_CPU_FEATURES without AMX stands for an older CPU."""
    if not torch.cpu._is_amx_tile_supported():
        return False
    return not jit.is_available() or "+amx-tile" in jit.target()[1].split(",")

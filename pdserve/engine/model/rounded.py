"""Storage forms whose weights are rounded with scales: int8, int4, fp8. Their inputs are rounded per token.

        w[n, k] ~ q_w[n, k] * s_w[n]
        x[t, k] ~ q_x[t, k] * s_x[t]
        y[t, n] ~ s_x[t] * s_w[n] * sum_k q_x[t, k] q_w[n, k]

A token's scale depends only on the token, so other rows change its result by at most float32 rounding. In int4 a scale
belongs to a group of an output's inputs.
"""

# Shapes: T tokens, K inputs, N outputs, G groups of inputs, S inputs of a group.

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels import int4_layout, jit
from pdserve.engine.cpu.kernels.int4_layout import PANEL, dequantise, pack
from pdserve.engine.cpu.kernels.rounding import LEAST_SCALE, LEVELS, WEIGHTS_AT_ONCE, ZERO_POINT
from pdserve.engine.cpu.ops import add_bias, quantise
from pdserve.engine.model.linear import TRIED_ROWS, Linear, Rounding

MOST_PANEL_ROWS: Final = 32  # with more rows, oneDNN is as fast as kernels.packed_gemm

Product = Callable[[Tensor, Tensor], Tensor]  # of rounded inputs and their scales


def float_bias(bias_N: Tensor | None) -> Tensor | None:
    """A bias that is added to float32 or bfloat16 results."""
    return None if bias_N is None else bias_N.float()


# --- int8 -----------------------------------------------------------------------------------------------------
# s_w[n] = max_k |w[n, k]| / 127, or / 63 without VNNI; s_x[t] = max_k |x[t, k]| / 127. Sums are int32.


@final
class Int8Linear(Linear):
    """oneDNN's layout, for any number of rows; few rows by `few_rows`, which reads them from the same memory. `scale_N`
    times the integers are the weights."""

    rounding: Rounding = "int8"

    def __init__(self, packed: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> None:
        self.few_rows: Product | None = None
        self.packed, self._scale_N = packed, scale_N
        self._zero_N = torch.zeros(scale_N.shape, dtype=torch.int64)
        self._bias_N = float_bias(bias_N)

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        return quantise(x_TK)

    def product(self, *inputs: Tensor) -> Tensor:
        product = self.whole if inputs[0].shape[0] > MOST_PANEL_ROWS else self.few_rows or self.whole
        return add_bias(product(*inputs), self._bias_N)

    def whole(self, quantised_TK: Tensor, scale_T1: Tensor) -> Tensor:
        """oneDNN's product, for any number of rows, without the bias."""
        return _int8_product(quantised_TK, ZERO_POINT, self.packed, self._scale_N, self._zero_N).mul_(scale_T1)


def pack_int8(rounded_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Int8Linear:
    """Integers beyond `weight_levels()` could overflow."""
    linear = Int8Linear(torch.ops.onednn.qlinear_prepack(rounded_NK, None), scale_N, bias_N)
    if jit.is_available():
        from pdserve.engine.cpu.kernels.packed_gemm import make_int8_panels

        linear.few_rows = make_int8_panels(linear.packed, rounded_NK, scale_N, ZERO_POINT, linear.whole)
    return linear


def _int8_product(x_TK: Tensor, zero_point: int, packed: Tensor, scale_N: Tensor, zero_N: Tensor) -> Tensor:
    """[T, N] in float32; a bias is added after the tokens' scales."""
    out_TN: Tensor = torch.ops.onednn.qlinear_pointwise(
        x_TK, 1.0, zero_point, packed, scale_N, zero_N, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out_TN


@cache
def weight_levels() -> int:
    """The largest integer of a weight. Without VNNI two products are added in 16 bits, which cannot overflow with 63.

    A CPU may have VNNI while oneDNN may not use it (ONEDNN_MAX_CPU_ISA), so this is also tested.
    """
    is_wide = torch.cpu._is_vnni_supported() and is_exact(LEVELS)
    return LEVELS if is_wide else LEVELS // 2


def is_exact(level: int) -> bool:
    """Tests whether sums of the largest activations times weights of this level are exact, for few rows and for
    many."""
    num_inputs, num_outputs, most = 256, 64, 255
    weight_NK = torch.full((num_outputs, num_inputs), level, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight_NK, None)
    scale_N, zero_N = torch.ones(num_outputs), torch.zeros(num_outputs, dtype=torch.int64)
    return all(
        bool(
            (
                _int8_product(torch.full((num_rows, num_inputs), most, dtype=torch.uint8), 0, packed, scale_N, zero_N)
                == most * level * num_inputs
            ).all()
        )
        for num_rows in TRIED_ROWS
    )


def round_weights(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and the scale of each output [N]; a few outputs at a time, because intermediate results are large."""
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    scale_N = torch.empty(weight_NK.shape[0])
    num_at_once = max(1, WEIGHTS_AT_ONCE // weight_NK.shape[1])
    step_PK = torch.empty((min(num_at_once, len(weight_NK)), weight_NK.shape[1]))
    parts = (tensor.split(num_at_once) for tensor in (weight_NK, rounded_NK, scale_N))
    for weight_PK, rounded_PK, scale_P in zip(*parts, strict=True):
        step = step_PK[: len(weight_PK)]
        largest_P = step.copy_(weight_PK).abs_().amax(dim=1).clamp_(min=LEAST_SCALE)
        torch.div(largest_P, weight_levels(), out=scale_P)
        rounded_PK.copy_(step.copy_(weight_PK).div_(scale_P[:, None]).round_())
    return rounded_NK, scale_N


# --- int4 -----------------------------------------------------------------------------------------------------
# Weights are stored as cpu/kernels/int4_layout.py says, with a group's scale in half precision, relative to the largest
# scale of the matrix. int4_gemm.py multiplies them. It needs AVX-512 VNNI, or AVX2 on a CPU without AVX-512. Elsewhere
# a few outputs at a time are dequantised and multiplied by torch, which is slow. With AMX, so are many rows of groups
# that are not a multiple of 64 inputs; then bfloat16 is faster than VNNI. Inputs are rounded as for int8.

GROUP: Final = 64  # inputs that share a scale, for weights that are rounded here
_LARGEST_EXPONENT: Final = 15  # of a scale in half precision
_MOST_BEFORE_AMX: Final = 64


@final
class Int4Linear(Linear):
    """(`rounded_NK` - `zero_NG`) * `scale_NG` are the weights; all inputs are in groups of equal size."""

    rounding: Rounding = "int8"

    def __init__(self, rounded_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor, bias_N: Tensor | None) -> None:
        self._num_outputs, self._num_inputs = rounded_NK.shape
        self._size = self._num_inputs // scale_NG.shape[1]
        exponent = _LARGEST_EXPONENT - math.frexp(float(scale_NG.amax()))[1]
        self._factor = 2.0**-exponent
        self._blocks = pack(rounded_NK, torch.ldexp(scale_NG.float(), torch.tensor(exponent)), zero_NG, self._size)
        self._bias_N = float_bias(bias_N)
        self._most_rows = sys.maxsize if has_int4_kernel() else 0
        if has_int4_kernel() and has_amx() and not has_int4_tiles(self._size):
            self._most_rows = _MOST_BEFORE_AMX

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        return quantise(x_TK)

    def product(self, *inputs: Tensor) -> Tensor:
        quantised_TK, scale_T1 = inputs
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


def round_groups(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [N, K] from 0 to 15, and each group's scale and zero [N, G]. A group's range includes 0, which is exact.

    Rounds to the nearest, in groups of 64 inputs. The last group is filled with zeros.
    """
    weight_NK = F.pad(weight_NK, (0, -weight_NK.shape[1] % GROUP))
    num_outputs, num_inputs = weight_NK.shape
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.uint8)
    scale_NG = torch.empty(num_outputs, num_inputs // GROUP)
    zero_NG = torch.empty(scale_NG.shape, dtype=torch.uint8)
    num_at_once = max(1, WEIGHTS_AT_ONCE // num_inputs)
    parts = (tensor.split(num_at_once) for tensor in (weight_NK, rounded_NK, scale_NG, zero_NG))
    for weight_PK, rounded_PK, scale_PG, zero_PG in zip(*parts, strict=True):
        weight_PGS = weight_PK.float().view(*scale_PG.shape, GROUP)
        least_PG, most_PG = weight_PGS.amin(-1).clamp_(max=0), weight_PGS.amax(-1).clamp_(min=0)
        torch.div(most_PG - least_PG, int4_layout.LEVELS, out=scale_PG).clamp_(min=LEAST_SCALE)
        zero = least_PG.div_(scale_PG).neg_().round_()
        zero_PG.copy_(zero)
        rounded_PGS = (weight_PGS / scale_PG[..., None]).round_().add_(zero[..., None]).clamp_(0, int4_layout.LEVELS)
        rounded_PK.copy_(rounded_PGS.view_as(weight_PK))
    return rounded_NK, scale_NG, zero_NG


@cache
def has_int4_kernel() -> bool:
    """Whether 4-bit weights are multiplied without dequantising them first."""
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels.int4_gemm import is_supported

    return is_supported()


def has_int4_tiles(size: int) -> bool:
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


# --- fp8 (e4m3) -----------------------------------------------------------------------------------------------
# s_w[n] = max_k |w[n, k]| / 448, and s_x[t] = max_k |x[t, k]| / 448. Compared with bfloat16, half the bytes are read
# and the matrix units are twice as fast. The relative error of a weight is at most a sixteenth.

FP8_MOST: Final = 448.0  # the largest number of e4m3
_FP8_LEAST_SCALE: Final = 2.0**-100  # scale of a row of zeros
_MULTIPLE: Final = 16  # K and N must be multiples of it for the matrix units
_ROUNDED_AT_ONCE: Final = 2**24  # weights converted at a time: a float32 copy of all would double the peak


@final
class Fp8Linear(Linear):
    """`scale_N` times `rounded_NK` are the weights. Computes in bfloat16."""

    rounding: Rounding = "fp8"

    def __init__(self, rounded_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> None:
        self._rounded_KN = rounded_NK.t()  # column-major, as the product requires for its right operand
        self._scale_1N = scale_N[None].contiguous()
        self._bias_N = bias_N

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        return round_rows(x_TK)

    def product(self, *inputs: Tensor) -> Tensor:
        rounded_TK, scale_T1 = inputs
        out_TN: Tensor = torch._scaled_mm(
            rounded_TK,
            self._rounded_KN,
            scale_a=scale_T1,
            scale_b=self._scale_1N,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # docs/decisions/0011-fast-fp8-sums.md
        )
        return out_TN if self._bias_N is None else out_TN.add_(self._bias_N)


def fits_fp8(weight_NK: Tensor) -> bool:
    """Whether the matrix units support the shape."""
    return weight_NK.shape[0] % _MULTIPLE == weight_NK.shape[1] % _MULTIPLE == 0


def round_to_fp8(weight_NK: Tensor, bias_N: Tensor | None) -> Fp8Linear:
    num_outputs, num_inputs = weight_NK.shape
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scale_N = torch.empty(num_outputs, device=weight_NK.device)
    num_at_once = max(1, _ROUNDED_AT_ONCE // num_inputs)
    parts = (tensor.split(num_at_once) for tensor in (weight_NK, rounded_NK, scale_N))
    for weight_PK, rounded_PK, scale_P in zip(*parts, strict=True):
        rounded, scale = _round_rows(weight_PK)
        rounded_PK.copy_(rounded)
        scale_P.copy_(scale[:, 0])
    return Fp8Linear(rounded_NK, scale_N, bias_N)


def round_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and each row's float32 scale, [T, 1]."""
    if x_TK.is_cuda and find_spec("triton") is not None:
        from pdserve.engine.gpu.kernels.fp8 import quantise

        return quantise(x_TK)
    return _round_rows(x_TK)


def _round_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    x = x_TK.float()
    scale_T1 = (x.abs().amax(dim=-1, keepdim=True) / FP8_MOST).clamp_(min=_FP8_LEAST_SCALE)
    return (x / scale_T1).clamp_(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scale_T1

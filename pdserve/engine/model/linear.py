"""Matrix products, with weights stored once in the fastest form for the device.

plain    any device and dtype, as the checkpoint has it.
packed   float32 on a CPU: oneDNN's blocked layout, made at load. 2 to 4 times as fast as the plain layout at 4 to 32
         rows, the sizes of decode; the plain copy is freed. Weights that bfloat16 holds exactly are stored so, which
         takes half of the memory. With AMX cpu/kernels/amx_gemm.py multiplies them. Elsewhere packed_gemm.py widens
         them, which gives the same bits as float32 weights.
fp8      CUDA from compute capability 8.9 on: see fp8.py.
bfloat16 a CPU: weights and activations rounded to bfloat16, sums in float32, results in bfloat16. Between the products
         activations stay in float32. With AMX by amx_gemm.py, like int8; elsewhere by oneDNN and packed_gemm.py.
int4     a CPU with AVX-512 VNNI, or with AVX2 and no AVX-512: see cpu/int4.py.
int8     the same CPUs, and slowly on others: weights rounded per output channel, activations per token, sums in int32.

        w[n, k] ~ q_w[n, k] * s_w[n]          s_w[n] = max_k |w[n, k]| / 127, or / 63 without VNNI
        x[t, k] ~ q_x[t, k] * s_x[t]          s_x[t] = max_k |x[t, k]| / 127
        y[t, n] ~ s_x[t] * s_w[n] * sum_k q_x[t, k] q_w[n, k]

A token's scale depends only on the token, so other rows change its result by at most float32 rounding.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.int4 import make_int4_linear
from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.kernels.rounding import BFLOAT16_TRIAL, LEAST_SCALE, LEVELS, WEIGHTS_AT_ONCE, ZERO_POINT
from pdserve.engine.cpu.ops import add_bias, quantise, to_bfloat16
from pdserve.engine.model.config_schema import Activation
from pdserve.engine.model.fp8 import make_fp8_linear

if TYPE_CHECKING:
    from pdserve.engine.cpu.kernels.packed_gemm import Panels

Product = Callable[[Tensor, Tensor], Tensor]  # of rounded inputs and their scales
Rounding = Literal["none", "bfloat16", "int8", "int4", "fp8"]  # of a product's weights and inputs

_LEAST_ROWS: Final = 4  # with packed weights, oneDNN is faster for four rows than for one, two or three
_HINT_ROWS: Final = 32  # oneDNN chooses the same layout for 4 to 32 rows
# With more rows, oneDNN is as fast as kernels.packed_gemm. Weights that only the kernel can read are multiplied by it
# for any number of rows.
_MOST_PANEL_ROWS: Final = 32
_FIXED_ROWS: Final = 64  # number of rows of a product that would otherwise depend on it
_TRIED_ROWS: Final = (1, 2, 3, 5, 8, 17, 33)
_LEAST_INPUTS: Final = 128  # of a partial sum of which the kernel finds the size
_TRIED_SIZE: Final = 1024  # inputs and outputs of the matrix of a trial


class Linear(Protocol):
    """y = x w^T + b over the last axis: [T, K] -> [T, N]."""

    def __call__(self, x_TK: Tensor) -> Tensor: ...


class RoundingLinear(Linear, Protocol):
    """A product that rounds its inputs. `product` takes what an operation before it has already rounded."""

    rounding: Rounding

    def product(self, *rounded: Tensor) -> Tensor: ...


def make_linear(weight_NK: Tensor, bias_N: Tensor | None = None, rounding: Rounding = "none") -> Linear:
    """The fastest form for the weight's device. The caller must release `weight_NK`."""
    if rounding == "fp8":
        return make_fp8_linear(weight_NK, bias_N) or PlainLinear(weight_NK.clone(), bias_N)
    if rounding == "bfloat16":
        return Bf16Linear(weight_NK.bfloat16(), bias_N)
    if rounding == "int4":
        return make_int4_linear(weight_NK, bias_N)
    if not is_repacked(weight_NK.device, weight_NK.dtype, rounding):
        return PlainLinear(weight_NK, bias_N)
    return Int8Linear(*round_weights(weight_NK), bias_N) if rounding == "int8" else PackedLinear(weight_NK, bias_N)


def is_repacked(device: torch.device, dtype: torch.dtype, rounding: Rounding) -> bool:
    """Whether `make_linear` keeps another form of the weight, so that the weight's memory can be freed immediately."""
    if rounding in ("fp8", "int4"):
        return True
    if rounding == "bfloat16":
        return multiplies_bfloat16()
    is_packed = dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return device.type == "cpu" and (rounding == "int8" or is_packed)


def rounding_for(rounding: Rounding, *, is_head: bool) -> Rounding:
    """fp8 does not round the output head, because its error would go directly into the logits."""
    return "none" if rounding == "fp8" and is_head else rounding


def weight_dtype(dtype: torch.dtype, rounding: Rounding) -> torch.dtype:
    """Of the matrix that `make_linear` takes, if the compute dtype is `dtype`."""
    return torch.bfloat16 if rounding == "bfloat16" else dtype


@final
class PlainLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        return F.linear(x_TK, self.weight_NK, self.bias_N)

    def into(self, x_TK: Tensor, out_TN: Tensor) -> Tensor:
        """The same product, in `out_TN`, which is of the weight's dtype."""
        if self.bias_N is not None:
            return torch.addmm(self.bias_N, x_TK, self.weight_NK.t(), out=out_TN)
        return torch.mm(x_TK, self.weight_NK.t(), out=out_TN)


class FewRows(Protocol):
    """Products of at most `most_rows` rows with plain weights, and what is in front of and behind them; for devices
    where the library's product is not the fastest (gpu/few_rows.py)."""

    @property
    def most_rows(self) -> int: ...

    def product(self, linear: PlainLinear, x_TK: Tensor, out_TN: Tensor | None = None) -> Tensor: ...

    def normed(
        self, linear: PlainLinear, x_TK: Tensor, delta_TK: Tensor | None, norm_K: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + delta, which may be in x's memory, and the product of its norm."""
        ...

    def gated(
        self,
        linear: PlainLinear,
        x_TK: Tensor,
        delta_TK: Tensor | None,
        norm_K: Tensor,
        eps: float,
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        """The same, and activation(gate) * up of the product: gate, then up."""
        ...


@final
class PackedLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._bias_N = bias_N
        is_bfloat16 = fits_bfloat16(weight_NK)
        self._panels, self._most_rows = _float32_tiles(weight_NK) if is_bfloat16 else None, sys.maxsize
        self.reads_bfloat16 = self._panels is not None
        if self.reads_bfloat16:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _HINT_ROWS)
        self._panels, self._most_rows = _panels(self._packed, weight_NK), _MOST_PANEL_ROWS
        self.reads_bfloat16 = self._panels is not None and is_bfloat16
        if self._panels is not None and self.reads_bfloat16:
            chunk, self._panels = self._panels.chunk, None
            del self._packed  # the memory of both
            self._panels, self._most_rows = _bfloat16_panels(weight_NK, chunk), sys.maxsize

    def __call__(self, x_TK: Tensor) -> Tensor:
        return add_bias(self._product(x_TK), self._bias_N)

    def _product(self, x_TK: Tensor) -> Tensor:
        num_tokens = x_TK.shape[0]
        if self._panels is not None and num_tokens <= self._most_rows:
            return self._panels(x_TK)
        if num_tokens >= _LEAST_ROWS:
            return _packed_product(x_TK, self._packed)
        padded = F.pad(x_TK, (0, 0, 0, _LEAST_ROWS - num_tokens))
        return _packed_product(padded, self._packed)[:num_tokens]


def has_panels(num_outputs: int, num_inputs: int) -> bool:
    """Whether `kernels.packed_gemm` serves a matrix of that shape, where it serves any. Small ones may be stored in
    another way."""
    is_large = num_inputs >= _LEAST_INPUTS and num_outputs * num_inputs >= _TRIED_SIZE**2
    return is_large and num_outputs % 64 == num_inputs % 16 == 0


@cache
def reads_bfloat16() -> bool:
    """Whether products in float32 read weights in bfloat16 here, if it holds them exactly.

    Tested on one matrix, with one thread, as when weights are loaded.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return PackedLinear(torch.ones(_TRIED_SIZE, _TRIED_SIZE), None).reads_bfloat16
    finally:
        torch.set_num_threads(before)


def fits_bfloat16(weight_NK: Tensor) -> bool:
    """Whether bfloat16 holds all float32 weights exactly, which is the case for those of a bfloat16 checkpoint."""
    num_at_once = max(1, WEIGHTS_AT_ONCE // weight_NK.shape[1])
    lower_half = 0xFFFF
    return not any((part.view(torch.int32) & lower_half).any() for part in weight_NK.contiguous().split(num_at_once))


def _bfloat16_panels(weight_NK: Tensor, chunk: int) -> Panels:
    from pdserve.engine.cpu.kernels.packed_gemm import pack_bfloat16

    return pack_bfloat16(weight_NK, chunk)


def _panels(packed: Tensor, weight_NK: Tensor) -> Panels | None:
    if not jit.is_available():
        return None
    from pdserve.engine.cpu.kernels.packed_gemm import make_panels

    return make_panels(packed, weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype)


def _int8_panels(packed: Tensor, rounded_NK: Tensor, scale_N: Tensor, product: Product) -> Product | None:
    if not jit.is_available():
        return None
    from pdserve.engine.cpu.kernels.packed_gemm import make_int8_panels

    return make_int8_panels(packed, rounded_NK, scale_N, ZERO_POINT, product)


def _own_int8_panels(rounded_NK: Tensor, scale_N: Tensor) -> Product | None:
    """A product for any number of rows: with AMX, or with AVX2 and no AVX-512."""
    if not jit.is_available():
        return None
    from pdserve.engine.cpu.kernels import amx_gemm, packed_gemm

    if amx_gemm.fits("int8", *rounded_NK.shape):
        return amx_gemm.pack_int8(rounded_NK, scale_N, ZERO_POINT)
    return packed_gemm.pack_int8_panels(rounded_NK, scale_N, ZERO_POINT)


def _float32_tiles(weight_NK: Tensor) -> Callable[[Tensor], Tensor] | None:
    """A product in float32 for any number of rows, with AMX, for weights that bfloat16 holds exactly."""
    if not jit.is_available():
        return None
    from pdserve.engine.cpu.kernels import amx_gemm

    return amx_gemm.pack_float32(weight_NK) if amx_gemm.fits("float32", *weight_NK.shape) else None


def _tiles(weight_NK: Tensor) -> Callable[[Tensor], Tensor] | None:
    """A product in bfloat16 for any number of rows, with AMX."""
    if not jit.is_available():
        return None
    from pdserve.engine.cpu.kernels import amx_gemm

    return amx_gemm.pack_bfloat16(weight_NK) if amx_gemm.fits("bfloat16", *weight_NK.shape) else None


def _packed_product(x_TK: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, packed, None, "none", [], "")
    return out


@final
class Bf16Linear:
    """[T, K] in float32 or bfloat16 -> [T, N] in bfloat16."""

    rounding: Rounding = "bfloat16"

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._bias_N = None if bias_N is None else bias_N.float()
        self._is_packed = multiplies_bfloat16()
        self._panels = _tiles(weight_NK)
        self._most_rows = sys.maxsize if self._panels is not None else _MOST_PANEL_ROWS
        if self._panels is not None:
            return
        if self._is_packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _HINT_ROWS)
            self._panels = _panels(packed, weight_NK)
            weight_NK = packed
        self._weight = weight_NK

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self.product(to_bfloat16(x_TK))

    def product(self, x_TK: Tensor) -> Tensor:
        return add_bias(self._product(x_TK), self._bias_N)

    def _product(self, x_TK: Tensor) -> Tensor:
        if self._panels is not None and x_TK.shape[0] <= self._most_rows:
            return self._panels(x_TK)
        return _packed_product(x_TK, self._weight) if self._is_packed else F.linear(x_TK, self._weight)


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 here; with AVX-512 but without its bfloat16 instructions, slowly."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    one = torch.ones(_LEAST_ROWS, _HINT_ROWS, dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(one, _HINT_ROWS)
        return bool((_packed_product(one, packed) == _HINT_ROWS).all())
    except RuntimeError:  # ONEDNN_MAX_CPU_ISA permits fewer instructions than the CPU has
        return False


@final
class Int8Linear:
    """`scale_N` times `rounded_NK` are the weights; integers beyond `weight_levels()` could overflow."""

    rounding: Rounding = "int8"

    def __init__(self, rounded_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> None:
        self._bias_N = None if bias_N is None else bias_N.float()
        self._most_rows = sys.maxsize
        self._panels = _own_int8_panels(rounded_NK, scale_N)
        if self._panels is None:
            self._packed = torch.ops.onednn.qlinear_prepack(rounded_NK, None)
            self._scale_N = scale_N
            self._zero_N = torch.zeros(scale_N.shape, dtype=torch.int64)
            self._most_rows = _MOST_PANEL_ROWS
            self._panels = _int8_panels(self._packed, rounded_NK, scale_N, self._whole)

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self.product(*quantise(x_TK))

    def product(self, quantised_TK: Tensor, scale_T1: Tensor) -> Tensor:
        """Of the results of `ops.quantise`."""
        product = self._whole if quantised_TK.shape[0] > self._most_rows else self._panels or self._whole
        out_TN = product(quantised_TK, scale_T1)
        return add_bias(out_TN, self._bias_N)

    def _whole(self, quantised_TK: Tensor, scale_T1: Tensor) -> Tensor:
        """oneDNN's product, for any number of rows, without the bias."""
        return _int8_product(quantised_TK, ZERO_POINT, self._packed, self._scale_N, self._zero_N).mul_(scale_T1)


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
        for num_rows in _TRIED_ROWS
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


def make_invariant(linear: Linear, num_inputs: int) -> Linear:
    """`linear` if a row's bits do not depend on the number of rows; otherwise a product that always multiplies 64 rows.

    On the CPUs that we have seen, oneDNN's packed and int8 products add in the same order for any number of rows. This
    is not guaranteed, so it is tested on numbers whose sums round at every step, once for each shape and number of
    threads.
    """
    one_TN = linear(torch.zeros(1, num_inputs))
    is_widened = getattr(linear, "reads_bfloat16", False)
    key = type(linear), is_widened, num_inputs, one_TN.shape[1], torch.get_num_threads()
    if key not in _is_invariant:
        num_rows = _FIXED_ROWS
        if one_TN.dtype == torch.bfloat16:
            num_rows = max(num_rows, -(-BFLOAT16_TRIAL // one_TN.shape[1]))
        x_TK = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(0))
        whole_TN = linear(x_TK)
        _is_invariant[key] = all(
            torch.equal(torch.cat([linear(part) for part in x_TK.split(rows)]), whole_TN) for rows in _TRIED_ROWS
        )
    return linear if _is_invariant[key] else FixedRowsLinear(linear)


# by type, whether weights are widened, inputs, outputs and threads
_is_invariant: Final[dict[tuple[type[Linear], bool, int, int, int], bool]] = {}


@final
class FixedRowsLinear:
    """Products of always 64 rows, with padding: every row is computed by the same kernel."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x_TK: Tensor) -> Tensor:
        num_tokens = x_TK.shape[0]
        padded = F.pad(x_TK, (0, 0, 0, -num_tokens % _FIXED_ROWS))
        return torch.cat([self._linear(part) for part in padded.split(_FIXED_ROWS)])[:num_tokens]

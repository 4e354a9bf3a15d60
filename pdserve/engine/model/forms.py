"""In which form weights are stored: the fastest for the device, chosen by the table FORMS.

plain    any device and dtype, as the checkpoint has it (linear.py).
packed   a CPU, in float32 or bfloat16: oneDNN's blocked layout, made at load. 2 to 4 times as fast as the plain layout
         at 4 to 32 rows, the sizes of decode; the plain copy is freed.
widened  a CPU, in float32, for weights that bfloat16 holds exactly. Stored so, they take half of the memory.
         packed_gemm.py widens them, which gives the same bits as float32 weights.
tiles    a CPU with AMX, in float32 (for weights that bfloat16 holds exactly), bfloat16 and int8: amx_gemm.py.
panels   int8 on a CPU with AVX2 and no AVX-512: packed_gemm.py.
others   rounded.py

In bfloat16 on a CPU, weights and activations are rounded to bfloat16, sums are float32, and results bfloat16. Between
the products activations stay in float32.

A new form is a subclass of Linear and an entry of FORMS. If it rounds its inputs in a new way, `ROUNDED` of cpu/ops.py
or gpu/kernels/ops.py may have operations in front of it that round their results.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.kernels.rounding import WEIGHTS_AT_ONCE, ZERO_POINT
from pdserve.engine.cpu.ops import add_bias, quantise, to_bfloat16
from pdserve.engine.model.linear import Linear, PlainLinear, Rounding
from pdserve.engine.model.rounded import (
    MOST_PANEL_ROWS,
    Int4Linear,
    fits_fp8,
    float_bias,
    pack_int8,
    round_groups,
    round_to_fp8,
    round_weights,
)

_LEAST_ROWS: Final = 4  # with packed weights, oneDNN is faster for four rows than for one, two or three
_HINT_ROWS: Final = 32  # oneDNN chooses the same layout for 4 to 32 rows
_LEAST_INPUTS: Final = 128  # of a partial sum of which the kernel finds the size
_TRIED_SIZE: Final = 1024  # inputs and outputs of the matrix of a trial

# --- forms of float32 and bfloat16 ----------------------------------------------------------------------------


@final
class PackedLinear(Linear):
    """oneDNN's layout of float32 or bfloat16, for any number of rows; few rows by `few_rows`, which reads them from the
    same memory."""

    def __init__(self, packed: Tensor, bias_N: Tensor | None, few_rows: Callable[[Tensor], Tensor] | None) -> None:
        self.packed, self.few_rows = packed, few_rows
        self._bias_N = float_bias(bias_N)
        self.rounding = "bfloat16" if packed.dtype == torch.bfloat16 else "none"
        self._least_rows = 1 if packed.dtype == torch.bfloat16 else _LEAST_ROWS

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        return (x_TK,) if self.rounding == "none" else (to_bfloat16(x_TK),)

    def product(self, *inputs: Tensor) -> Tensor:
        (x_TK,) = inputs
        num_tokens = x_TK.shape[0]
        if self.few_rows is not None and num_tokens <= MOST_PANEL_ROWS:
            out_TN = self.few_rows(x_TK)
        elif num_tokens >= self._least_rows:
            out_TN = packed_product(x_TK, self.packed)
        else:
            padded = F.pad(x_TK, (0, 0, 0, self._least_rows - num_tokens))
            out_TN = packed_product(padded, self.packed)[:num_tokens]
        return add_bias(out_TN, self._bias_N)


def packed_product(x_TK: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, packed, None, "none", [], "")
    return out


def _pack(weight_NK: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _HINT_ROWS)
    return packed


def _packed(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    packed = _pack(weight_NK)
    if not jit.is_available():
        return PackedLinear(packed, bias_N, None)
    from pdserve.engine.cpu.kernels.packed_gemm import make_panels

    return PackedLinear(packed, bias_N, make_panels(packed, weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype))


@final
class KernelLinear(Linear):
    """Weights in the layout of `kernel`, our own, for any number of rows. It takes inputs as `rounding` rounds them."""

    def __init__(self, kernel: Callable[..., Tensor], bias_N: Tensor | None, rounding: Rounding) -> None:
        self.kernel = kernel
        self._bias_N = float_bias(bias_N)
        self.rounding = rounding
        self._round = _ROUND_INPUTS[rounding]

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        return self._round(x_TK)

    def product(self, *inputs: Tensor) -> Tensor:
        return add_bias(self.kernel(*inputs), self._bias_N)


_ROUND_INPUTS: Final[Mapping[Rounding, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "none": lambda x_TK: (x_TK,),
    "bfloat16": lambda x_TK: (to_bfloat16(x_TK),),
    "int8": quantise,
}


@final
class PlainBf16Linear(Linear):
    """bfloat16 where oneDNN does not multiply it: plain weights, a bias that is added in float32."""

    rounding: Rounding = "bfloat16"

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._weight_NK, self._bias_N = weight_NK, float_bias(bias_N)

    def round(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        return (to_bfloat16(x_TK),)

    def product(self, *inputs: Tensor) -> Tensor:
        (x_TK,) = inputs
        return add_bias(F.linear(x_TK, self._weight_NK), self._bias_N)


# --- what fits ------------------------------------------------------------------------------------------------


def fits_bfloat16(weight_NK: Tensor) -> bool:
    """Whether bfloat16 holds all float32 weights exactly, which is the case for those of a bfloat16 checkpoint."""
    num_at_once = max(1, WEIGHTS_AT_ONCE // weight_NK.shape[1])
    lower_half = 0xFFFF
    return not any((part.view(torch.int32) & lower_half).any() for part in weight_NK.contiguous().split(num_at_once))


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
        weight_NK = torch.ones(_TRIED_SIZE, _TRIED_SIZE)
        return form_of("none", weight_NK).name in ("float32 tiles", "widened")
    finally:
        torch.set_num_threads(before)


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 here; with AVX-512 but without its bfloat16 instructions, slowly."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    one = torch.ones(_LEAST_ROWS, _HINT_ROWS, dtype=torch.bfloat16)
    try:
        return bool((packed_product(one, _pack(one)) == _HINT_ROWS).all())
    except RuntimeError:  # ONEDNN_MAX_CPU_ISA permits fewer instructions than the CPU has
        return False


def _has_tiles(kind: Any, weight_NK: Tensor) -> bool:
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels import amx_gemm

    return amx_gemm.fits(kind, *weight_NK.shape)


def _chunk(weight_NK: Tensor) -> int | None:
    """Of the partial sums in which oneDNN and packed_gemm.py add the product in float32; None: in different ones."""
    if not jit.is_available():
        return None
    from pdserve.engine.cpu.kernels.packed_gemm import find_chunk

    return find_chunk(lambda: _pack(weight_NK), weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype)


def _fits_int8_panels(rounded_NK: Tensor, _scale_N: Tensor) -> bool:
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels.packed_gemm import fits_int8_panels

    return fits_int8_panels(rounded_NK)


# --- conversion -----------------------------------------------------------------------------------------------


def _float32_tiles(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    from pdserve.engine.cpu.kernels import amx_gemm

    return KernelLinear(amx_gemm.pack_float32(weight_NK), bias_N, "none")


def _widened(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    from pdserve.engine.cpu.kernels.packed_gemm import pack_bfloat16

    chunk = _chunk(weight_NK)
    assert chunk is not None
    return KernelLinear(pack_bfloat16(weight_NK, chunk), bias_N, "none")


def _bfloat16_tiles(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    from pdserve.engine.cpu.kernels import amx_gemm

    return KernelLinear(amx_gemm.pack_bfloat16(weight_NK), bias_N, "bfloat16")


def _int8_tiles(rounded_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Linear:
    from pdserve.engine.cpu.kernels import amx_gemm

    return KernelLinear(amx_gemm.pack_int8(rounded_NK, scale_N, ZERO_POINT), bias_N, "int8")


def _int8_panels(rounded_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Linear:
    from pdserve.engine.cpu.kernels.packed_gemm import pack_int8_panels

    return KernelLinear(pack_int8_panels(rounded_NK, scale_N, ZERO_POINT), bias_N, "int8")


def _copied(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    return PlainLinear(weight_NK.clone(), bias_N)


# --- table ----------------------------------------------------------------------------------------------------

Serves = Callable[[torch.device, torch.dtype], bool]


def _anywhere(_device: torch.device, _dtype: torch.dtype) -> bool:
    return True


def _on_cpu(device: torch.device, _dtype: torch.dtype) -> bool:
    return device.type == "cpu"


def _float32_on_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _by_onednn(_device: torch.device, _dtype: torch.dtype) -> bool:
    return multiplies_bfloat16()


@dataclass(frozen=True, slots=True)
class Form:
    """`make(*weights, bias_N)` stores weights of a rounding (None: of any) that `fits(*weights)`, if any condition is
    given, on devices and in dtypes that it `serves`."""

    name: str
    rounding: Rounding | None
    make: Callable[..., Linear]
    serves: Serves = _anywhere
    fits: Callable[..., bool] | None = None
    keeps_memory: bool = False  # of the given weights; others can be freed


#: Tried in order. The last one stores what is not rounded; int8 and int4 need a CPU, as `choose_precision` checks.
FORMS: Final = (
    Form("fp8", "fp8", round_to_fp8, fits=fits_fp8),
    Form("copied", "fp8", _copied),
    Form("int4", "int4", Int4Linear),
    Form("int8 tiles", "int8", _int8_tiles, _on_cpu, lambda rounded_NK, _: _has_tiles("int8", rounded_NK)),
    Form("int8 panels", "int8", _int8_panels, _on_cpu, _fits_int8_panels),
    Form("int8 packed", "int8", pack_int8, _on_cpu),
    Form("bfloat16 tiles", "bfloat16", _bfloat16_tiles, fits=lambda weight_NK: _has_tiles("bfloat16", weight_NK)),
    Form("bfloat16 packed", "bfloat16", _packed, _by_onednn),
    Form("bfloat16 plain", "bfloat16", PlainBf16Linear, keeps_memory=True),
    Form(
        "float32 tiles",
        "none",
        _float32_tiles,
        _float32_on_cpu,
        lambda weight_NK: _has_tiles("float32", weight_NK) and fits_bfloat16(weight_NK),
    ),
    Form(
        "widened",
        "none",
        _widened,
        _float32_on_cpu,
        lambda weight_NK: fits_bfloat16(weight_NK) and _chunk(weight_NK) is not None,
    ),
    Form("float32 packed", "none", _packed, _float32_on_cpu),
    Form("plain", None, PlainLinear, keeps_memory=True),
)
_ROUND_WEIGHTS: Final[Mapping[Rounding, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "none": lambda weight_NK: (weight_NK,),
    "bfloat16": lambda weight_NK: (weight_NK.bfloat16(),),
    "int8": round_weights,
    "int4": round_groups,
    "fp8": lambda weight_NK: (weight_NK,),  # rounded when stored, if the shape fits
}


def make_linear(weight_NK: Tensor, bias_N: Tensor | None = None, rounding: Rounding = "none") -> Linear:
    """The fastest form for the weight's device. The caller must release `weight_NK`."""
    return store(rounding, _ROUND_WEIGHTS[rounding](weight_NK), bias_N)


def store(rounding: Rounding, weights: tuple[Tensor, ...], bias_N: Tensor | None) -> Linear:
    """The same for weights that are rounded: one tensor; for int8 integers and scales [N]; for int4 integers, scales
    and zeros [N, G]."""
    form = form_of(rounding, *weights)
    linear = form.make(*weights, bias_N)
    linear.form = form.name
    return linear


def form_of(rounding: Rounding, *weights: Tensor) -> Form:
    device, dtype = weights[0].device, weights[0].dtype
    return next(one for one in _serving(rounding, device, dtype) if one.fits is None or one.fits(*weights))


def is_repacked(device: torch.device, dtype: torch.dtype, rounding: Rounding) -> bool:
    """Whether `make_linear` keeps another form of the weight, so that the weight's memory can be freed immediately."""
    return not any(form.keeps_memory for form in _serving(rounding, device, dtype))


def _serving(rounding: Rounding, device: torch.device, dtype: torch.dtype) -> Iterator[Form]:
    """Up to the first form that has no condition."""
    for form in FORMS:
        if form.rounding in (rounding, None) and form.serves(device, dtype):
            yield form
            if form.fits is None:
                return


def rounding_for(rounding: Rounding, *, is_head: bool) -> Rounding:
    """fp8 does not round the output head, because its error would go directly into the logits."""
    return "none" if rounding == "fp8" and is_head else rounding


def weight_dtype(dtype: torch.dtype, rounding: Rounding) -> torch.dtype:
    """Of the matrix that `make_linear` takes, if the compute dtype is `dtype`."""
    return torch.bfloat16 if rounding == "bfloat16" else dtype

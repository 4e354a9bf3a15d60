"""The product of rows with packed weights, which reads them at memory bandwidth for few rows.

oneDNN stores a matrix in panels of 64 outputs, [N / 64, K / V, 64, V], with V = 1 in float32, 2 in bfloat16 and 4 in
int8: the V inputs that one instruction multiplies and adds. It multiplies few rows with them at two thirds of the rate
at which the weights can be read, because it waits for memory and then computes; and a call through torch costs 20 us.
Here a block of weights is multiplied with all rows while the next block is prefetched. With AVX2, oneDNN does not store
int8 weights in panels; they are then packed here, and all products are the kernel's.

An output is added in oneDNN's order: by fused instructions over k, with partial sums of `chunk` inputs. The bits are
therefore equal, and a row may use either product. `find_chunk` tests this before the kernel is used for a
weight; sums of integers are exact in any order.
"""

# Shapes: M rows, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, final

import numpy as np
import torch
from numba import carray
from torch import Tensor

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.kernels.arithmetic import narrow, widen
from pdserve.engine.cpu.kernels.instructions import LANES
from pdserve.engine.cpu.kernels.panel_product import BFLOAT16 as _BFLOAT16
from pdserve.engine.cpu.kernels.panel_product import FLOAT32 as _FLOAT32
from pdserve.engine.cpu.kernels.panel_product import INT8 as _INT8
from pdserve.engine.cpu.kernels.panel_product import MOST_ROWS, PANEL, multiply
from pdserve.engine.cpu.kernels.panel_product import WIDENED as _WIDENED
from pdserve.engine.cpu.kernels.rounding import BFLOAT16_TRIAL
from pdserve.engine.cpu.kernels.task import BFLOAT16, FLOAT32, INT32, TaskKernel, empty, pointer, take

_KINDS: Final = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.int8: _INT8}  # of the weights
_NAMES: Final = ("float32", "bfloat16", "int8", "widened")  # by kind
_FEATURES: Final = ("+avx512f", "+avx512bf16", "+avx512vnni")  # by kind
_AVX2_FEATURES: Final = {"+avx2", "+fma"}
_AVX2_LEVELS: Final = 63
_BLOCK = 64  # steps of 4 bytes of the inputs: their weights are 16 KiB, half of the L1 cache
_LINE = 64
_PART_ROWS = 96  # rows whose inputs stay in the cache while all panels are multiplied with them
_WIDENED_AT_ONCE = 3  # rows up to which weights are widened as they are multiplied
_INPUT_BYTES = PANEL * 4  # of a panel's weights for one step
_CHUNKS: Final = (4096, 2048, 1024, 512, 256, 128)
_TRIED_ROWS: Final = (5, 33)


@cache
def _kernel(kind: int) -> TaskKernel:
    """multiply_panels(panels * parts of the rows, work, w, x, out, M, K / V, chunk / V, x_scale, w_scale, correction,
    N / 64): addresses, numbers of elements, and for int8 the addresses of the scales and of what is subtracted from
    each output's sum.

    With more than three rows, a block of bfloat16 weights is widened once and then multiplied with all rows.
    """
    IS_INT8, IS_BFLOAT16, IS_WIDENED, KIND = kind == _INT8, kind == _BFLOAT16, kind == _WIDENED, kind
    ROW_BYTES = _INPUT_BYTES // 2 if kind == _WIDENED else _INPUT_BYTES  # of a panel's weights for one step
    SUM, OUT = np.int32 if kind == _INT8 else np.float32, BFLOAT16 if kind == _BFLOAT16 else FLOAT32

    def multiply_panels(task: Any) -> None:
        w, num_rows, K, chunk, num_panels = task[3], task[6], task[7], task[8], task[12]
        N = num_panels * PANEL
        out = carray(pointer(task[5], OUT), (num_rows, N))
        x_scale, w_scale = carray(pointer(task[9], FLOAT32), (num_rows,)), carray(pointer(task[10], FLOAT32), (N,))
        correction = carray(pointer(task[11], INT32), (N,))
        most = min(num_rows, _PART_ROWS)
        sums, totals = np.empty((most, PANEL), SUM), np.empty((most, PANEL), np.float32)
        sums_at = np.int64(sums.ctypes.data)  # numba frees an array after its last use by name, here in the loop
        wide = np.empty((_BLOCK * PANEL,), np.float32)
        wide_at = np.int64(wide.ctypes.data)
        while True:
            item = take(task, 0)
            if item >= task[2]:
                return
            panel, first_row = item % num_panels, item // num_panels * _PART_ROWS
            M, x = min(_PART_ROWS, num_rows - first_row), task[4] + 4 * first_row * K
            is_wide = IS_WIDENED and M > _WIDENED_AT_ONCE
            num_groups = (M + MOST_ROWS - 1) // MOST_ROWS
            # The first groups prefetch a block's lines, four for each step: two each with two groups, one each with
            # four.
            step = np.int64(_LINE if num_groups > 3 else 2 * _LINE)
            for first in range(0, K, chunk):
                end = min(first + chunk, K)
                for k in range(first, end, _BLOCK):
                    block, count = w + (panel * K + k) * ROW_BYTES, min(_BLOCK, end - k)
                    if is_wide:
                        source = carray(pointer(block, BFLOAT16), (_BLOCK * PANEL,))
                        for i in range(count * PANEL):
                            wide[i] = widen(source[i])
                    for group in range(num_groups):
                        row = group * M // num_groups
                        rows = (group + 1) * M // num_groups - row
                        ahead = block + (_BLOCK * ROW_BYTES + group * _BLOCK * step)
                        if num_groups == 1 or group * step >= ROW_BYTES:
                            ahead = block  # in the cache; few rows leave prefetching to the hardware
                        x_at, sum_at = x + (row * K + k) * 4, sums_at + row * _INPUT_BYTES
                        is_first = np.int64(k == first)
                        if is_wide:
                            multiply(_FLOAT32, rows, wide_at, x_at, K, sum_at, count, is_first, ahead, step)
                        else:
                            multiply(KIND, rows, block, x_at, K, sum_at, count, is_first, ahead, step)
                if not IS_INT8:
                    for row in range(M):
                        for n in range(PANEL):
                            totals[row, n] = sums[row, n] if first == 0 else totals[row, n] + sums[row, n]
            first_n = panel * PANEL
            if IS_INT8:  # scaled in two loops over the rows: in one, fast math would multiply the scales first
                for row in range(M):
                    for n in range(PANEL):
                        whole = np.float32(sums[row, n] - correction[first_n + n])
                        totals[row, n] = whole * w_scale[first_n + n]
            for row in range(M):
                target = out[first_row + row, first_n : first_n + PANEL]
                if IS_INT8:
                    for n in range(PANEL):
                        target[n] = totals[row, n] * x_scale[first_row + row]
                elif IS_BFLOAT16:
                    for n in range(PANEL):
                        target[n] = narrow(totals[row, n])
                else:
                    for n in range(PANEL):
                        target[n] = totals[row, n]

    return TaskKernel(multiply_panels, f"multiply-{_NAMES[kind]}", least=0)


@final
class Panels:
    """Packed weights in the layout above; `packed` owns the memory."""

    def __init__(
        self,
        packed: Tensor,
        num_outputs: int,
        num_inputs: int,
        dtype: torch.dtype,
        chunk: int,
        w_scale_N: Tensor | None = None,
        correction_N: Tensor | None = None,
    ) -> None:
        """`dtype` of the products: float32 weights may be stored in bfloat16. int8 needs the scales of the weights, and
        the int32 that is subtracted from each output's sum."""
        step = _STEP_INPUTS[dtype]
        self._out_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self._kept = packed, w_scale_N, correction_N
        self._weights = torch.ops.mkldnn.data_ptr(packed) if packed.is_mkldnn else packed.data_ptr()
        self._num_outputs, self._num_panels = num_outputs, num_outputs // PANEL
        self._sizes = num_inputs // step, max(chunk // step, 1)
        self._scales = tuple(0 if one is None else one.data_ptr() for one in (w_scale_N, correction_N))
        is_widened = dtype == torch.float32 and packed.dtype == torch.bfloat16
        self._kernel = _kernel(_WIDENED if is_widened else _KINDS[dtype])

    def __call__(self, x_MK: Tensor, x_scale_M1: Tensor | None = None) -> Tensor:
        """[M, N], for any number of rows; faster than oneDNN for few. x is float32 or bfloat16, as the weights, or
        uint8 with its scales."""
        x_MK = x_MK.contiguous()
        num_rows = x_MK.shape[0]
        out_MN = empty((num_rows, self._num_outputs), self._out_dtype)
        x_scale = 0 if x_scale_M1 is None else x_scale_M1.data_ptr()
        addresses = self._weights, x_MK.data_ptr(), out_MN.data_ptr()
        items = self._num_panels * -(-num_rows // _PART_ROWS)
        self._kernel(items, 1, *addresses, num_rows, *self._sizes, x_scale, *self._scales, self._num_panels)
        return out_MN


_STEP_INPUTS: Final = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # V


def is_supported(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this CPU and numba's target have the instructions for weights of that dtype."""
    features = set(jit.target()[1].split(","))
    if "+avx512f" in features:
        return torch.cpu._is_avx512_supported() and _FEATURES[_KINDS[dtype]] in features
    return dtype != torch.bfloat16 and torch.cpu._is_avx2_supported() and features >= _AVX2_FEATURES


def make_panels(packed: Tensor, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Panels | None:
    """For float32 and bfloat16. None if oneDNN packs or adds differently on this machine, or if the CPU lacks the
    kernel's instructions."""
    chunk = find_chunk(lambda: packed, num_outputs, num_inputs, dtype)
    return None if chunk is None else Panels(packed, num_outputs, num_inputs, dtype, chunk)


def find_chunk(pack: Callable[[], Tensor], num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int | None:
    """The number of inputs in oneDNN's partial sums: the one that gives the same bits, for few rows and for more. None
    as for `make_panels`. `pack` returns the weights that oneDNN packed; the first ones of each shape are tried."""
    if num_outputs % PANEL or num_inputs % _STEP_INPUTS[dtype] or not is_supported(dtype):
        return None
    shape = num_outputs, num_inputs, dtype
    key = *shape, torch.get_num_threads()
    if key not in _chunk_of:
        packed, num_bytes = pack(), dtype.itemsize * num_outputs * num_inputs
        is_panels = torch.ops.mkldnn._nbytes(packed) == num_bytes
        tried = (*_TRIED_ROWS, -(-BFLOAT16_TRIAL // num_outputs)) if dtype == torch.bfloat16 else _TRIED_ROWS
        chunks = [one for one in _CHUNKS if one < 2 * num_inputs] if is_panels else []
        equal = (one for one in chunks if all(_agree(packed, *shape, one, num_rows) for num_rows in tried))
        _chunk_of[key] = next(equal, None)
    return _chunk_of[key]


# oneDNN chooses the layout and the order by the shape and the number of threads.
_chunk_of: Final[dict[tuple[int, int, torch.dtype, int], int | None]] = {}


def _agree(packed: Tensor, num_outputs: int, num_inputs: int, dtype: torch.dtype, chunk: int, num_rows: int) -> bool:
    x_MK = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    expected: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, packed, None, "none", [], "")
    return torch.equal(Panels(packed, num_outputs, num_inputs, dtype, chunk)(x_MK), expected)


def pack_bfloat16(weight_NK: Tensor, chunk: int) -> Panels:
    """The product in float32 with weights stored in bfloat16, which must hold them exactly, for any number of rows.

    It has the same bits as that of `Panels` in float32 with the same `chunk`.
    """
    num_outputs, num_inputs = weight_NK.shape
    packed = torch.empty((num_outputs // PANEL, num_inputs, PANEL), dtype=torch.bfloat16)
    packed.copy_(weight_NK.view(-1, PANEL, num_inputs).transpose(1, 2))
    return Panels(packed, num_outputs, num_inputs, torch.float32, chunk)


def make_int8_panels(
    packed: Tensor, rounded_NK: Tensor, w_scale_N: Tensor, zero_point: int, product: Callable[[Tensor, Tensor], Tensor]
) -> Panels | None:
    """For int8 weights that oneDNN has packed. None if they are not in panels, or if the CPU lacks the instructions.

    `product(x_MK, scale_M1)` is oneDNN's, which the kernel must equal. Inputs are uint8 around `zero_point`.
    """
    num_outputs, num_inputs = rounded_NK.shape
    num_bytes = (num_inputs + torch.int32.itemsize) * num_outputs  # oneDNN's own correction follows the weights
    if not _fits_int8(rounded_NK) or torch.ops.mkldnn._nbytes(packed) != num_bytes:
        return None
    panels = _int8_panels(packed, rounded_NK, w_scale_N, zero_point)
    generator = torch.Generator().manual_seed(num_inputs)
    for num_rows in _TRIED_ROWS:
        x_MK = torch.randint(1, 256, (num_rows, num_inputs), generator=generator).to(torch.uint8)
        scale_M1 = torch.rand(num_rows, 1, generator=generator)
        if not torch.equal(panels(x_MK, scale_M1), product(x_MK, scale_M1)):
            return None
    return panels


def fits_int8_panels(rounded_NK: Tensor) -> bool:
    """Whether `pack_int8_panels` takes the weights: with AVX2, where oneDNN does not store panels.

    No weight may be beyond 63 in magnitude, because two products with uint8 are added in 16 bits.
    """
    is_served = LANES == 8 and _fits_int8(rounded_NK)
    return is_served and bool(rounded_NK.min() >= -_AVX2_LEVELS and rounded_NK.max() <= _AVX2_LEVELS)


def pack_int8_panels(rounded_NK: Tensor, w_scale_N: Tensor, zero_point: int) -> Panels:
    """The result serves any number of rows."""
    step = _STEP_INPUTS[torch.int8]
    packed = rounded_NK.view(-1, PANEL, rounded_NK.shape[1] // step, step).transpose(1, 2).contiguous()
    return _int8_panels(packed, rounded_NK, w_scale_N, zero_point)


def _fits_int8(rounded_NK: Tensor) -> bool:
    num_outputs, num_inputs = rounded_NK.shape
    return num_outputs % PANEL == num_inputs % _STEP_INPUTS[torch.int8] == 0 and is_supported(torch.int8)


def _int8_panels(packed: Tensor, rounded_NK: Tensor, w_scale_N: Tensor, zero_point: int) -> Panels:
    correction_N = (rounded_NK.sum(dim=1, dtype=torch.int32) * zero_point).to(torch.int32)
    num_outputs, num_inputs = rounded_NK.shape
    return Panels(packed, num_outputs, num_inputs, torch.int8, num_inputs, w_scale_N, correction_N)

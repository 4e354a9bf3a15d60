"""The product of rows with packed weights by AMX, for bfloat16, int8 and float32 and any number of rows.

amx_product.py says how weights are stored. Rows are first copied to tiles of 16 rows; missing rows are zeros. A tile
instruction takes as long for one row as for 16, but with few rows the time is that of reading the weights.

An output is the sum of its tiles' products in order, so a row has the same bits in any batch.
"""

# Shapes: M rows, K inputs, N outputs.

from __future__ import annotations

from functools import cache
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.kernels import amx
from pdserve.engine.kernels.amx import ROW_BYTES, ROWS, TILE_BYTES, aligned, configure, release
from pdserve.engine.kernels.amx_product import (
    COLUMNS,
    HALF_BYTES,
    HALF_COLUMNS,
    SUMS_BYTES,
    Kind,
    copy_row,
    multiply,
    num_parts,
    store_bfloat16,
    store_float32,
    store_scaled,
    weight_kind,
)
from pdserve.engine.kernels.panel_product import PANEL
from pdserve.engine.kernels.results import empty
from pdserve.engine.kernels.task import TaskKernel, take

_BLOCK: Final = 12  # tiles of inputs whose weights stay in the cache while all rows are multiplied with them
_PART_BYTES: Final = 1 << 20  # of inputs that stay in the cache while all panels are multiplied with them
_MOST_PART_ROWS: Final = 512
_MOST_CACHED_ROWS: Final = 64  # the results of more rows are too large for the caches, and displace weights and inputs
_STEP_INPUTS: Final[dict[Kind, int]] = {"bfloat16": 2, "int8": 4, "float32": 2}  # V
_INPUTS: Final[dict[Kind, torch.dtype]] = {"bfloat16": torch.bfloat16, "int8": torch.uint8, "float32": torch.float32}


@cache
def _kernel(kind: Kind) -> TaskKernel:
    """multiply_tiles(panels * parts of the rows, work, w, x, out, M, K in tiles, N, rows of a part, x_scale, w_scale,
    correction): addresses and numbers."""
    amx.require(weight_kind(kind))
    KIND, IS_INT8, IS_FLOAT32, OUT_BYTES = kind, kind == "int8", kind == "float32", 2 if kind == "bfloat16" else 4
    IN_BYTES, STEP_BYTES = ROWS * _STEP_INPUTS[kind] * _INPUTS[kind].itemsize, num_parts(kind) * TILE_BYTES

    def multiply_tiles(task: Any) -> None:
        w, x, out, M, steps, N, part_rows = task[3], task[4], task[5], task[6], task[7], task[8], task[9]
        x_scale, w_scale, correction = task[10], task[11], task[12]
        num_panels = N // PANEL
        most = (min(M, part_rows) + ROWS - 1) // ROWS
        tiles = np.empty((most * steps + 1) * STEP_BYTES, np.uint8)
        sums = np.empty((most * ROWS + 1) * PANEL, np.int32)
        tiles_at, sums_at = aligned(tiles.ctypes.data), aligned(sums.ctypes.data)
        apart, panel_bytes, row_bytes = steps * STEP_BYTES, 2 * steps * HALF_BYTES, steps * IN_BYTES
        half_bytes = steps * HALF_BYTES
        is_streamed = M > _MOST_CACHED_ROWS and out % ROW_BYTES == 0
        held = np.int64(-1)
        configure()
        while True:
            item = take(task, 0)
            if item >= task[2]:
                break
            panel, first = item % num_panels, item // num_panels * part_rows
            rows = min(part_rows, M - first)
            groups = (rows + ROWS - 1) // ROWS
            if first != held:
                held = first
                for row in range(groups * ROWS):
                    source = x + (first + row) * row_bytes if row < rows else np.int64(0)
                    copy_row(KIND, tiles_at + row // ROWS * apart + row % ROWS * ROW_BYTES, source, steps)
            block = _BLOCK if groups > 2 else steps
            for step in range(0, steps, block):
                count, is_first = min(block, steps - step), np.int64(step == 0)
                w_at, x_at = w + panel * panel_bytes + step * HALF_BYTES, tiles_at + step * STEP_BYTES
                if groups == 1:
                    multiply(KIND, 1, 4, 0, x_at, apart, w_at, half_bytes, count, sums_at, is_first)
                else:
                    for half in range(2):
                        w_half, sums_half = w_at + half * half_bytes, sums_at + half * HALF_BYTES
                        for group in range(0, groups - 1, 2):
                            x_group, sums_group = x_at + group * apart, sums_half + group * SUMS_BYTES
                            if groups == 2:
                                multiply(KIND, 2, 2, 0, x_group, apart, w_half, half_bytes, count, sums_group, is_first)
                            else:
                                multiply(KIND, 2, 2, 1, x_group, apart, w_half, half_bytes, count, sums_group, is_first)
                        if groups % 2 == 1:
                            x_group, sums_group = x_at + (groups - 1) * apart, sums_half + (groups - 1) * SUMS_BYTES
                            multiply(KIND, 1, 2, 0, x_group, apart, w_half, half_bytes, count, sums_group, is_first)
            target = out + OUT_BYTES * (first * N + panel * PANEL)
            if IS_INT8:
                x_at, w_at, wrong_at = x_scale + 4 * first, w_scale + 4 * panel * PANEL, correction + 4 * panel * PANEL
                store_scaled(is_streamed, sums_at, target, OUT_BYTES * N, rows, x_at, w_at, wrong_at)
            elif IS_FLOAT32:
                store_float32(is_streamed, sums_at, target, OUT_BYTES * N, rows)
            else:
                store_bfloat16(is_streamed, sums_at, target, OUT_BYTES * N, rows)
        release()
        tiles[0] = sums[0] = 0  # numba frees an array after its last use by name

    return TaskKernel(multiply_tiles, f"multiply-tiles-{kind}", least=0)


@final
class AmxPanels:
    """Packed weights in the layout above."""

    def __init__(self, kind: Kind, packed: Tensor, num_outputs: int, num_inputs: int, *scales: Tensor) -> None:
        """int8 needs the scales of the weights, and the int32 that is subtracted from each output's sum."""
        self._packed, self._kept = packed, scales
        self._num_panels, self._num_outputs = num_outputs // PANEL, num_outputs
        self._num_inputs, self._num_steps = num_inputs, num_inputs // _tile_inputs(kind)
        self._dtype = _INPUTS[kind]
        group_bytes = self._num_steps * num_parts(kind) * TILE_BYTES
        self._part_rows = min(_MOST_PART_ROWS, max(2, _PART_BYTES // group_bytes) * ROWS)
        self._scales = tuple(one.data_ptr() for one in scales) or (0, 0)
        self._out_dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        self._kernel = _kernel(kind)

    def __call__(self, x_MK: Tensor, x_scale_M1: Tensor | None = None) -> Tensor:
        """[M, N], for any number of rows: bfloat16, float32, or float32 of uint8 with its scales."""
        x_MK = x_MK.contiguous()
        num_rows = x_MK.shape[0]
        if x_MK.shape[1] != self._num_inputs or x_MK.dtype != self._dtype:  # it would be read as something else
            raise InternalError(f"inputs of {x_MK.shape[1]} {x_MK.dtype}, expected {self._num_inputs} {self._dtype}")
        out_MN = empty((num_rows, self._num_outputs), self._out_dtype)
        addresses = self._packed.data_ptr(), x_MK.data_ptr(), out_MN.data_ptr()
        sizes = num_rows, self._num_steps, self._num_outputs, self._part_rows
        x_scale = 0 if x_scale_M1 is None else x_scale_M1.data_ptr()
        items = self._num_panels * -(-num_rows // self._part_rows)
        self._kernel(items, 1, *addresses, *sizes, x_scale, *self._scales)
        return out_MN


def pack_int8(rounded_NK: Tensor, w_scale_N: Tensor, zero_point: int) -> AmxPanels:
    """For uint8 inputs around `zero_point`."""
    correction_N = (rounded_NK.sum(dim=1, dtype=torch.int32) * zero_point).to(torch.int32)
    return AmxPanels("int8", _pack(rounded_NK), *rounded_NK.shape, w_scale_N, correction_N)


def pack_bfloat16(weight_NK: Tensor) -> AmxPanels:
    return AmxPanels("bfloat16", _pack(weight_NK), *weight_NK.shape)


def pack_float32(weight_NK: Tensor) -> AmxPanels:
    """For float32 inputs, which are not rounded. bfloat16 must hold the weights exactly."""
    return AmxPanels("float32", _pack(weight_NK.bfloat16()), *weight_NK.shape)


def fits(kind: Kind, num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix of that shape is multiplied here."""
    return num_outputs % PANEL == num_inputs % _tile_inputs(kind) == 0 and amx.is_supported(weight_kind(kind))


def _tile_inputs(kind: Kind) -> int:
    return ROWS * _STEP_INPUTS[kind]


def _pack(weight_NK: Tensor) -> Tensor:
    """The layout above of bfloat16 or int8."""
    num_outputs, num_inputs = weight_NK.shape
    step = ROW_BYTES // ROWS // weight_NK.dtype.itemsize
    num_halves, num_steps = num_outputs // (HALF_COLUMNS * COLUMNS), num_inputs // (ROWS * step)
    tiles = weight_NK.reshape(num_halves, HALF_COLUMNS, COLUMNS, num_steps, ROWS, step)
    return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()

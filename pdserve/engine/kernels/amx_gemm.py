"""The product of rows with packed weights by AMX, for bfloat16 and int8 and any number of rows.

A tile of weights is 16 steps of V inputs and 16 outputs, [16, 16, V], with V = 2 in bfloat16 and 4 in int8. The tiles
are stored as [N / 32, K / 16 V, 2]; two halves of 32 outputs are a panel. Rows are first copied to tiles of 16 rows;
missing rows are zeros. A tile instruction takes as long for one row as for 16, but with few rows the time is that of
reading the weights.

An output is the sum of its tiles' products in order, so a row has the same bits in any batch.
"""

# Shapes: M rows, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, Literal, final

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from pdserve.engine.kernels import amx, instructions
from pdserve.engine.kernels.amx import ROW_BYTES, ROWS, TILE_BYTES, aligned, configure, release
from pdserve.engine.kernels.panel_product import PANEL
from pdserve.engine.kernels.results import empty
from pdserve.engine.kernels.task import TaskKernel, take

Kind = Literal["bfloat16", "int8"]
Store = Callable[[Any, Any, Any, int], None]  # instructions.store or stream

_COLUMNS: Final = 16  # outputs of a tile
_PANEL_COLUMNS: Final = PANEL // _COLUMNS  # tiles
_HALF_COLUMNS: Final = _PANEL_COLUMNS // 2
_HALF_BYTES: Final = _HALF_COLUMNS * TILE_BYTES
_SUMS_BYTES: Final = _PANEL_COLUMNS * TILE_BYTES  # of 16 rows and a panel
_BLOCK: Final = 12  # tiles of inputs whose weights stay in the cache while all rows are multiplied with them
_PART_BYTES: Final = 1 << 20  # of inputs that stay in the cache while all panels are multiplied with them
_MOST_PART_ROWS: Final = 512
_MOST_CACHED_ROWS: Final = 64  # the results of more rows are too large for the caches, and displace weights and inputs
_STEP_INPUTS: Final = {"bfloat16": 2, "int8": 4}  # V
_LONG, _WORD, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_WORDS, _FLOATS, _SHORTS = (ir.VectorType(one, _COLUMNS) for one in (_WORD, _FLOAT, _SHORT))


@intrinsic
def _multiply(
    _context: Any,
    kind: Any,
    groups: Any,
    columns: Any,
    is_reread: Any,
    x: Any,
    x_apart: Any,
    w: Any,
    w_apart: Any,
    steps: Any,
    sums: Any,
    is_first: Any,
) -> Any:
    """Adds `steps` tiles of inputs times weights to the sums of 16 * `groups` rows and 16 * `columns` outputs.

    `kind`, `groups`, `columns` and `is_reread`, whether more rows follow for the same weights, are literals. `x` is the
    address of the first group's tiles, and `w` that of a half's; those of the next group begin `x_apart` bytes later,
    and those of the next half `w_apart`. `sums` is an address in tiles [groups, 4]. Sums begin at 0 if `is_first`.
    """
    if not all(isinstance(one, types.Literal) for one in (kind, groups, columns, is_reread)):
        return None
    instruction, num_groups, num_columns = amx.PRODUCT[kind.literal_value], groups.literal_value, columns.literal_value
    load_weights = amx.load if is_reread.literal_value else amx.load_once

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_apart, w, w_apart, steps, sums, is_first = args[4:]
        stride = _LONG(ROW_BYTES)
        held = {(i, j): i * num_columns + j for i in range(num_groups) for j in range(num_columns)}
        inputs, spare = range(len(held), len(held) + num_groups), range(len(held) + num_groups, 8)

        def place(i: int, j: int) -> Any:
            return builder.add(sums, _LONG(i * _SUMS_BYTES + j * TILE_BYTES))

        with builder.if_else(builder.icmp_signed("!=", is_first, _LONG(0))) as (begins, continues):
            with begins:
                for tile in held.values():
                    amx.clear(builder, tile)
            with continues:
                for (i, j), tile in held.items():
                    amx.load(builder, tile, place(i, j), stride)

        def step(k: Any) -> None:
            for i, tile in enumerate(inputs):
                at = builder.add(builder.add(x, builder.mul(x_apart, _LONG(i))), builder.mul(k, _LONG(TILE_BYTES)))
                amx.load_once(builder, tile, at, stride)  # the weights stay in the nearest cache
            w_k = builder.add(w, builder.mul(k, _LONG(_HALF_BYTES)))
            for j in range(num_columns):
                weights = spare[j % len(spare)]
                half = builder.add(w_k, w_apart) if j >= _HALF_COLUMNS else w_k
                load_weights(builder, weights, builder.add(half, _LONG(j % _HALF_COLUMNS * TILE_BYTES)), stride)
                for i, tile in enumerate(inputs):
                    amx.multiply(builder, instruction, held[i, j], tile, weights)

        instructions.each(builder, steps, step)
        for (i, j), tile in held.items():
            amx.store(builder, tile, place(i, j), stride)
        return context.get_dummy_value()

    return types.none(kind, groups, columns, is_reread, *([types.int64] * 7)), generate


@intrinsic
def _copy_row(_context: Any, target: Any, source: Any, steps: Any) -> Any:
    """Copies a row of inputs to its place in tiles that follow each other; a `source` of 0 stands for zeros."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source, steps = args

        def copy(values: Any) -> Any:
            def step(k: Any) -> None:
                at = builder.add(target, builder.mul(k, _LONG(TILE_BYTES)))
                instructions.store(builder, values(k), at, 4)

            return step

        def row(k: Any) -> Any:
            return instructions.load(builder, builder.add(source, builder.mul(k, _LONG(ROW_BYTES))), _WORDS, 1)

        with builder.if_else(builder.icmp_signed("!=", source, _LONG(0))) as (present, missing):
            with present:
                instructions.each(builder, steps, copy(row))
            with missing:
                instructions.each(builder, steps, copy(lambda _: ir.Constant(_WORDS, [0] * _COLUMNS)))
        return context.get_dummy_value()

    return types.none(*([types.int64] * 3)), generate


@intrinsic
def _store_bfloat16(_context: Any, is_streamed: Any, sums: Any, out: Any, stride: Any, num_rows: Any) -> Any:
    """Rounds a panel's outputs of each row to bfloat16. Addresses of the sums and of the results, whose rows are
    `stride` bytes apart. `is_streamed`: whether to store around the caches."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        is_streamed, sums, out, stride, num_rows = args

        def step(store: Store, row: Any) -> None:
            row_sums, row_out = _row_sums(builder, sums, row), _row(builder, out, row, stride)
            for column in range(0, _PANEL_COLUMNS, 2):
                both = [
                    instructions.load(builder, _shift(builder, row_sums, one * TILE_BYTES), _WORDS, 4)
                    for one in (column, column + 1)
                ]
                line = instructions.joined(builder, *(instructions.narrow(builder, words) for words in both))
                store(builder, line, _shift(builder, row_out, column * ROW_BYTES // 2), 2)

        _each_row(builder, num_rows, is_streamed, step)
        return context.get_dummy_value()

    return types.none(types.boolean, *([types.int64] * 4)), generate


@intrinsic
def _store_scaled(
    _context: Any,
    is_streamed: Any,
    sums: Any,
    out: Any,
    stride: Any,
    num_rows: Any,
    x_scale: Any,
    w_scale: Any,
    correction: Any,
) -> Any:
    """(sums - correction) * w_scale * x_scale of a panel's outputs of each row, in float32. Addresses, as above;
    x_scale has a number for each row, the last two for each output."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        is_streamed, sums, out, stride, num_rows, x_scale, w_scale, correction = args
        columns = range(_PANEL_COLUMNS)
        scales = [instructions.load(builder, _shift(builder, w_scale, j * ROW_BYTES), _FLOATS, 4) for j in columns]
        wrong = [instructions.load(builder, _shift(builder, correction, j * ROW_BYTES), _WORDS, 4) for j in columns]

        def step(store: Store, row: Any) -> None:
            row_sums, row_out = _row_sums(builder, sums, row), _row(builder, out, row, stride)
            one = instructions.load(builder, _row(builder, x_scale, row, _LONG(4)), _FLOAT, 4)
            row_scale = instructions.broadcast(builder, one, _COLUMNS)
            for j in columns:
                whole = instructions.load(builder, _shift(builder, row_sums, j * TILE_BYTES), _WORDS, 4)
                values = builder.sitofp(builder.sub(whole, wrong[j]), _FLOATS)
                # A flag of its own keeps fast math from multiplying the scales first.
                values = builder.fmul(values, scales[j], flags=("contract",))
                values = builder.fmul(values, row_scale, flags=("contract",))
                store(builder, values, _shift(builder, row_out, j * ROW_BYTES), 4)

        _each_row(builder, num_rows, is_streamed, step)
        return context.get_dummy_value()

    return types.none(types.boolean, *([types.int64] * 7)), generate


def _each_row(builder: Any, num_rows: Any, is_streamed: Any, step: Callable[[Store, Any], None]) -> None:
    """step(how to store results, row) for each row."""
    with builder.if_else(is_streamed) as (around, through):
        for way, store in ((around, instructions.stream), (through, instructions.store)):
            with way:
                instructions.each(builder, num_rows, partial(step, store))


def _row_sums(builder: Any, sums: Any, row: Any) -> Any:
    """The address of a row of a group's first tile."""
    group, in_group = builder.udiv(row, _LONG(ROWS)), builder.urem(row, _LONG(ROWS))
    return _row(builder, _row(builder, sums, group, _LONG(_SUMS_BYTES)), in_group, _LONG(ROW_BYTES))


def _row(builder: Any, address: Any, row: Any, stride: Any) -> Any:
    return builder.add(address, builder.mul(row, stride))


def _shift(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, _LONG(num_bytes))


@cache
def _kernel(kind: Kind) -> TaskKernel:
    """multiply_tiles(panels * parts of the rows, work, w, x, out, M, K in tiles, N, rows of a part, x_scale, w_scale,
    correction): addresses and numbers."""
    amx.require(kind)
    IS_INT8, KIND, OUT_BYTES = kind == "int8", kind, 4 if kind == "int8" else 2

    def multiply_tiles(task: Any) -> None:
        w, x, out, M, steps, N, part_rows = task[3], task[4], task[5], task[6], task[7], task[8], task[9]
        x_scale, w_scale, correction = task[10], task[11], task[12]
        num_panels = N // PANEL
        most = (min(M, part_rows) + ROWS - 1) // ROWS
        tiles, sums = np.empty((most * steps + 1) * TILE_BYTES, np.uint8), np.empty((most * ROWS + 1) * PANEL, np.int32)
        tiles_at, sums_at = aligned(tiles.ctypes.data), aligned(sums.ctypes.data)
        apart, panel_bytes, row_bytes = steps * TILE_BYTES, 2 * steps * _HALF_BYTES, steps * ROW_BYTES
        half_bytes = steps * _HALF_BYTES
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
                    _copy_row(tiles_at + row // ROWS * apart + row % ROWS * ROW_BYTES, source, steps)
            block = _BLOCK if groups > 2 else steps
            for step in range(0, steps, block):
                count, is_first = min(block, steps - step), np.int64(step == 0)
                w_at, x_at = w + panel * panel_bytes + step * _HALF_BYTES, tiles_at + step * TILE_BYTES
                if groups == 1:
                    _multiply(KIND, 1, 4, 0, x_at, apart, w_at, half_bytes, count, sums_at, is_first)
                else:
                    for half in range(2):
                        w_half, sums_half = w_at + half * half_bytes, sums_at + half * _HALF_BYTES
                        for group in range(0, groups - 1, 2):
                            x_group, sums_group = x_at + group * apart, sums_half + group * _SUMS_BYTES
                            if groups == 2:
                                _multiply(
                                    KIND, 2, 2, 0, x_group, apart, w_half, half_bytes, count, sums_group, is_first
                                )
                            else:
                                _multiply(
                                    KIND, 2, 2, 1, x_group, apart, w_half, half_bytes, count, sums_group, is_first
                                )
                        if groups % 2 == 1:
                            x_group, sums_group = x_at + (groups - 1) * apart, sums_half + (groups - 1) * _SUMS_BYTES
                            _multiply(KIND, 1, 2, 0, x_group, apart, w_half, half_bytes, count, sums_group, is_first)
            target = out + OUT_BYTES * (first * N + panel * PANEL)
            if IS_INT8:
                x_at, w_at, wrong_at = x_scale + 4 * first, w_scale + 4 * panel * PANEL, correction + 4 * panel * PANEL
                _store_scaled(is_streamed, sums_at, target, OUT_BYTES * N, rows, x_at, w_at, wrong_at)
            else:
                _store_bfloat16(is_streamed, sums_at, target, OUT_BYTES * N, rows)
        release()
        tiles[0] = sums[0] = 0  # numba frees an array after its last use by name

    return TaskKernel(multiply_tiles, f"multiply-tiles-{kind}", least=0)


@final
class AmxPanels:
    """Packed weights in the layout above."""

    def __init__(self, packed: Tensor, num_outputs: int, num_inputs: int, *scales: Tensor) -> None:
        """int8 needs the scales of the weights, and the int32 that is subtracted from each output's sum."""
        kind: Kind = "int8" if scales else "bfloat16"
        self._packed, self._kept = packed, scales
        self._num_panels, self._num_outputs = num_outputs // PANEL, num_outputs
        self._num_steps = num_inputs // _tile_inputs(kind)
        self._part_rows = min(_MOST_PART_ROWS, max(2, _PART_BYTES // (self._num_steps * TILE_BYTES)) * ROWS)
        self._scales = tuple(one.data_ptr() for one in scales) or (0, 0)
        self._out_dtype = torch.float32 if scales else torch.bfloat16
        self._kernel = _kernel(kind)

    def __call__(self, x_MK: Tensor, x_scale_M1: Tensor | None = None) -> Tensor:
        """[M, N], for any number of rows: bfloat16, or float32 of uint8 with its scales."""
        x_MK = x_MK.contiguous()
        num_rows = x_MK.shape[0]
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
    return AmxPanels(_pack(rounded_NK), *rounded_NK.shape, w_scale_N, correction_N)


def pack_bfloat16(weight_NK: Tensor) -> AmxPanels:
    return AmxPanels(_pack(weight_NK), *weight_NK.shape)


def fits(kind: Kind, num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix of that shape is multiplied here."""
    return num_outputs % PANEL == num_inputs % _tile_inputs(kind) == 0 and amx.is_supported(kind)


def _tile_inputs(kind: Kind) -> int:
    return ROWS * _STEP_INPUTS[kind]


def _pack(weight_NK: Tensor) -> Tensor:
    """The layout above of bfloat16 or int8."""
    num_outputs, num_inputs = weight_NK.shape
    step = ROW_BYTES // ROWS // weight_NK.dtype.itemsize
    num_halves, num_steps = num_outputs // (_HALF_COLUMNS * _COLUMNS), num_inputs // (ROWS * step)
    tiles = weight_NK.reshape(num_halves, _HALF_COLUMNS, _COLUMNS, num_steps, ROWS, step)
    return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()

"""The product of rows with packed weights by AMX, for bfloat16, int8 and float32 and any number of rows.

Weights are stored in tiles: see the next section. Rows are first copied to tiles of 16 rows; missing rows are zeros. A
tile instruction takes as long for one row as for 16, but with few rows the time is that of reading the weights.

An output is the sum of its tiles' products in order, so a row has the same bits in any batch.
"""

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

from pdserve.core.errors import InternalError
from pdserve.engine.cpu.kernels import amx, instructions
from pdserve.engine.cpu.kernels.amx import ROW_BYTES, ROWS, TILE_BYTES, aligned, configure, release
from pdserve.engine.cpu.kernels.panel_product import PANEL
from pdserve.engine.cpu.kernels.task import TaskKernel, empty, take

# --- tiles ----------------------------------------------------------------------------------------------------
# Inputs to tiles, tiles times tiles, and sums to results.
#
# A tile of weights is 16 steps of V inputs and 16 outputs, [16, 16, V], with V = 2 in bfloat16 and 4 in int8. The tiles
# are stored as [N / 32, K / 16 V, 2]; two halves of 32 outputs are a panel. Tiles of inputs have 16 rows.
#
# A float32 input is the sum of three bfloat16 parts of 8 bits each. Each part has a tile of its own, and all three are
# multiplied with the same weights, which bfloat16 must hold exactly. Parts and weights below 2^-126 count as zeros.

# Shapes: K inputs, N outputs.

Kind = Literal["bfloat16", "int8", "float32"]  # of inputs
Store = Callable[[Any, Any, Any, int], None]  # instructions.store or stream

COLUMNS: Final = 16  # outputs of a tile
HALF_COLUMNS: Final = PANEL // COLUMNS // 2  # tiles
HALF_BYTES: Final = HALF_COLUMNS * TILE_BYTES
SUMS_BYTES: Final = 2 * HALF_BYTES  # of 16 rows and a panel

_PANEL_COLUMNS: Final = 2 * HALF_COLUMNS
_NUM_PARTS: Final[dict[Kind, int]] = {"bfloat16": 1, "int8": 1, "float32": 3}
_WEIGHTS: Final[dict[Kind, str]] = {"bfloat16": "bfloat16", "int8": "int8", "float32": "bfloat16"}
_EXPONENT: Final = 0x7F800000
_NAN: Final = 0x7FC00000  # also of a NaN whose first 16 bits are those of infinity
_FIRST_PART: Final = 0xFFFF0000
_LONG, _WORD, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_WORDS, _FLOATS, _SHORTS = (ir.VectorType(one, COLUMNS) for one in (_WORD, _FLOAT, _SHORT))


def num_parts(kind: Kind) -> int:
    """Tiles of inputs that are multiplied with a tile of weights."""
    return _NUM_PARTS[kind]


def weight_kind(kind: Kind) -> str:
    """Of the weights, for inputs of `kind`."""
    return _WEIGHTS[kind]


@intrinsic
def multiply(
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
    instruction, parts = amx.PRODUCT[weight_kind(kind.literal_value)], range(num_parts(kind.literal_value))
    num_groups, num_columns = groups.literal_value, columns.literal_value
    load_weights = amx.load if is_reread.literal_value else amx.load_once

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_apart, w, w_apart, steps, sums, is_first = args[4:]
        stride = _LONG(ROW_BYTES)
        held = {(i, j): i * num_columns + j for i in range(num_groups) for j in range(num_columns)}
        inputs, spare = range(len(held), len(held) + num_groups), range(len(held) + num_groups, 8)

        def place(i: int, j: int) -> Any:
            return builder.add(sums, _LONG(i * SUMS_BYTES + j * TILE_BYTES))

        with builder.if_else(builder.icmp_signed("!=", is_first, _LONG(0))) as (begins, continues):
            with begins:
                for tile in held.values():
                    amx.clear(builder, tile)
            with continues:
                for (i, j), tile in held.items():
                    amx.load(builder, tile, place(i, j), stride)

        def load_inputs(k: Any, part: int) -> None:
            x_k = builder.add(x, builder.mul(k, _LONG(len(parts) * TILE_BYTES)))
            for i, tile in enumerate(inputs):
                at = builder.add(builder.add(x_k, builder.mul(x_apart, _LONG(i))), _LONG(part * TILE_BYTES))
                amx.load_once(builder, tile, at, stride)  # the weights stay in the nearest cache

        def step(k: Any) -> None:
            w_k = builder.add(w, builder.mul(k, _LONG(HALF_BYTES)))
            for part in parts:
                load_inputs(k, part)
                for j in range(num_columns):
                    weights = spare[j % len(spare)]
                    if part == 0 or num_columns > len(spare):
                        half = builder.add(w_k, w_apart) if j >= HALF_COLUMNS else w_k
                        load_weights(builder, weights, builder.add(half, _LONG(j % HALF_COLUMNS * TILE_BYTES)), stride)
                    for i, tile in enumerate(inputs):
                        amx.multiply(builder, instruction, held[i, j], tile, weights)

        instructions.each(builder, steps, step)
        for (i, j), tile in held.items():
            amx.store(builder, tile, place(i, j), stride)
        return context.get_dummy_value()

    return types.none(kind, groups, columns, is_reread, *([types.int64] * 7)), generate


@intrinsic
def copy_row(_context: Any, kind: Any, target: Any, source: Any, steps: Any) -> Any:
    """Copies a row of inputs to its place in tiles that follow each other; a `source` of 0 stands for zeros.

    `kind` is a literal.
    """
    if not isinstance(kind, types.Literal):
        return None
    parts = range(num_parts(kind.literal_value))

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, target, source, steps = args

        def copy(lines_of: Callable[[Any], list[Any]]) -> Any:
            def step(k: Any) -> None:
                at = _row(builder, target, k, _LONG(len(parts) * TILE_BYTES))
                for part, line in zip(parts, lines_of(k), strict=True):
                    instructions.store(builder, line, _shift(builder, at, part * TILE_BYTES), 4)

            return step

        def whole(k: Any) -> list[Any]:
            return [instructions.load(builder, _row(builder, source, k, _LONG(ROW_BYTES)), _WORDS, 1)]

        def divided(k: Any) -> list[Any]:
            at = _row(builder, source, k, _LONG(2 * ROW_BYTES))
            halves = [instructions.load(builder, _shift(builder, at, one), _WORDS, 4) for one in (0, ROW_BYTES)]
            pairs = zip(*(_divide(builder, words) for words in halves), strict=True)
            return [instructions.joined(builder, *pair) for pair in pairs]

        with builder.if_else(builder.icmp_signed("!=", source, _LONG(0))) as (present, missing):
            with present:
                instructions.each(builder, steps, copy(whole if len(parts) == 1 else divided))
            with missing:
                instructions.each(builder, steps, copy(lambda _: [ir.Constant(_WORDS, [0] * COLUMNS)] * len(parts)))
        return context.get_dummy_value()

    return types.none(kind, *([types.int64] * 3)), generate


def _divide(builder: Any, words: Any) -> list[Any]:
    """Three vectors of bfloat16, as int16, whose sum are the float32 numbers `words`: their first, second and last 8
    bits. The first part of infinity and of NaN is itself, and the others are zeros."""

    def every(value: int) -> Any:
        return ir.Constant(_WORDS, [value] * COLUMNS)

    exponent = every(_EXPONENT)
    is_finite = builder.icmp_unsigned("!=", builder.and_(words, exponent), exponent)
    values = builder.bitcast(words, _FLOATS)
    words = builder.select(builder.fcmp_unordered("uno", values, values), every(_NAN), words)
    found = []
    for _ in range(_NUM_PARTS["float32"]):
        found.append(builder.trunc(builder.lshr(words, every(16)), _SHORTS))
        first = builder.bitcast(builder.and_(words, every(_FIRST_PART)), _FLOATS)
        # A flag of its own keeps fast math from assuming that the difference is finite.
        rest = builder.fsub(builder.bitcast(words, _FLOATS), first, flags=("contract",))
        words = builder.select(is_finite, builder.bitcast(rest, _WORDS), every(0))
    return found


@intrinsic
def store_bfloat16(_context: Any, is_streamed: Any, sums: Any, out: Any, stride: Any, num_rows: Any) -> Any:
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
def store_float32(_context: Any, is_streamed: Any, sums: Any, out: Any, stride: Any, num_rows: Any) -> Any:
    """Copies a panel's sums of each row, as above."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        is_streamed, sums, out, stride, num_rows = args

        def step(store: Store, row: Any) -> None:
            row_sums, row_out = _row_sums(builder, sums, row), _row(builder, out, row, stride)
            for column in range(_PANEL_COLUMNS):
                line = instructions.load(builder, _shift(builder, row_sums, column * TILE_BYTES), _WORDS, 4)
                store(builder, line, _shift(builder, row_out, column * ROW_BYTES), 4)

        _each_row(builder, num_rows, is_streamed, step)
        return context.get_dummy_value()

    return types.none(types.boolean, *([types.int64] * 4)), generate


@intrinsic
def store_scaled(
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
            row_scale = instructions.broadcast(builder, one, COLUMNS)
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
    return _row(builder, _row(builder, sums, group, _LONG(SUMS_BYTES)), in_group, _LONG(ROW_BYTES))


def _row(builder: Any, address: Any, row: Any, stride: Any) -> Any:
    return builder.add(address, builder.mul(row, stride))


def _shift(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, _LONG(num_bytes))


# --- the whole product ----------------------------------------------------------------------------------------

# Shapes: M rows, K inputs, N outputs.

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

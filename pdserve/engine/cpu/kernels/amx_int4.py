"""The product with 4-bit weights by AMX, for more rows than a tile has. Its results are those of int4_gemm.py.

A group of a panel is unpacked to tiles in the cache, and multiplied with all rows of a part, 16 at a time.
int4_layout.py says how weights are stored. Inputs of a tile belong to one group, so groups have a multiple of 64
inputs.
"""

# Shapes: M rows, K inputs, N outputs, G inputs of a group.

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pdserve.engine.cpu.kernels import amx, instructions
from pdserve.engine.cpu.kernels.amx import ROW_BYTES, ROWS, TILE_BYTES, aligned, configure, release
from pdserve.engine.cpu.kernels.int4_layout import PANEL, ROUNDING_BYTES, SCALE_BYTES, STEP, STEP_BYTES
from pdserve.engine.cpu.kernels.rounding import ZERO_POINT
from pdserve.engine.cpu.kernels.task import FLOAT32, UINT8, TaskKernel, pointer, take

PART_ROWS: Final = 256  # rows whose inputs and results stay in the cache while all groups are multiplied with them

_COLUMNS: Final = PANEL // ROWS  # tiles of a panel
_TILE_INPUTS: Final = ROW_BYTES
_TILE_STEPS: Final = _TILE_INPUTS // STEP
_LONG, _WORD, _SHORT, _BYTE, _FLOAT = *(ir.IntType(size) for size in (64, 32, 16, 8)), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, ROWS), ir.VectorType(_FLOAT, ROWS)
_BYTES, _HALVES = ir.VectorType(_BYTE, ROWS), ir.VectorType(ir.HalfType(), ROWS)


def is_supported(size: int) -> bool:
    """Whether groups of `size` inputs are multiplied here."""
    return size % _TILE_INPUTS == 0 and amx.is_supported("int8")


@intrinsic
def _copy_tile(_context: Any, source: Any, target: Any) -> Any:
    """Copies 64 inputs around 128, as signed ones, to a row of a tile, and returns their sum. Addresses."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, target = args
        row = ir.VectorType(_BYTE, _TILE_INPUTS)
        inputs = instructions.load(builder, source, row, 1)
        instructions.store(builder, builder.xor(inputs, ir.Constant(row, [ZERO_POINT] * _TILE_INPUTS)), target, 1)
        wide = ir.VectorType(_SHORT, _TILE_INPUTS)
        of = ir.FunctionType(_SHORT, [wide])
        reduce = builder.module.declare_intrinsic(f"llvm.vector.reduce.add.v{_TILE_INPUTS}i16", fnty=of)
        total = builder.zext(builder.call(reduce, [builder.zext(inputs, wide)]), _LONG)
        return builder.sub(total, _LONG(ZERO_POINT * _TILE_INPUTS))

    return types.int64(source, target), generate


@intrinsic
def _unpack(_context: Any, block: Any, tiles: Any, steps: Any) -> Any:
    """Unpacks `steps` times eight inputs of a panel's block: two rows of the tiles of its four columns. Addresses."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        block, tiles, steps = args
        mask, four = (ir.Constant(_WORDS, [value] * ROWS) for value in (0x0F0F0F0F, 4))

        def unpack(step: Any) -> None:
            source = builder.add(block, builder.mul(step, _LONG(STEP_BYTES)))
            tile, pair = builder.udiv(step, _LONG(_TILE_STEPS)), builder.urem(step, _LONG(_TILE_STEPS))
            target = builder.add(tiles, builder.mul(tile, _LONG(_COLUMNS * TILE_BYTES)))
            target = builder.add(target, builder.mul(pair, _LONG(2 * ROW_BYTES)))
            for column in range(_COLUMNS):
                packed = instructions.load(builder, builder.add(source, _LONG(column * ROW_BYTES)), _WORDS, 1)
                for half, words in enumerate((packed, builder.lshr(packed, four))):
                    at = builder.add(target, _LONG(column * TILE_BYTES + half * ROW_BYTES))
                    instructions.store(builder, builder.and_(words, mask), at, 4)

        instructions.each(builder, steps, unpack)
        return context.get_dummy_value()

    return types.none(*([types.int64] * 3)), generate


@intrinsic
def _multiply(_context: Any, x: Any, weights: Any, num_tiles: Any, sums: Any) -> Any:
    """The sums of 16 rows and 64 outputs over one group, in four tiles. Addresses of the row's tiles of inputs, of the
    unpacked weights, and of the sums."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, weights, num_tiles, sums = args
        inputs, spare, stride = _COLUMNS, range(_COLUMNS + 1, 8), _LONG(ROW_BYTES)
        for column in range(_COLUMNS):
            amx.clear(builder, column)

        def multiply(tile: Any) -> None:
            amx.load(builder, inputs, builder.add(x, builder.mul(tile, _LONG(TILE_BYTES))), stride)
            at = builder.add(weights, builder.mul(tile, _LONG(_COLUMNS * TILE_BYTES)))
            for column in range(_COLUMNS):
                one = spare[column % len(spare)]
                amx.load(builder, one, builder.add(at, _LONG(column * TILE_BYTES)), stride)
                amx.multiply(builder, "tdpbsud", column, inputs, one)

        instructions.each(builder, num_tiles, multiply)
        for column in range(_COLUMNS):
            amx.store(builder, column, builder.add(sums, _LONG(column * TILE_BYTES)), stride)
        return context.get_dummy_value()

    return types.none(*([types.int64] * 4)), generate


@intrinsic
def _add_group(
    _context: Any, is_first: Any, sums: Any, rounding: Any, row_sums: Any, stride: Any, totals: Any, num_rows: Any
) -> Any:
    """totals += (sums - zero * the sum of the row's inputs) * scale, for up to 16 rows; from 0 on if the literal
    `is_first` is 1.

    The addresses of the sums' tiles, of the group's scales and zeros, of the first row's sum of inputs, whose next is
    `stride` bytes later, and of the totals [rows, 64].
    """
    if not isinstance(is_first, types.IntegerLiteral):
        return None
    begins = bool(is_first.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        sums, rounding, row_sums, stride, totals, num_rows = args[1:]
        zeros_at = builder.add(rounding, _LONG(PANEL * SCALE_BYTES))
        scales, zeros = [], []
        for column in range(_COLUMNS):
            at = builder.add(rounding, _LONG(column * ROWS * SCALE_BYTES))
            scales.append(builder.fpext(instructions.load(builder, at, _HALVES, 1), _FLOATS))
            small = instructions.load(builder, builder.add(zeros_at, _LONG(column * ROWS)), _BYTES, 1)
            zeros.append(builder.uitofp(builder.zext(small, _WORDS), _FLOATS))

        def add(row: Any) -> None:
            one = instructions.load(builder, builder.add(row_sums, builder.mul(row, stride)), _FLOAT, 4)
            negative = instructions.broadcast(builder, builder.fneg(one), ROWS)
            row_at = builder.add(sums, builder.mul(row, _LONG(ROW_BYTES)))
            total_at = builder.add(totals, builder.mul(row, _LONG(4 * PANEL)))
            for column in range(_COLUMNS):
                whole = instructions.load(builder, builder.add(row_at, _LONG(column * TILE_BYTES)), _WORDS, 4)
                exact = instructions.fused(builder, negative, zeros[column], builder.sitofp(whole, _FLOATS))
                at = builder.add(total_at, _LONG(column * ROW_BYTES))
                total = ir.Constant(_FLOATS, [0.0] * ROWS) if begins else instructions.load(builder, at, _FLOATS, 4)
                instructions.store(builder, instructions.fused(builder, exact, scales[column], total), at, 4)

        instructions.each(builder, num_rows, add)
        return context.get_dummy_value()

    return types.none(is_first, *([types.int64] * 6)), generate


@intrinsic
def _store_panel(_context: Any, totals: Any, out: Any, stride: Any, num_rows: Any, x_scale: Any, factor: Any) -> Any:
    """Stores totals [rows, 64] times the scale of the row times the float32 `factor`. Addresses; rows of the results
    are `stride` bytes apart."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        totals, out, stride, num_rows, x_scale, factor = args

        def store(row: Any) -> None:
            one = instructions.load(builder, builder.add(x_scale, builder.mul(row, _LONG(4))), _FLOAT, 4)
            scale = instructions.broadcast(builder, builder.fmul(one, factor), ROWS)
            source, target = (
                builder.add(totals, builder.mul(row, _LONG(4 * PANEL))),
                builder.add(out, builder.mul(row, stride)),
            )
            for column in range(_COLUMNS):
                value = instructions.load(builder, builder.add(source, _LONG(column * ROW_BYTES)), _FLOATS, 4)
                # A flag of its own keeps fast math from multiplying the total first.
                value = builder.fmul(value, scale, flags=("contract",))
                instructions.store(builder, value, builder.add(target, _LONG(column * ROW_BYTES)), 4)

        instructions.each(builder, num_rows, store)
        return context.get_dummy_value()

    return types.none(*([types.int64] * 5), factor), generate


@cache
def make_kernel() -> TaskKernel:
    """multiply_int4_tiles(panels * parts of the rows, work, blocks, x, x_scale, out, M, K, N, K / G, G, factor): as the
    kernel of int4_gemm.py."""
    amx.require("int8")

    def multiply_int4_tiles(task: Any) -> None:
        blocks, M, K, N, num_groups, size = task[3], task[7], task[8], task[9], task[10], task[11]
        factor = np.float32(np.int64(task[12]).view(np.float64))
        x, x_scale = carray(pointer(task[4], UINT8), (M, K)), carray(pointer(task[5], FLOAT32), (M,))
        out = carray(pointer(task[6], FLOAT32), (M, N))
        num_panels, group_tiles = (N + PANEL - 1) // PANEL, size // _TILE_INPUTS
        num_tiles = num_groups * group_tiles
        packed_bytes = size // STEP * STEP_BYTES
        block_bytes, most = packed_bytes + ROUNDING_BYTES, (min(M, PART_ROWS) + ROWS - 1) // ROWS
        inputs, last = np.zeros((most, num_tiles, ROWS, _TILE_INPUTS), np.uint8), np.empty(_TILE_INPUTS, np.uint8)
        x_at, out_at, last_at = task[4], task[6], np.int64(last.ctypes.data)
        row_sums, totals = np.zeros((most * ROWS, num_groups), np.float32), np.empty((most * ROWS, PANEL), np.float32)
        unpacked_bytes, sums_bytes = group_tiles * _COLUMNS * TILE_BYTES, _COLUMNS * TILE_BYTES
        weights, sums = np.empty(2 * unpacked_bytes + ROW_BYTES, np.uint8), np.empty(2 * sums_bytes, np.uint8)
        inputs_at, row_sums_at = np.int64(inputs.ctypes.data), np.int64(row_sums.ctypes.data)
        totals_at, sums_at = np.int64(totals.ctypes.data), np.int64(sums.ctypes.data)
        weights_at = aligned(weights.ctypes.data)
        held = np.int64(-1)
        configure()
        while True:
            item = take(task, 0)
            if item >= task[2]:
                break
            panel, first = item % num_panels, item // num_panels * PART_ROWS
            rows = min(PART_ROWS, M - first)
            if first != held:
                held = first
                for row in range(rows):
                    source = x_at + (first + row) * K
                    target = inputs_at + (row // ROWS * num_tiles * ROWS + row % ROWS) * ROW_BYTES
                    for group in range(num_groups):
                        total = np.int64(0)
                        for tile in range(group * group_tiles, (group + 1) * group_tiles):
                            begin = tile * _TILE_INPUTS
                            if begin + _TILE_INPUTS <= K:
                                total += _copy_tile(source + begin, target + tile * TILE_BYTES)
                                continue
                            for k in range(_TILE_INPUTS):  # the last one, which zeros fill
                                last[k] = x[first + row, begin + k] if begin + k < K else np.uint8(ZERO_POINT)
                            total += _copy_tile(last_at, target + tile * TILE_BYTES)
                        row_sums[row, group] = np.float32(total)
            panel_at, num_parts = blocks + panel * num_groups * block_bytes, (rows + ROWS - 1) // ROWS
            _unpack(panel_at, weights_at, size // STEP)
            group = part = last_group = last_part = 0
            for turn in range(num_groups * num_parts + 1):
                if group < num_groups:
                    tiles_at = inputs_at + (part * num_tiles + group * group_tiles) * TILE_BYTES
                    at = weights_at + group % 2 * unpacked_bytes
                    _multiply(tiles_at, at, group_tiles, sums_at + turn % 2 * sums_bytes)
                    if part == 0 and group + 1 < num_groups:
                        at = weights_at + (group + 1) % 2 * unpacked_bytes
                        _unpack(panel_at + (group + 1) * block_bytes, at, size // STEP)
                if turn > 0:  # the sums of the turn before have been stored by now
                    row_sum_at = row_sums_at + 4 * (last_part * ROWS * num_groups + last_group)
                    total_at, sum_at = totals_at + 4 * PANEL * ROWS * last_part, sums_at + (turn - 1) % 2 * sums_bytes
                    rounding = panel_at + last_group * block_bytes + packed_bytes
                    count, stride = min(ROWS, rows - last_part * ROWS), 4 * num_groups
                    if last_group == 0:
                        _add_group(1, sum_at, rounding, row_sum_at, stride, total_at, count)
                    else:
                        _add_group(0, sum_at, rounding, row_sum_at, stride, total_at, count)
                last_group, last_part = group, part
                part += 1
                if part == num_parts:
                    group, part = group + 1, 0
            begin = panel * PANEL
            if begin + PANEL <= N:
                target = out_at + 4 * (first * N + begin)
                _store_panel(totals_at, target, 4 * N, rows, task[5] + 4 * first, factor)
                continue
            for row in range(rows):
                scale = x_scale[first + row] * factor
                for n in range(N - begin):
                    out[first + row, begin + n] = totals[row, n] * scale
        release()
        weights[0] = sums[0] = last[0] = 0  # numba frees an array after its last use by name
        totals[0, 0] = row_sums[0, 0] = inputs[0, 0, 0, 0] = 0

    return TaskKernel(multiply_int4_tiles, "multiply-int4-tiles", least=0)

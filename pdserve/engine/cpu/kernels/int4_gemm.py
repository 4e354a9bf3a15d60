"""The product with 4-bit weights in groups, for any number of rows.

        y[t, n] ~ s_x[t] * sum_g s_w[n, g] * (sum_k q_x[t, k] q_w[n, k] - zero[n, g] * sum_k q_x[t, k])

int4_layout.py says how weights are stored. Activations are rounded as for int8. The sums of a group are exact:
integers, then float32 below 2^24. Groups are added in order, so a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from pdserve.engine.cpu.kernels import amx, amx_int4, instructions, jit
from pdserve.engine.cpu.kernels.instructions import LANES
from pdserve.engine.cpu.kernels.int4_layout import PANEL, ROUNDING_BYTES, SCALE_BYTES, STEP, STEP_BYTES
from pdserve.engine.cpu.kernels.panel_product import MOST_ROWS, Tile, register_tiles
from pdserve.engine.cpu.kernels.rounding import ZERO_POINT
from pdserve.engine.cpu.kernels.task import FLOAT32, UINT8, TaskKernel, empty, pointer, take

# --- one group of a panel times a few rows --------------------------------------------------------------------
# The inner loop, in vector instructions. With AVX-512 VNNI, an instruction adds four products to an int32. With AVX2,
# it adds two in an int16, which holds the sums of four steps: 8 * 2 * 15 * 127 < 2^15. The integers are exact and the
# operations in float32 are the same, so the bits are, too.

PACKED_ROWS: Final = 4 if LANES == 16 else 2  # more would not leave enough registers to unpack weights

_HAS_VNNI = LANES == 16
_LINE = 64
_STEPS_OF_INT16 = 4
_AHEAD = 4096  # bytes from the weights that are multiplied to those that are prefetched
_LONG, _WORD, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, LANES), ir.VectorType(_FLOAT, LANES)
_BYTES, _HALVES = ir.VectorType(_BYTE, LANES), ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


@intrinsic
def multiply_group(
    _context: Any,
    rows: Any,
    block: Any,
    wide: Any,
    x: Any,
    x_stride: Any,
    sums: Any,
    sum_stride: Any,
    totals: Any,
    steps: Any,
) -> Any:
    """Adds the products of one group to totals[r, 0:64]; `rows` is a literal, 1 to 6.

    `block`, `x`, `sums` and `totals` are the addresses of a block, of the first row's int8 inputs, of the sum of its
    inputs, and of its float32 results; strides are in bytes. Up to PACKED_ROWS rows unpack the block themselves. More
    read the weights at `wide`, one per byte. The prefetched addresses may be beyond the weights.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    num_rows = rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, block, wide, x, x_stride, sums, sum_stride, totals, steps = args
        row_x = [builder.add(x, builder.mul(x_stride, _LONG(row))) for row in range(num_rows)]
        row_sums = [builder.add(sums, builder.mul(sum_stride, _LONG(row))) for row in range(num_rows)]
        weights_at = block if num_rows <= PACKED_ROWS else wide
        for index, tile in enumerate(register_tiles(num_rows)):
            loop = _Loop(builder, tile, weights_at, row_x, is_packed=num_rows <= PACKED_ROWS)
            prefetched = block if index == 0 else None
            whole = loop.in_int32(steps, prefetched) if _HAS_VNNI else loop.in_int16(steps, prefetched)
            _scale(builder, tile, whole, builder.add(block, builder.mul(steps, _LONG(STEP_BYTES))), row_sums, totals)
        return context.get_dummy_value()

    return types.none(rows, *([types.int64] * 8)), generate


class _Loop:
    """The integer sums of a tile."""

    def __init__(self, builder: Any, tile: Tile, weights_at: Any, row_x: list[Any], *, is_packed: bool) -> None:
        self._builder, self._tile, self._weights_at, self._row_x = builder, tile, weights_at, row_x
        self._is_packed = is_packed
        self._parts = list(dict.fromkeys(part for _, part in tile))

    def in_int32(self, steps: Any, prefetched: Any) -> list[Any]:
        zero = ir.Constant(_WORDS, [0] * LANES)
        return instructions.repeat(
            self._builder, steps, [zero] * len(self._tile), lambda step, held: self._step(step, held, prefetched)
        )

    def in_int16(self, steps: Any, prefetched: Any) -> list[Any]:
        """A few steps in int16, then the sums of neighbours in int32."""
        builder, most = self._builder, _LONG(_STEPS_OF_INT16)
        zeros = [ir.Constant(_SHORTS, [0] * 2 * LANES)] * len(self._tile)

        def some(turn: Any, held: list[Any]) -> list[Any]:
            first = builder.mul(turn, most)
            rest = builder.sub(steps, first)
            count = builder.select(builder.icmp_signed("<", rest, most), rest, most)
            shorts = instructions.repeat(
                builder, count, zeros, lambda step, short: self._step(builder.add(first, step), short, prefetched)
            )
            sums = [instructions.add_pairs(builder, short) for short in shorts]
            return [builder.add(one, new) for one, new in zip(held, sums, strict=True)]

        turns = builder.udiv(builder.add(steps, _LONG(_STEPS_OF_INT16 - 1)), most)
        return instructions.repeat(builder, turns, [ir.Constant(_WORDS, [0] * LANES)] * len(self._tile), some)

    def _step(self, step: Any, held: list[Any], prefetched: Any) -> list[Any]:
        builder = self._builder
        if prefetched is not None:
            for line in range(0, STEP_BYTES, _LINE):
                _prefetch(builder, builder.add(prefetched, builder.mul(step, _LONG(STEP_BYTES))), line)
        for half, weights in enumerate(self._weights(step)):
            inputs = {}
            for row in dict.fromkeys(row for row, _ in self._tile):
                at = builder.add(self._row_x[row], builder.mul(step, _LONG(STEP)))
                inputs[row] = instructions.broadcast(builder, _load(builder, at, STEP // 2 * half, _WORD), LANES)
            # By part, so that each vector of weights needs a register for a short time only.
            new = {
                (row, part): _add(builder, held[self._tile.index((row, part))], weights(part), inputs[row])
                for part in self._parts
                for row in inputs
            }
            held = [new[one] for one in self._tile]
        return held

    def _weights(self, step: Any) -> list[Callable[[int], Any]]:
        """Those of a part, for both halves of a step."""
        builder = self._builder
        if not self._is_packed:
            at = builder.add(self._weights_at, builder.mul(step, _LONG(2 * STEP_BYTES)))
            return [partial(self._wide, builder.add(at, _LONG(half * STEP_BYTES))) for half in range(2)]
        at = builder.add(self._weights_at, builder.mul(step, _LONG(STEP_BYTES)))
        packed = {part: _load(builder, at, 4 * LANES * part, _WORDS) for part in self._parts}
        mask, four = (ir.Constant(_WORDS, [value] * LANES) for value in (0x0F0F0F0F, 4))
        low = {part: builder.and_(one, mask) for part, one in packed.items()}
        high = {part: builder.and_(builder.lshr(one, four), mask) for part, one in packed.items()}
        return [low.__getitem__, high.__getitem__]

    def _wide(self, at: Any, part: int) -> Any:
        return _load(self._builder, at, 4 * LANES * part, _WORDS)


def _add(builder: Any, held: Any, weights: Any, inputs: Any) -> Any:
    """held + the products of four uint8 and four int8 of each lane, which AVX2 adds in pairs."""
    if _HAS_VNNI:
        return instructions.accumulate(builder, "vpdpbusd", held, weights, inputs)
    return builder.add(held, instructions.multiply_pairs(builder, weights, inputs))


def _scale(builder: Any, tile: Tile, whole: list[Any], scales_at: Any, row_sums: list[Any], totals: Any) -> None:
    """totals += (whole - zero * the sum of the row's inputs) * scale."""
    zeros_at = builder.add(scales_at, _LONG(PANEL * SCALE_BYTES))
    if tile[0] == (0, 0):
        for line in range(0, ROUNDING_BYTES, _LINE):
            _prefetch(builder, scales_at, line)
    parts = dict.fromkeys(part for _, part in tile)
    scales = {
        part: builder.fpext(_load(builder, scales_at, SCALE_BYTES * LANES * part, _HALVES), _FLOATS) for part in parts
    }
    zeros = {
        part: builder.uitofp(builder.zext(_load(builder, zeros_at, LANES * part, _BYTES), _WORDS), _FLOATS)
        for part in parts
    }
    for one, (row, part) in zip(whole, tile, strict=True):
        negative = instructions.broadcast(builder, builder.fneg(_load(builder, row_sums[row], 0, _FLOAT)), LANES)
        exact = instructions.fused(builder, negative, zeros[part], builder.sitofp(one, _FLOATS))
        shift = 4 * (row * PANEL + LANES * part)
        new = instructions.fused(builder, exact, scales[part], _load(builder, totals, shift, _FLOATS))
        builder.store(new, builder.inttoptr(builder.add(totals, _LONG(shift)), _FLOATS.as_pointer())).align = 4


def _load(builder: Any, address: Any, shift: int, of: Any) -> Any:
    value = builder.load(builder.inttoptr(builder.add(address, _LONG(shift)), of.as_pointer()))
    value.align = 1
    return value


def _prefetch(builder: Any, address: Any, shift: int) -> None:
    at = builder.inttoptr(builder.add(address, _LONG(_AHEAD + shift)), _BYTE.as_pointer())
    instructions.prefetch(builder, at)


# --- the whole product ----------------------------------------------------------------------------------------

# Shapes: M rows, K inputs, N outputs, G inputs of a group.

_FEATURES: Final = {"+avx512f", "+avx512vnni"}
_AVX2_FEATURES: Final = {"+avx2", "+fma", "+f16c"}
_CHUNK_ROWS = 48  # rows whose inputs stay in the cache while all panels are multiplied with them


@cache
def _kernel() -> TaskKernel:
    """multiply_int4(panels * chunks of rows, work, blocks, x, x_scale, out, M, K, N, K / G, G, factor): addresses,
    sizes, and a factor of all scales."""

    def multiply_int4(task: Any) -> None:
        blocks, M, K, N, num_groups, size = task[3], task[7], task[8], task[9], task[10], task[11]
        factor = np.float32(np.int64(task[12]).view(np.float64))
        x, x_scale = carray(pointer(task[4], UINT8), (M, K)), carray(pointer(task[5], FLOAT32), (M,))
        out = carray(pointer(task[6], FLOAT32), (M, N))
        num_panels, num_inputs, steps = (N + PANEL - 1) // PANEL, num_groups * size, size // STEP
        block_bytes, most = steps * STEP_BYTES + ROUNDING_BYTES, min(M, _CHUNK_ROWS)
        signed, sums = np.zeros((most, num_inputs), np.uint8), np.empty((most, num_groups), np.float32)
        totals, wide = np.empty((most, PANEL), np.float32), np.empty((steps, 2, STEP_BYTES), np.uint8)
        signed_at, sums_at = np.int64(signed.ctypes.data), np.int64(sums.ctypes.data)
        totals_at, wide_at = np.int64(totals.ctypes.data), np.int64(wide.ctypes.data)
        # numba frees an array after its last use by name: all of these have one in the loop.
        held = np.int64(-1)
        while True:
            item = take(task, 0)
            if item >= task[2]:
                return
            panel, first = item % num_panels, item // num_panels * _CHUNK_ROWS
            rows = min(_CHUNK_ROWS, M - first)
            if first != held:
                held = first
                for row in range(rows):
                    source, target = x[first + row], signed[row]
                    for k in range(np.uint64(K)):
                        target[k] = source[k] ^ np.uint8(ZERO_POINT)
                    for group in range(num_groups):
                        total = np.int32(0)
                        for k in range(np.uint64(group * size), np.uint64((group + 1) * size)):
                            total += np.int32(np.int8(target[k]))
                        sums[row, group] = np.float32(total)
            totals[:rows] = np.float32(0)
            num_parts = (rows + MOST_ROWS - 1) // MOST_ROWS
            for group in range(num_groups):
                block = blocks + (panel * num_groups + group) * block_bytes
                if rows > PACKED_ROWS:
                    packed = carray(pointer(block, UINT8), (steps, STEP_BYTES))
                    for step in range(steps):
                        for i in range(STEP_BYTES):
                            wide[step, 0, i] = packed[step, i] & np.uint8(15)
                            wide[step, 1, i] = packed[step, i] >> np.uint8(4)
                for part in range(num_parts):
                    row = part * rows // num_parts
                    count = (part + 1) * rows // num_parts - row
                    x_at, sum_at = signed_at + row * num_inputs + group * size, sums_at + 4 * (row * num_groups + group)
                    add_at, stride = totals_at + 4 * row * PANEL, 4 * num_groups
                    if count == 1:
                        multiply_group(1, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 2:
                        multiply_group(2, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 3:
                        multiply_group(3, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 4:
                        multiply_group(4, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 5:
                        multiply_group(5, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    else:
                        multiply_group(6, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
            begin = panel * PANEL
            for row in range(rows):
                scale = x_scale[first + row] * factor
                for n in range(min(PANEL, N - begin)):
                    out[first + row, begin + n] = totals[row, n] * scale

    return TaskKernel(multiply_int4, "multiply-int4", least=0)


def is_supported() -> bool:
    """Whether this CPU and numba's target have the instructions."""
    features = set(jit.target()[1].split(","))
    if "+avx512f" in features:
        return torch.cpu._is_vnni_supported() and features >= _FEATURES
    return torch.cpu._is_avx2_supported() and features >= _AVX2_FEATURES


def multiply(blocks: Tensor, factor: float, size: int, num_outputs: int, x_MK: Tensor, x_scale_M1: Tensor) -> Tensor:
    """[M, N] of inputs as `ops.quantise` rounds them; the last group of `size` inputs may be partly beyond K.

    The stored scales are multiplied with `factor`.
    """
    x_MK = x_MK.contiguous()
    (num_rows, num_inputs), (num_panels, num_groups, _) = x_MK.shape, blocks.shape
    out_MN = empty((num_rows, num_outputs))
    addresses = blocks.data_ptr(), x_MK.data_ptr(), x_scale_M1.data_ptr(), out_MN.data_ptr()
    sizes = num_rows, num_inputs, num_outputs, num_groups, size
    kernel, part_rows = _kernel(), _CHUNK_ROWS
    if num_rows > amx.ROWS and amx_int4.is_supported(size):  # fewer do not fill the rows of a tile
        kernel, part_rows = amx_int4.make_kernel(), amx_int4.PART_ROWS
    kernel(num_panels * -(-num_rows // part_rows), 1, *addresses, *sizes, jit.bits(factor))
    return out_MN

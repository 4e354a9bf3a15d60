"""The inner loop of int4_gemm.py: one group of a panel times a few rows, in vector instructions.

With AVX-512 VNNI, an instruction adds four products to an int32. With AVX2, it adds two in an int16, which holds the
sums of four steps: 8 * 2 * 15 * 127 < 2^15. The integers are exact and the operations in float32 are the same, so the
bits are, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.kernels import instructions
from pdserve.engine.kernels.instructions import LANES
from pdserve.engine.kernels.int4_layout import PANEL, ROUNDING_BYTES, SCALE_BYTES, STEP, STEP_BYTES
from pdserve.engine.kernels.panel_product import Tile, register_tiles

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

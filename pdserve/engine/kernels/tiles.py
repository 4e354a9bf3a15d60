"""The two products of attention with a tile of keys or values, in vector instructions.

A lane of a score is one key, so a score is the sum over the dims in order, and needs no sum across lanes. Each sum is
added in one order for any number of queries, so a query's bits are the same alone and in a chunk.
"""

# Shapes: W dims of a head, rounded up to whole vectors.

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.kernels import instructions
from pdserve.engine.kernels.instructions import LANES

KEYS: Final = 64  # of a tile
GROUP: Final = 16  # keys whose numbers of one dim are contiguous
ROWS: Final = 6  # queries at a time, whose sums are in registers

_SCORE_VECTORS = LANES // 4  # of keys at a time: 4 with 32 registers, 2 with 16
_VALUE_VECTORS = LANES // 4
_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


@intrinsic
def arrange(_context: Any, dim: Any, keys: Any, shift: Any, out: Any) -> Any:
    """Arranges GROUP keys as [dim, GROUP]. `dim` is a literal. `keys` is the address of the addresses of the keys, to
    each of which `shift` bytes are added. Reads whole vectors of each key."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    size = dim.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, keys, shift, out = args
        for first in range(0, GROUP, LANES):
            at = [
                builder.add(instructions.load(builder, builder.add(keys, _LONG(8 * (first + key))), _LONG, 8), shift)
                for key in range(LANES)
            ]
            for column in range(0, size, LANES):
                rows = [instructions.load(builder, builder.add(one, _LONG(4 * column)), _WORDS, 4) for one in at]
                for d, words in enumerate(instructions.transposed(builder, rows)[: size - column]):
                    to = builder.add(out, _LONG(4 * (GROUP * (column + d) + first)))
                    instructions.store(builder, words, to, 4)
        return context.get_dummy_value()

    return types.none(dim, *([types.int64] * 3)), generate


@intrinsic
def scores(_context: Any, dim: Any, width: Any, rows: Any, queries: Any, keys: Any, out: Any) -> Any:
    """out[r, i] = query r . key i for up to ROWS queries [rows, width] and KEYS arranged keys.

    `dim` and `width` are literals, `rows` is a number, and the others are addresses.
    """
    if not isinstance(dim, types.IntegerLiteral) or not isinstance(width, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, *others = args[2:]
        for num_rows in range(1, ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", rows, _LONG(num_rows))):
                for first in range(0, KEYS // LANES, _SCORE_VECTORS):
                    _score_some(builder, dim.literal_value, width.literal_value, num_rows, first, *others)
        return context.get_dummy_value()

    return types.none(dim, width, *([types.int64] * 4)), generate


def _score_some(
    builder: Any, dim: int, width: int, num_rows: int, first: int, queries: Any, keys: Any, out: Any
) -> None:
    """The scores of some vectors of keys, from vector `first` on."""
    vectors = range(first, first + _SCORE_VECTORS)
    places = [(row, vector) for row in range(num_rows) for vector in vectors]
    starts = [divmod(vector * LANES, GROUP) for vector in vectors]
    zeros = [ir.Constant(_VECTOR, [0.0] * LANES)] * len(places)

    def step(d: Any, held: list[Any]) -> list[Any]:
        at = builder.add(keys, builder.mul(d, _LONG(4 * GROUP)))
        loaded = [_load(builder, at, 4 * (group * GROUP * dim + lane)) for group, lane in starts]
        query_at = builder.add(queries, builder.mul(d, _LONG(4)))
        every = [_broadcast(builder, query_at, 4 * width * row) for row in range(num_rows)]
        return [
            instructions.fused_or_not(builder, every[row], loaded[vector - first], one)
            for (row, vector), one in zip(places, held, strict=True)
        ]

    for (row, vector), total in zip(places, instructions.repeat(builder, _LONG(dim), zeros, step), strict=True):
        _store(builder, total, out, 4 * (KEYS * row + LANES * vector))


@intrinsic
def add_values(
    _context: Any, width: Any, rows: Any, weights: Any, values: Any, count: Any, factors: Any, sums: Any
) -> Any:
    """sums[r] = sums[r] * factors[r] + weights[r, c] * values[c] for c = 0 .. count - 1, in order, for up to ROWS rows.

    weights [rows, KEYS], factors [rows], sums [rows, width]. `values` is the address of the addresses of the values.
    `width` is a literal multiple of LANES, `rows` and `count` are numbers, the others addresses.
    """
    if not isinstance(width, types.IntegerLiteral):
        return None
    size = width.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, *others = args[1:]
        for num_rows in range(1, ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", rows, _LONG(num_rows))):
                for first in range(0, size, _VALUE_VECTORS * LANES):
                    columns = range(first, min(first + _VALUE_VECTORS * LANES, size), LANES)
                    _add_some(builder, size, num_rows, columns, *others)
        return context.get_dummy_value()

    return types.none(width, *([types.int64] * 6)), generate


def _add_some(
    builder: Any,
    width: int,
    num_rows: int,
    columns: range,
    weights: Any,
    values: Any,
    count: Any,
    factors: Any,
    sums: Any,
) -> None:
    """`add_values` of the given columns."""
    places = [(row, column) for row in range(num_rows) for column in columns]
    scale = [_broadcast(builder, factors, 4 * row) for row in range(num_rows)]
    starts = [
        builder.fmul(_load(builder, sums, 4 * (row * width + column)), scale[row], flags=("contract",))
        for row, column in places
    ]

    def step(c: Any, held: list[Any]) -> list[Any]:
        value_at = instructions.load(builder, builder.add(values, builder.mul(c, _LONG(8))), _LONG, 8)
        weight_at = builder.add(weights, builder.mul(c, _LONG(4)))
        loaded = {column: _load(builder, value_at, 4 * column) for column in columns}
        every = [_broadcast(builder, weight_at, 4 * KEYS * row) for row in range(num_rows)]
        return [
            instructions.fused_or_not(builder, every[row], loaded[column], one)
            for (row, column), one in zip(places, held, strict=True)
        ]

    for (row, column), total in zip(places, instructions.repeat(builder, count, starts, step), strict=True):
        _store(builder, total, sums, 4 * (row * width + column))


def _broadcast(builder: Any, address: Any, shift: int) -> Any:
    one = instructions.load(builder, builder.add(address, _LONG(shift)), _FLOAT, 4)
    return instructions.broadcast(builder, one, LANES)


def _load(builder: Any, address: Any, shift: int) -> Any:
    return instructions.load(builder, builder.add(address, _LONG(shift)), _VECTOR, 4)


def _store(builder: Any, value: Any, address: Any, shift: int) -> None:
    instructions.store(builder, value, builder.add(address, _LONG(shift)), 4)

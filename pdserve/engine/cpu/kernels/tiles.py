"""The two products of attention with a tile of keys or values, and the softmax between them, in vector instructions.

A lane of a score is one key, so a score is the sum over the dims in order, and needs no sum across lanes. Each sum is
added in one order for any number of queries, so a query's bits are the same alone and in a chunk.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.cpu.kernels import instructions
from pdserve.engine.cpu.kernels.instructions import LANES

# Shapes: W dims of a head, rounded up to whole vectors.

KEYS: Final = 64  # of a tile
GROUP: Final = 16  # keys whose numbers of one dim are contiguous
ROWS: Final = 6  # queries at a time, whose sums are in registers

_SCORE_VECTORS = LANES // 4  # of keys at a time: 4 with 32 registers, 2 with 16
_VALUE_VECTORS = LANES // 4
_I64, _WORD, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_F32_LANES, _I32_LANES = ir.VectorType(_F32, LANES), ir.VectorType(_WORD, LANES)


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
                builder.add(instructions.load(builder, builder.add(keys, _I64(8 * (first + key))), _I64, 8), shift)
                for key in range(LANES)
            ]
            for column in range(0, size, LANES):
                rows = [instructions.load(builder, builder.add(one, _I64(4 * column)), _I32_LANES, 4) for one in at]
                for d, words in enumerate(instructions.transposed(builder, rows)[: size - column]):
                    to = builder.add(out, _I64(4 * (GROUP * (column + d) + first)))
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
            with builder.if_then(builder.icmp_signed("==", rows, _I64(num_rows))):
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
    zeros = [ir.Constant(_F32_LANES, [0.0] * LANES)] * len(places)

    def step(d: Any, held: list[Any]) -> list[Any]:
        at = builder.add(keys, builder.mul(d, _I64(4 * GROUP)))
        loaded = [_load(builder, at, 4 * (group * GROUP * dim + lane)) for group, lane in starts]
        query_at = builder.add(queries, builder.mul(d, _I64(4)))
        every = [_broadcast(builder, query_at, 4 * width * row) for row in range(num_rows)]
        return [
            instructions.fused_or_not(builder, every[row], loaded[vector - first], one)
            for (row, vector), one in zip(places, held, strict=True)
        ]

    for (row, vector), total in zip(places, instructions.repeat(builder, _I64(dim), zeros, step), strict=True):
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
            with builder.if_then(builder.icmp_signed("==", rows, _I64(num_rows))):
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
        value_at = instructions.load(builder, builder.add(values, builder.mul(c, _I64(8))), _I64, 8)
        weight_at = builder.add(weights, builder.mul(c, _I64(4)))
        loaded = {column: _load(builder, value_at, 4 * column) for column in columns}
        every = [_broadcast(builder, weight_at, 4 * KEYS * row) for row in range(num_rows)]
        return [
            instructions.fused_or_not(builder, every[row], loaded[column], one)
            for (row, column), one in zip(places, held, strict=True)
        ]

    for (row, column), total in zip(places, instructions.repeat(builder, count, starts, step), strict=True):
        _store(builder, total, sums, 4 * (row * width + column))


def _broadcast(builder: Any, address: Any, shift: int) -> Any:
    one = instructions.load(builder, builder.add(address, _I64(shift)), _F32, 4)
    return instructions.broadcast(builder, one, LANES)


def _load(builder: Any, address: Any, shift: int) -> Any:
    return instructions.load(builder, builder.add(address, _I64(shift)), _F32_LANES, 4)


def _store(builder: Any, value: Any, address: Any, shift: int) -> None:
    instructions.store(builder, value, builder.add(address, _I64(shift)), 4)


# --- softmax --------------------------------------------------------------------------------------------------
# Replaces the scores of one query by weights. Scores are powers of 2. Lanes are added in one order, so a query's bits
# do not depend on others.

UNSEEN: Final = -1e30  # the score of a key that a query does not see

_LEAST: Final = -126.0  # below it 2^x is not a normal float32
_ROUNDER: Final = 1.5 * 2**23  # x + this - this is x rounded to an integer, for any CPU
_TERMS: Final = 6  # of 2^f by Taylor's series: exact to a unit in the last place for |f| <= 1/2
_EXACT: Final = ("contract",)  # a flag of its own keeps fast math from changing the order


@intrinsic
def softmax(_context: Any, scores: Any, first: Any, end: Any, most: Any, total: Any, factor: Any) -> Any:
    """Replaces the scores of KEYS keys by their weights relative to the largest score so far, which is at `most`.

    The query sees the keys from `first` to before `end`; the others have weight 0. Stores in `factor` what earlier sums
    must be multiplied with, since the largest score has changed. Updates `most`, and `total`, the sum of the weights.
    All but `first` and `end` are addresses.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores, first, end, most, total, factor = args
        places = [builder.add(scores, _I64(4 * key)) for key in range(0, KEYS, LANES)]
        limits = [instructions.broadcast(builder, builder.trunc(one, _WORD), LANES) for one in (first, end)]
        seen = [_seen(builder, key, *limits) for key in range(0, KEYS, LANES)]
        found = [
            builder.select(is_seen, instructions.load(builder, at, _F32_LANES, 4), _every(UNSEEN))
            for is_seen, at in zip(seen, places, strict=True)
        ]
        old = instructions.load(builder, most, _F32, 4)
        every_old = instructions.broadcast(builder, old, LANES)
        new = _over_lanes(builder, reduce(lambda a, b: _larger(builder, a, b), [every_old, *found]), _larger)
        weights = [
            builder.select(is_seen, _exp2(builder, builder.fsub(score, new, flags=_EXACT)), _every(0.0))
            for is_seen, score in zip(seen, found, strict=True)
        ]
        for at, weight in zip(places, weights, strict=True):
            instructions.store(builder, weight, at, 4)
        added = _over_lanes(builder, reduce(lambda a, b: _add(builder, a, b), weights), _add)
        shrink = _exp2(builder, builder.fsub(every_old, new, flags=_EXACT))
        held = instructions.broadcast(builder, instructions.load(builder, total, _F32, 4), LANES)
        held = _add(builder, builder.fmul(held, shrink, flags=_EXACT), added)
        for value, at in ((new, most), (held, total), (shrink, factor)):
            instructions.store(builder, builder.extract_element(value, _WORD(0)), at, 4)
        return context.get_dummy_value()

    return types.none(*([types.int64] * 6)), generate


def _seen(builder: Any, key: int, first: Any, end: Any) -> Any:
    here = ir.Constant(_I32_LANES, [key + lane for lane in range(LANES)])
    return builder.and_(builder.icmp_signed(">=", here, first), builder.icmp_signed("<", here, end))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Ignores NaN in `b`."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=_EXACT)


def _over_lanes(builder: Any, vector: Any, join: Any) -> Any:
    """`join` of all lanes, in each lane."""
    width = LANES // 2
    while width:
        lanes = ir.Constant(_I32_LANES, [lane ^ width for lane in range(LANES)])
        vector = join(builder, vector, builder.shuffle_vector(vector, vector, lanes))
        width //= 2
    return vector


def _every(value: float) -> Any:
    return ir.Constant(_F32_LANES, [value] * LANES)


def _exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0; NaN of NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, _every(_LEAST)), _every(_LEAST), x)
    shifted = builder.fadd(x, _every(_ROUNDER), flags=_EXACT)
    rest = builder.fsub(x, builder.fsub(shifted, _every(_ROUNDER), flags=_EXACT), flags=_EXACT)
    coefficients = [math.log(2) ** k / math.factorial(k) for k in range(_TERMS, -1, -1)]
    series = _every(coefficients[0])
    for one in coefficients[1:]:
        series = instructions.fused_or_not(builder, series, rest, _every(one))
    bias = ir.Constant(
        _I32_LANES, [127 - (0x4B400000)] * LANES
    )  # of a float32's exponent, less the bits of the rounder
    exponent = builder.shl(
        builder.add(builder.bitcast(shifted, _I32_LANES), bias), ir.Constant(_I32_LANES, [23] * LANES)
    )
    return builder.fmul(series, builder.bitcast(exponent, _F32_LANES), flags=_EXACT)

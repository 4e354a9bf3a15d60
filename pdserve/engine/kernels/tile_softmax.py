"""What lies between the two products of a tile of keys: the weights of one query, in vector instructions.

Scores are powers of 2. Lanes are added in one order, so a query's bits do not depend on others.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.kernels import instructions
from pdserve.engine.kernels.instructions import LANES
from pdserve.engine.kernels.tiles import KEYS

UNSEEN: Final = -1e30  # the score of a key that a query does not see

_LEAST: Final = -126.0  # below it 2^x is not a normal float32
_ROUNDER: Final = 1.5 * 2**23  # x + this - this is x rounded to an integer, for any CPU
_TERMS: Final = 6  # of 2^f by Taylor's series: exact to a unit in the last place for |f| <= 1/2
_EXACT: Final = ("contract",)  # a flag of its own keeps fast math from changing the order
_LONG, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VECTOR, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)


@intrinsic
def softmax(_context: Any, scores: Any, first: Any, end: Any, most: Any, total: Any, factor: Any) -> Any:
    """Replaces the scores of KEYS keys by their weights relative to the largest score so far, which is at `most`.

    The query sees the keys from `first` to before `end`; the others have weight 0. Stores in `factor` what earlier sums
    must be multiplied with, since the largest score has changed. Updates `most`, and `total`, the sum of the weights.
    All but `first` and `end` are addresses.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores, first, end, most, total, factor = args
        places = [builder.add(scores, _LONG(4 * key)) for key in range(0, KEYS, LANES)]
        limits = [instructions.broadcast(builder, builder.trunc(one, _WORD), LANES) for one in (first, end)]
        seen = [_seen(builder, key, *limits) for key in range(0, KEYS, LANES)]
        found = [
            builder.select(is_seen, instructions.load(builder, at, _VECTOR, 4), _every(UNSEEN))
            for is_seen, at in zip(seen, places, strict=True)
        ]
        old = instructions.load(builder, most, _FLOAT, 4)
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
        held = instructions.broadcast(builder, instructions.load(builder, total, _FLOAT, 4), LANES)
        held = _add(builder, builder.fmul(held, shrink, flags=_EXACT), added)
        for value, at in ((new, most), (held, total), (shrink, factor)):
            instructions.store(builder, builder.extract_element(value, _WORD(0)), at, 4)
        return context.get_dummy_value()

    return types.none(*([types.int64] * 6)), generate


def _seen(builder: Any, key: int, first: Any, end: Any) -> Any:
    here = ir.Constant(_WORDS, [key + lane for lane in range(LANES)])
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
        lanes = ir.Constant(_WORDS, [lane ^ width for lane in range(LANES)])
        vector = join(builder, vector, builder.shuffle_vector(vector, vector, lanes))
        width //= 2
    return vector


def _every(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0; NaN of NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, _every(_LEAST)), _every(_LEAST), x)
    shifted = builder.fadd(x, _every(_ROUNDER), flags=_EXACT)
    rest = builder.fsub(x, builder.fsub(shifted, _every(_ROUNDER), flags=_EXACT), flags=_EXACT)
    coefficients = [math.log(2) ** k / math.factorial(k) for k in range(_TERMS, -1, -1)]
    series = _every(coefficients[0])
    for one in coefficients[1:]:
        series = instructions.fused_or_not(builder, series, rest, _every(one))
    bias = ir.Constant(_WORDS, [127 - (0x4B400000)] * LANES)  # of a float32's exponent, less the bits of the rounder
    exponent = builder.shl(builder.add(builder.bitcast(shifted, _WORDS), bias), ir.Constant(_WORDS, [23] * LANES))
    return builder.fmul(series, builder.bitcast(exponent, _VECTOR), flags=_EXACT)

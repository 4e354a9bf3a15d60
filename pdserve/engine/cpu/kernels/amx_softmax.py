"""What lies between the two products of attention in tiles: weights of 64 keys for 16 queries, in vector instructions.

A vector has a number for each of 16 queries. Keys are added in a fixed order, so a query's bits do
not depend on the others.
"""

# Shapes: 16 queries, 64 keys of a tile, D head dim.

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.cpu.kernels import instructions
from pdserve.engine.cpu.kernels.amx import ROW_BYTES, ROWS, TILE_BYTES

KEYS: Final = 64
STEP_KEYS: Final = 32  # of one tile of weights

_TERMS: Final = 5  # of 2^f by Taylor's series: for |f| <= 1/2 the error is 3e-6
_UNSEEN: Final = -1e30
_SLACK: Final = 8.0  # in powers of 2
_CHAINS: Final = 4  # of operations that each wait for the one before
_LONG, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, ROWS), ir.VectorType(_FLOAT, ROWS)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * ROWS)
_EXACT: Final = ("contract",)  # a flag of its own keeps fast math from changing the order


@intrinsic
def softmax(
    _context: Any, is_masked: Any, scores: Any, out: Any, maxima: Any, sums: Any, factors: Any, limits: Any, key: Any
) -> Any:
    """Replaces the scores of 64 keys, [64, 16] in float32, by their weights relative to a score of each query.

    That score, in `maxima` [16], becomes the largest so far if this is more than 2^8 times as likely. Until then,
    weights may be larger than 1. Stores the weights in bfloat16 as [2, 16, 32]: tiles of 32 keys. Updates `sums` [16],
    and stores in `factors` [16] what earlier sums and values must be multiplied with. `limits` [2, 16] are the first
    and the last key that each query sees, int32, compared with `key` and those after it if the literal `is_masked` is
    1. All but `is_masked` and `key` are addresses. Returns a number other than 0 if a factor is not 1.
    """
    if not isinstance(is_masked, types.IntegerLiteral):
        return None
    has_mask = bool(is_masked.literal_value)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, scores, out, maxima, sums, factors, limits, key = args
        unseen, zero = _every(_UNSEEN), _every(0.0)
        old = instructions.load(builder, maxima, _FLOATS, 4)
        first = instructions.load(builder, limits, _WORDS, 4)
        last = instructions.load(builder, builder.add(limits, _LONG(ROW_BYTES)), _WORDS, 4)

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def find(turn: Any, held: list[Any]) -> list[Any]:
            found = []
            for chain, most in enumerate(held):
                index = builder.add(builder.mul(turn, _LONG(_CHAINS)), _LONG(chain))
                at = builder.add(scores, builder.mul(index, _LONG(ROW_BYTES)))
                score = instructions.load(builder, at, _FLOATS, 4)
                if has_mask:
                    here = instructions.broadcast(builder, builder.trunc(builder.add(key, index), _WORD), ROWS)
                    after, before = builder.icmp_signed(">=", here, first), builder.icmp_signed("<=", here, last)
                    score = builder.select(builder.and_(after, before), score, unseen)
                    instructions.store(builder, score, at, 4)
                found.append(larger(score, most))
            return found

        new = reduce(larger, instructions.repeat(builder, _LONG(KEYS // _CHAINS), [unseen] * _CHAINS, find))
        is_beyond = builder.fcmp_ordered(">", new, builder.fadd(old, _every(_SLACK), flags=_EXACT))
        most = builder.select(is_beyond, new, old)
        factor = _exp2(builder, builder.fsub(old, most, flags=_EXACT))
        totals = [zero] * _CHAINS
        for step in range(KEYS // STEP_KEYS):
            pairs = []
            for pair in range(STEP_KEYS // 2):
                weights = []
                for half in range(2):
                    at = builder.add(scores, _LONG((step * STEP_KEYS + 2 * pair + half) * ROW_BYTES))
                    score = instructions.load(builder, at, _FLOATS, 4)
                    weight = _exp2(builder, builder.fsub(score, most, flags=_EXACT))
                    if has_mask:
                        weight = builder.select(builder.fcmp_ordered("==", score, unseen), zero, weight)
                    chain = (2 * pair + half) % _CHAINS
                    totals[chain] = builder.fadd(totals[chain], weight, flags=_EXACT)
                    weights.append(weight)
                pairs.append(_pair(builder, *weights))
            for query, row in enumerate(instructions.transposed(builder, pairs)):
                instructions.store(builder, row, builder.add(out, _LONG(step * TILE_BYTES + query * ROW_BYTES)), 4)
        total = reduce(lambda a, b: builder.fadd(a, b, flags=_EXACT), totals)
        held = instructions.load(builder, sums, _FLOATS, 4)
        instructions.store(builder, instructions.fused(builder, held, factor, total), sums, 4)
        instructions.store(builder, most, maxima, 4)
        instructions.store(builder, factor, factors, 4)
        return builder.zext(builder.bitcast(is_beyond, ir.IntType(ROWS)), _LONG)

    return types.int64(is_masked, *([types.int64] * 7)), generate


def _every(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * ROWS)


def _exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0; 0 where it is smaller than any float32."""
    rint = builder.module.declare_intrinsic("llvm.rint.v16f32", fnty=ir.FunctionType(_FLOATS, [_FLOATS]))
    whole = builder.call(rint, [x])
    rest = builder.fsub(x, whole, flags=_EXACT)
    coefficients = [math.log(2) ** k / math.factorial(k) for k in range(_TERMS, -1, -1)]
    series = _every(coefficients[0])
    for one in coefficients[1:]:
        series = instructions.fused(builder, series, rest, _every(one))
    return _power(builder, series, whole)


def _power(builder: Any, series: Any, whole: Any) -> Any:
    """series * 2^whole."""
    of = ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS])
    return builder.call(ir.InlineAsm(of, "vscalefps $2, $1, $0", "=v,v,v"), [series, whole])


def _joined_bfloat16(builder: Any, low: Any, high: Any) -> Any:
    """Two float32 vectors in bfloat16, one after the other."""
    of = ir.FunctionType(_SHORTS, [_FLOATS, _FLOATS])
    return builder.call(ir.InlineAsm(of, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v"), [low, high])


def _pair(builder: Any, low: Any, high: Any) -> Any:
    """Two float32 vectors in bfloat16: each lane of 32 bits has one value of either."""
    both = _joined_bfloat16(builder, low, high)
    lanes = [lane for i in range(ROWS) for lane in (i, ROWS + i)]
    mask = ir.Constant(ir.VectorType(_WORD, 2 * ROWS), lanes)
    return builder.bitcast(builder.shuffle_vector(both, both, mask), _WORDS)

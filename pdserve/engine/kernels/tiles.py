"""The two products of attention with a tile of keys or values, in vector instructions.

A sum is added in one order for any number of queries, so a query's bits are the same alone and in a chunk. A scalar
product is added in `LANES` partial sums, and these by halves.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.kernels import instructions
from pdserve.engine.kernels.instructions import LANES

ROWS: Final = 4  # of `add_values` at a time

_COLUMNS = LANES // 4  # vectors of a row in registers, in `add_values`
_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_PART = 4  # lanes within which an instruction moves values cheaply


@intrinsic
def scores(_context: Any, width: Any, query: Any, keys: Any, stride: Any, out: Any) -> Any:
    """out[i] = query . keys[i] for the next LANES keys. All but `width`, a literal multiple of LANES, are addresses, or
    bytes from one key to the next."""
    if not isinstance(width, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, query, keys, stride, out = args
        at = [builder.add(keys, builder.mul(stride, _LONG(key))) for key in range(LANES)]
        sums: list[Any] = [None] * LANES
        for column in range(0, width.literal_value, LANES):
            part = _load(builder, query, 4 * column)
            for key in range(LANES):
                values = _load(builder, at[key], 4 * column)
                first = sums[key] is None
                sums[key] = builder.fmul(part, values) if first else _add_product(builder, part, values, sums[key])
        _store(builder, _add_lanes(builder, sums), out, 0)
        return context.get_dummy_value()

    return types.none(width, *([types.int64] * 4)), generate


def _add_lanes(builder: Any, vectors: list[Any]) -> Any:
    """A vector of the sums of the vectors' lanes. Halves of two vectors are added in one addition."""
    of = [[key] * LANES for key in range(LANES)]  # the vector whose values a lane has
    half = LANES // 2
    while half:
        block = LANES if half >= _PART else _PART
        low = [
            source * LANES + first + lane
            for first in range(0, LANES, block)
            for source in (0, 1)
            for lane in range(block)
            if lane % (2 * half) < half
        ]
        pairs = range(len(vectors) // 2)
        of = [[(of[i] + of[i + len(pairs)])[lane] for lane in low] for i in pairs]
        vectors = [
            builder.fadd(*(_shuffle(builder, vectors[i], vectors[i + len(pairs)], low, shift) for shift in (0, half)))
            for i in pairs
        ]
        half //= 2
    [vector], [lanes] = vectors, of
    return _shuffle(builder, vector, vector, [lanes.index(key) for key in range(LANES)], 0)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int], shift: int) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane + shift for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def add_values(
    _context: Any,
    width: Any,
    rows: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    stride: Any,
    count: Any,
    sums: Any,
) -> Any:
    """sums[r] += weights[r, c] * values[c] for c = 0 .. count - 1, in order, for up to ROWS rows of `width` columns.

    `width` is a literal multiple of LANES. Sums are contiguous. The others are addresses, numbers, and strides in
    bytes.
    """
    if not isinstance(width, types.IntegerLiteral):
        return None
    size = width.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, rows, *others = args
        for num_rows in range(1, ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", rows, _LONG(num_rows))):
                for first in range(0, size, _COLUMNS * LANES):
                    columns = range(first, min(first + _COLUMNS * LANES, size), LANES)
                    _add_tile(builder, size, [(row, column) for row in range(num_rows) for column in columns], *others)
        return context.get_dummy_value()

    return types.none(width, *([types.int64] * 7)), generate


def _add_tile(
    builder: Any,
    width: int,
    places: list[tuple[int, int]],
    weights: Any,
    weight_stride: Any,
    values: Any,
    stride: Any,
    count: Any,
    sums: Any,
) -> None:
    """`add_values` of the given rows and columns, which are held in registers."""
    starts = [_load(builder, sums, 4 * (row * width + column)) for row, column in places]
    before, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    c, held = builder.phi(_LONG), [builder.phi(_VECTOR) for _ in places]
    value_at, weight_at = builder.add(values, builder.mul(c, stride)), builder.add(weights, builder.mul(c, _LONG(4)))
    loaded = {column: _load(builder, value_at, 4 * column) for column in sorted({column for _, column in places})}
    every = {}
    for row in sorted({row for row, _ in places}):
        at = builder.add(weight_at, builder.mul(weight_stride, _LONG(row)))
        one = builder.load(builder.inttoptr(at, _FLOAT.as_pointer()))
        every[row] = instructions.broadcast(builder, one, LANES)
    added = [
        _add_product(builder, every[row], loaded[column], one) for (row, column), one in zip(places, held, strict=True)
    ]
    following = builder.add(c, _LONG(1))
    for phi, initial, changed in zip((c, *held), (_LONG(0), *starts), (following, *added), strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(changed, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    for (row, column), new in zip(places, added, strict=True):
        _store(builder, new, sums, 4 * (row * width + column))


def _add_product(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c. Without fused instructions in two steps, because LLVM would call a function for each lane.

    numba adds the flags of fastmath to each operation that has no flag. LLVM could then change the order of additions,
    and a position would have other bits in another batch. `contract` prevents that; it allows only fused products.
    """
    if "+fma" in instructions.FEATURES:
        return instructions.fused(builder, a, b, c)
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _load(builder: Any, address: Any, shift: int) -> Any:
    value = builder.load(_at(builder, address, shift))
    value.align = 4
    return value


def _store(builder: Any, value: Any, address: Any, shift: int) -> None:
    builder.store(value, _at(builder, address, shift)).align = 4


def _at(builder: Any, address: Any, shift: int) -> Any:
    return builder.inttoptr(builder.add(address, _LONG(shift)), _VECTOR.as_pointer())

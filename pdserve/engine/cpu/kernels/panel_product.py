"""The inner loop of packed_gemm.py: a panel of 64 outputs times a few rows, in vector instructions.

Its sums stay in registers, so the rows and outputs of a loop are as many as the registers hold: with AVX-512 all
outputs of six rows, with AVX2 half of them of three rows. An output is added in the same order in either.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from pdserve.engine.cpu.kernels import instructions
from pdserve.engine.cpu.kernels.instructions import LANES

PANEL: Final = 64  # outputs
FLOAT32, BFLOAT16, INT8, WIDENED = range(4)  # kinds of weights; WIDENED: bfloat16, multiplied in float32
MOST_ROWS: Final = 6

_LINE = 64
_FUSED: Final = {BFLOAT16: "vdpbf16ps", INT8: "vpdpbusd"}
_VECTORS = PANEL // LANES
_HELD = 24 if LANES == 16 else 12  # sums in registers, of 32 or 16


Tile = list[tuple[int, int]]  # pairs of a row and a vector of the panel


def register_tiles(num_rows: int) -> list[Tile]:
    """All pairs of a row and a vector of the panel, divided into loops whose sums the registers hold."""
    rows, parts = list(range(num_rows)), list(range(_VECTORS))
    if num_rows * _VECTORS > _HELD:
        num_groups = -(-num_rows * (_VECTORS // 2) // _HELD)
        groups = [rows[i * num_rows // num_groups : (i + 1) * num_rows // num_groups] for i in range(num_groups)]
        halves = [parts[: _VECTORS // 2], parts[_VECTORS // 2 :]]
    else:
        groups, halves = [rows], [parts]
    return [[(row, part) for row in group for part in half] for group in groups for half in halves]


@intrinsic
def _multiply(
    _context: Any,
    kind: Any,
    rows: Any,
    w: Any,
    x: Any,
    x_stride: Any,
    sums: Any,
    count: Any,
    is_first: Any,
    ahead: Any,
    step: Any,
) -> Any:
    """`multiply`, with literals for `kind` and `rows`."""
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(kind, types.IntegerLiteral):
        return None

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for index, tile in enumerate(register_tiles(rows.literal_value)):
            _add_tile(builder, kind.literal_value, tile, args[2:], has_prefetch=index == 0)
        return _context.get_dummy_value()

    return types.none(kind, rows, *([types.int64] * 8)), generate


def _add_tile(builder: Any, kind: int, tile: Tile, args: Any, *, has_prefetch: bool) -> None:
    w, x, x_stride, sums, count, is_first, ahead, step = args
    long, word, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8)
    sum_type, in_type = word if kind == INT8 else ir.FloatType(), ir.FloatType() if kind in (FLOAT32, WIDENED) else word
    vector = ir.VectorType(sum_type, LANES)
    w_type = ir.IntType(16) if kind == WIDENED else in_type
    w, x = builder.inttoptr(w, w_type.as_pointer()), builder.inttoptr(x, in_type.as_pointer())
    sums = builder.inttoptr(sums, sum_type.as_pointer())

    def place(base: Any, row: int, part: int, of: Any = vector) -> Any:
        return builder.bitcast(builder.gep(base, [long(row * PANEL + part * LANES)]), of.as_pointer())

    def load(pointer: Any) -> Any:
        value = builder.load(pointer)
        value.align = 4
        return value

    zero = ir.Constant(vector, [0 if sum_type is word else 0.0] * LANES)
    begins = builder.icmp_signed("!=", is_first, long(0))
    starts = [builder.select(begins, zero, load(place(sums, *one))) for one in tile]
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(long)
    k.add_incoming(long(0), entry)
    held = [builder.phi(vector) for _ in tile]
    for value, start in zip(held, starts, strict=True):
        value.add_incoming(start, entry)
    if has_prefetch:
        line = builder.inttoptr(builder.add(ahead, builder.mul(k, step)), byte.as_pointer())
        for offset in (0, _LINE):
            instructions.prefetch(builder, builder.gep(line, [long(offset)]))
    w_k = builder.gep(w, [builder.mul(k, long(PANEL))])
    inputs = {}
    for row in dict.fromkeys(row for row, _ in tile):
        one = builder.load(builder.gep(x, [builder.add(builder.mul(x_stride, long(row)), k)]))
        inputs[row] = instructions.broadcast(builder, one, LANES)
    new_of = {}
    for part in dict.fromkeys(part for _, part in tile):  # so that each needs a register for a short time only
        weights = load(place(w_k, 0, part, ir.VectorType(w_type, LANES)))
        if kind == WIDENED:
            weights = instructions.widen(builder, weights)
        for row, one in inputs.items():
            new_of[row, part] = _fused(builder, kind, held[tile.index((row, part))], one, weights)
    added = [new_of[one] for one in tile]
    following = builder.add(k, long(1))
    k.add_incoming(following, loop)
    for value, new in zip(held, added, strict=True):
        value.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    for one, new in zip(tile, added, strict=True):
        builder.store(new, place(sums, *one)).align = 4


def _fused(builder: Any, kind: int, held: Any, inputs: Any, weights: Any) -> Any:
    """held + inputs * weights, of 4 bytes of inputs and of weights in each lane."""
    if kind in (FLOAT32, WIDENED):
        return instructions.fused(builder, inputs, weights, held)
    if LANES == 16:
        return instructions.accumulate(builder, _FUSED[kind], held, inputs, weights)
    return builder.add(held, instructions.dot_bytes(builder, inputs, weights))


def multiply(
    kind: Any, rows: Any, w: Any, x: Any, x_stride: Any, sums: Any, count: Any, is_first: Any, ahead: Any, step: Any
) -> Any:
    """sums[r, 0:64] += x[r, k] * w[k, 0:64] for k = 0 .. count - 1, in order, for 1 to 6 rows. For kernels.

    `kind` is a literal. An x[r, k] has 4 bytes: V inputs, which are multiplied with V weights of each output. Sums are
    float32, or int32 if the weights are int8. All arguments but counts and flags are addresses. The sums begin at 0 if
    `is_first`. Two cache lines are prefetched with each k, from `ahead` on, `step` bytes further each time; any address
    is harmless.
    """
    raise NotImplementedError


@overload(multiply, prefer_literal=True)
def _multiply_of(
    kind: Any, rows: Any, w: Any, x: Any, x_stride: Any, sums: Any, count: Any, is_first: Any, ahead: Any, step: Any
) -> Any:
    if not isinstance(kind, types.IntegerLiteral):
        return None
    KIND = kind.literal_value

    def implementation(
        kind: Any, rows: Any, w: Any, x: Any, x_stride: Any, sums: Any, count: Any, is_first: Any, ahead: Any, step: Any
    ) -> Any:
        if rows == 1:
            _multiply(KIND, 1, w, x, x_stride, sums, count, is_first, ahead, step)
        elif rows == 2:
            _multiply(KIND, 2, w, x, x_stride, sums, count, is_first, ahead, step)
        elif rows == 3:
            _multiply(KIND, 3, w, x, x_stride, sums, count, is_first, ahead, step)
        elif rows == 4:
            _multiply(KIND, 4, w, x, x_stride, sums, count, is_first, ahead, step)
        elif rows == 5:
            _multiply(KIND, 5, w, x, x_stride, sums, count, is_first, ahead, step)
        else:
            _multiply(KIND, 6, w, x, x_stride, sums, count, is_first, ahead, step)

    return implementation

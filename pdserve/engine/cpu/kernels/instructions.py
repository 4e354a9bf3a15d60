"""Instructions that numba does not offer, for the intrinsics of kernels. `builder` is llvmlite's IRBuilder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import binding, ir

from pdserve.engine.cpu.kernels import jit

binding.initialize_native_asmparser()  # for `accumulate`

FEATURES: Final = frozenset(jit.target()[1].split(","))
LANES: Final = 16 if "+avx512f" in FEATURES else 8  # numbers of 4 bytes in a vector

_QUARTER: Final = 4  # words of 16 bytes, within which an instruction moves words cheaply
_LONG, _WORD = ir.IntType(64), ir.IntType(32)


def repeat(builder: Any, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """held = body(i, held) for i = 0 .. count - 1, at least once."""
    before, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, held = builder.phi(_LONG), [builder.phi(one.type) for one in initial]
    new = body(index, held)
    following = builder.add(index, _LONG(1))
    for phi, start, changed in zip((index, *held), (_LONG(0), *initial), (following, *new), strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(changed, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return new


def each(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """body(i) for i = 0 .. count - 1, at least once."""

    def without_result(index: Any, _held: list[Any]) -> list[Any]:
        body(index)
        return []

    repeat(builder, count, [], without_result)


def load(builder: Any, address: Any, of: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, of.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def stream(builder: Any, value: Any, address: Any, _align: int) -> None:
    """Stores a whole cache line, whose address is a multiple of 64, around the caches."""
    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = 64
    stored.set_metadata("nontemporal", builder.module.add_metadata([_WORD(1)]))


def prefetch(builder: Any, address: Any) -> None:
    """Prefetches the cache line at a pointer to bytes, for reading; any address is harmless."""
    types = [ir.IntType(8).as_pointer(), _WORD, _WORD, _WORD]
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=ir.FunctionType(ir.VoidType(), types))
    builder.call(function, [address, _WORD(0), _WORD(2), _WORD(1)])


def broadcast(builder: Any, one: Any, lanes: int) -> Any:
    """A vector with `one` in each lane."""
    undefined = ir.Constant(ir.VectorType(one.type, lanes), ir.Undefined)
    first = ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(undefined, one, _WORD(0)), undefined, first)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 vectors, rounded once."""
    name, types = f"llvm.fma.v{a.type.count}f32", [a.type] * 3
    function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(a.type, types))
    return builder.call(function, [a, b, c])


def fused_or_not(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 vectors. Without fused instructions in two steps, because LLVM would call a function for
    each lane.

    numba adds the flags of fastmath to each operation that has no flag. LLVM could then change the order of additions,
    and a position would have other bits in another batch. `contract` prevents that; it allows only fused products.
    """
    if "+fma" in FEATURES:
        return fused(builder, a, b, c)
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def accumulate(builder: Any, instruction: str, held: Any, a: Any, b: Any) -> Any:
    """held + the products of `a` and `b`, by an instruction that has no stable name in LLVM."""
    of = ir.FunctionType(held.type, [held.type, a.type, b.type])
    return builder.call(ir.InlineAsm(of, f"{instruction} $3, $2, $0", "=v,0,v,v"), [held, a, b])


def joined(builder: Any, low: Any, high: Any) -> Any:
    """One vector of the lanes of two."""
    lanes = list(range(2 * low.type.count))
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The transpose of N vectors of N words, N = 8 or 16.

    Blocks of four words are transposed within quarters of 16 bytes, then whole quarters are exchanged. Each of these
    shuffles is one instruction without a register for the lanes.
    """
    blocks = [_blocks(builder, rows[first : first + _QUARTER]) for first in range(0, len(rows), _QUARTER)]
    columns: list[Any] = [None] * len(rows)
    for i in range(_QUARTER):
        for quarter, vector in enumerate(_exchanged(builder, [one[i] for one in blocks])):
            columns[quarter * _QUARTER + i] = vector
    return columns


def _blocks(builder: Any, rows: list[Any]) -> list[Any]:
    """Of four vectors: word j of each quarter of vector i is word i of that quarter of vector j."""
    size, found = rows[0].type.count, []

    def pairs(a: Any, b: Any, words: list[int]) -> Any:
        """`words` of each quarter; those from 4 on are of `b`."""
        lanes = [
            first + word if word < _QUARTER else size + first + word - _QUARTER
            for first in range(0, size, _QUARTER)
            for word in words
        ]
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, size), lanes))

    for words in ([0, 4, 1, 5], [2, 6, 3, 7]):
        low, high = pairs(rows[0], rows[1], words), pairs(rows[2], rows[3], words)
        found += [pairs(low, high, [0, 1, 4, 5]), pairs(low, high, [2, 3, 6, 7])]
    return found


def _exchanged(builder: Any, vectors: list[Any]) -> list[Any]:
    """Quarter j of vector i becomes quarter i of vector j, for 2 or 4 vectors of as many quarters."""

    def chosen(two: list[Any], quarters: tuple[int, ...]) -> Any:
        lanes = [_QUARTER * quarter + word for quarter in quarters for word in range(_QUARTER)]
        return builder.shuffle_vector(*two, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))

    if len(vectors) == 2:
        return [chosen(vectors, (0, 2)), chosen(vectors, (1, 3))]
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    halves = [[chosen(two, quarters) for two in (vectors[:2], vectors[2:])] for quarters in (even, odd)]
    return [chosen(halves[quarter % 2], (even, odd)[quarter // 2]) for quarter in range(_QUARTER)]


def widen(builder: Any, words: Any) -> Any:
    """float32 of a vector of bfloat16, as int16."""
    count = words.type.count
    wide = ir.VectorType(_WORD, count)
    shifted = builder.shl(builder.zext(words, wide), ir.Constant(wide, [16] * count))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), count))


def narrow(builder: Any, words: Any) -> Any:
    """bfloat16 as int16 of a vector of float32 as int32, as `bfloat16.narrow` rounds."""
    of = words.type

    def every(value: int) -> Any:
        return ir.Constant(of, [value] * of.count)

    is_odd = builder.and_(builder.lshr(words, every(16)), every(1))
    rounded = builder.lshr(builder.add(builder.add(words, every(0x7FFF)), is_odd), every(16))
    is_nan = builder.icmp_unsigned(">", builder.and_(words, every(0x7FFFFFFF)), every(0x7F800000))
    return builder.trunc(builder.select(is_nan, every(0x7FC0), rounded), ir.VectorType(ir.IntType(16), of.count))


def magnitude(builder: Any, x: Any) -> Any:
    """|x| of a float32 vector."""
    function = builder.module.declare_intrinsic(f"llvm.fabs.v{x.type.count}f32", fnty=ir.FunctionType(x.type, [x.type]))
    return builder.call(function, [x])


def dot_bytes(builder: Any, unsigned: Any, signed: Any) -> Any:
    """In each int32 of AVX2's eight: the scalar product of four uint8 and four int8, whose pairs 16 bits must hold."""
    return add_pairs(builder, multiply_pairs(builder, unsigned, signed))


def multiply_pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """int16 [16]: the products of uint8 and int8 in int32 [8], of which neighbours are added, in AVX2."""
    bytes_, halves = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)
    of = ir.FunctionType(halves, [bytes_, bytes_])
    function = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.ub.sw", fnty=of)
    return builder.call(function, [builder.bitcast(unsigned, bytes_), builder.bitcast(signed, bytes_)])


def add_pairs(builder: Any, halves: Any) -> Any:
    """int32 [8] of the sums of neighbours in int16 [16], in AVX2."""
    of = ir.FunctionType(ir.VectorType(_WORD, 8), [halves.type, halves.type])
    ones = ir.Constant(halves.type, [1] * halves.type.count)
    return builder.call(builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", fnty=of), [halves, ones])

"""Instructions that numba does not offer, for the intrinsics of kernels. `builder` is llvmlite's IRBuilder."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import binding, ir

from pdserve.engine.kernels import jit

binding.initialize_native_asmparser()  # for `accumulate`

FEATURES: Final = frozenset(jit.target()[1].split(","))
LANES: Final = 16 if "+avx512f" in FEATURES else 8  # numbers of 4 bytes in a vector

_WORD = ir.IntType(32)


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


def accumulate(builder: Any, instruction: str, held: Any, a: Any, b: Any) -> Any:
    """held + the products of `a` and `b`, by an instruction that has no stable name in LLVM."""
    of = ir.FunctionType(held.type, [held.type, a.type, b.type])
    return builder.call(ir.InlineAsm(of, f"{instruction} $3, $2, $0", "=v,0,v,v"), [held, a, b])


def widen(builder: Any, words: Any) -> Any:
    """float32 of a vector of bfloat16, as int16."""
    count = words.type.count
    wide = ir.VectorType(_WORD, count)
    shifted = builder.shl(builder.zext(words, wide), ir.Constant(wide, [16] * count))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), count))


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

"""Instructions that numba does not offer, for the intrinsics of kernels. `builder` is llvmlite's IRBuilder."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

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


def magnitude(builder: Any, x: Any) -> Any:
    """|x| of a float32 vector."""
    function = builder.module.declare_intrinsic(f"llvm.fabs.v{x.type.count}f32", fnty=ir.FunctionType(x.type, [x.type]))
    return builder.call(function, [x])

"""AMX in plain vector instructions, so that its kernels are tested on any x86-64 CPU with numba.

    python -m pytest -p tests.support.emulated_tiles tests/unit/engine/test_amx_gemm.py ..

The plugin replaces the tile instructions, and two vector instructions that are not on every CPU, by code that computes
the same normal numbers: products in the order of Intel's manual. The CPU takes smaller numbers for zeros. Tiles are in
memory that all threads share, so kernels run in one thread. Compiled kernels must not be stored with those of the
product, so NUMBA_CACHE_DIR is required. A session that uses no tiles fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from llvmlite import ir

from pdserve.engine.cpu.kernels import amx, amx_softmax, instructions
from pdserve.engine.cpu.kernels import task as openmp

_ROWS: Final = amx.ROWS
_LONG, _WORD, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_WORDS, _FLOATS = ir.VectorType(_WORD, _ROWS), ir.VectorType(ir.FloatType(), _ROWS)
_TILES: Final = "emulated-tiles"

_used: Final[list[str]] = []  # kinds of the kernels that were made


def install() -> None:
    assert os.environ.get("NUMBA_CACHE_DIR"), "kernels of emulated tiles must not be stored with others"
    amx.is_supported.cache_clear()
    amx.is_supported = lambda kind: True  # type: ignore[assignment]
    amx.require = _used.append
    amx._call = _call
    amx_softmax._power = _power
    amx_softmax._joined_bfloat16 = _joined_bfloat16
    openmp.run = lambda kernel, task: kernel(task)  # type: ignore[assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _used:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _call(builder: Any, name: str, *args: Any) -> None:
    """In place of an intrinsic of LLVM."""
    if name in ("ldtilecfg", "tilerelease", "sse.sfence"):
        return
    first, *rest = args
    tile = _address(builder, first.constant)
    if name == "tilezero":
        _each_row(builder, lambda row: instructions.store(builder, _words(0), _at(builder, tile, row), 4))
    elif name in ("tileloadd64", "tileloaddt164", "tilestored64"):
        memory, stride = builder.ptrtoint(rest[0], _LONG), rest[1]

        def copy(row: Any) -> None:
            ends = [builder.add(memory, builder.mul(row, stride)), _at(builder, tile, row)]
            source, target = ends if name != "tilestored64" else reversed(ends)
            instructions.store(builder, instructions.load(builder, source, _WORDS, 1), target, 1)

        _each_row(builder, copy)
    else:
        _multiply(builder, name, tile, *(_address(builder, one.constant) for one in rest))


def _multiply(builder: Any, name: str, sums: Any, inputs: Any, weights: Any) -> None:
    add, zero = {
        "tdpbf16ps": (_add_bfloat16, ir.Constant(_FLOATS, [0.0] * _ROWS)),
        "tdpbusd": (_add_bytes(is_signed=False), _words(0)),
        "tdpbsud": (_add_bytes(is_signed=True), _words(0)),
    }[name]
    is_float = name == "tdpbf16ps"

    def one_row(row: Any) -> None:
        def one_group(group: Any, held: list[Any]) -> list[Any]:
            at = builder.add(_at(builder, inputs, row), builder.mul(group, _LONG(4)))
            word = instructions.broadcast(builder, instructions.load(builder, at, _WORD, 4), _ROWS)
            return add(builder, held, word, instructions.load(builder, _at(builder, weights, group), _WORDS, 4))

        parts = instructions.repeat(builder, _LONG(_ROWS), [zero] * (2 if is_float else 1), one_group)
        at = _at(builder, sums, row)
        if is_float:
            total = builder.fadd(parts[0], parts[1], flags=("contract",))
            held = instructions.load(builder, at, _FLOATS, 4)
            instructions.store(builder, builder.fadd(held, total, flags=("contract",)), at, 4)
        else:
            instructions.store(builder, builder.add(instructions.load(builder, at, _WORDS, 4), parts[0]), at, 4)

    _each_row(builder, one_row)


def _add_bfloat16(builder: Any, held: list[Any], word: Any, words: Any) -> list[Any]:
    """Even and odd inputs have sums of their own."""

    def halves(x: Any) -> list[Any]:
        low, high = builder.shl(x, _words(16)), builder.and_(x, _words(0xFFFF0000))
        return [builder.bitcast(one, _FLOATS) for one in (low, high)]

    return [instructions.fused(builder, a, b, c) for a, b, c in zip(halves(word), halves(words), held, strict=True)]


def _add_bytes(*, is_signed: bool) -> Callable[..., list[Any]]:
    """Inputs are signed or weights are, but not both."""

    def add(builder: Any, held: list[Any], word: Any, words: Any) -> list[Any]:
        [total] = held
        for byte in range(4):
            a, b = (builder.shl(x, _words(24 - 8 * byte)) for x in (word, words))
            a = (builder.ashr if is_signed else builder.lshr)(a, _words(24))
            b = (builder.lshr if is_signed else builder.ashr)(b, _words(24))
            total = builder.add(total, builder.mul(a, b))
        return [total]

    return add


def _power(builder: Any, series: Any, whole: Any) -> Any:
    """series * 2^whole for whole <= 0, or 0 where it is smaller than any normal float32."""
    least = ir.Constant(_FLOATS, [-126.0] * _ROWS)
    is_small = builder.fcmp_ordered("<", whole, least)
    exponent = builder.fptosi(builder.select(is_small, least, whole), _WORDS)
    factor = builder.bitcast(builder.shl(builder.add(exponent, _words(127)), _words(23)), _FLOATS)
    product = builder.fmul(series, factor, flags=("contract",))
    return builder.select(is_small, ir.Constant(_FLOATS, [0.0] * _ROWS), product)


def _joined_bfloat16(builder: Any, low: Any, high: Any) -> Any:
    rounded = [instructions.narrow(builder, builder.bitcast(one, _WORDS)) for one in (low, high)]
    return instructions.joined(builder, *rounded)


def _address(builder: Any, tile: int) -> Any:
    module = builder.module
    if _TILES not in module.globals:
        size = ir.ArrayType(_BYTE, 8 * amx.TILE_BYTES)
        memory = ir.GlobalVariable(module, size, _TILES)
        memory.linkage, memory.initializer, memory.align = "internal", ir.Constant(size, None), 64
    return builder.add(builder.ptrtoint(module.globals[_TILES], _LONG), _LONG(tile * amx.TILE_BYTES))


def _at(builder: Any, tile: Any, row: Any) -> Any:
    return builder.add(tile, builder.mul(row, _LONG(amx.ROW_BYTES)))


def _each_row(builder: Any, body: Callable[[Any], None]) -> None:
    instructions.each(builder, _LONG(_ROWS), body)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [int(np.int32(np.uint32(value)))] * _ROWS)


install()

"""The tile instructions of AMX, for the intrinsics of kernels. `builder` is llvmlite's IRBuilder.

A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of inputs, whose rows are tokens, with a
tile of weights, whose rows are groups of inputs and whose columns are 16 outputs, and adds the products to a tile of
sums. A kernel calls `configure` before its first tile instruction, and `release` after its last one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.cpu.kernels.instructions import FEATURES
from pdserve.engine.cpu.kernels.jit import inlined

ROWS: Final = 16
ROW_BYTES: Final = 64
TILE_BYTES: Final = ROWS * ROW_BYTES
PRODUCT: Final = {"bfloat16": "tdpbf16ps", "int8": "tdpbusd"}  # of inputs and weights; int8 inputs are uint8

_NEEDED: Final = {"bfloat16": {"+amx-tile", "+amx-bf16", "+avx512bf16"}, "int8": {"+amx-tile", "+amx-int8"}}
_NUM_TILES = 8
_BYTE, _LONG = ir.IntType(8), ir.IntType(64)


@cache
def is_supported(kind: str) -> bool:
    """Whether this CPU, numba's target and the operating system permit tiles of bfloat16 or int8."""
    is_compiled = "+avx512f" in FEATURES and _NEEDED[kind] <= FEATURES
    return is_compiled and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def require(kind: str) -> None:
    """Asks the operating system for the tiles. Without that, a kernel that uses them would end the process."""
    if not is_supported(kind):
        raise RuntimeError(f"tiles of {kind} need a CPU with AMX, and numba and an operating system that permit it")


def _configuration() -> bytes:
    """Palette 1, and for each tile the bytes of a row and the number of rows, at the offsets that LDTILECFG reads."""
    whole = np.zeros(64, np.uint8)
    whole[0] = 1
    whole[16 : 16 + 2 * _NUM_TILES].view(np.uint16)[:] = ROW_BYTES
    whole[48 : 48 + _NUM_TILES] = ROWS
    return whole.tobytes()


@intrinsic
def configure(_context: Any) -> Any:
    """Makes this thread's tiles 16 rows of 64 bytes."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        whole = context.insert_const_bytes(builder.module, _configuration(), "amx-configuration")
        _call(builder, "ldtilecfg", builder.bitcast(whole, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def release(_context: Any) -> Any:
    """Clears this thread's tiles, so that the operating system need not store them, and completes streamed stores."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        _call(builder, "sse.sfence")
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), generate


@inlined
def aligned(address: Any) -> Any:
    """The first address from this one on at which a row of a tile is one cache line."""
    return (np.int64(address) + ROW_BYTES - 1) // ROW_BYTES * ROW_BYTES


def load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Loads 16 rows, which are `stride` bytes apart, into a tile register."""
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(address, _BYTE.as_pointer()), stride)


def load_once(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """The same for rows that will not be needed soon: they do not displace others from the nearest cache."""
    _call(builder, "tileloaddt164", _BYTE(tile), builder.inttoptr(address, _BYTE.as_pointer()), stride)


def store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _call(builder, "tilestored64", _BYTE(tile), builder.inttoptr(address, _BYTE.as_pointer()), stride)


def clear(builder: Any, tile: int) -> None:
    _call(builder, "tilezero", _BYTE(tile))


def multiply(builder: Any, instruction: str, sums: int, inputs: int, weights: int) -> None:
    """Adds the products of two tile registers to a third."""
    _call(builder, instruction, *(_BYTE(tile) for tile in (sums, inputs, weights)))


def _call(builder: Any, name: str, *args: Any) -> None:
    of = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=of), args)

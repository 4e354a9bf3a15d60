"""The machine code of kvtransfer.devices.fused: imported only where numba is installed.

The numbers and the order of the steps are those of XXH3's specification for inputs over 240 bytes, seed 0.
"""

from __future__ import annotations

import platform
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

KIB: Final = 1024
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPE: Final = 64
_NUM_STRIPES: Final = KIB // _STRIPE
_SCRAMBLE_AT: Final = len(_SECRET) - _STRIPE
_LAST_AT: Final = _SCRAMBLE_AT - 7  # for the input's last stripe
_MERGE_AT: Final = 11
_PRIME32_1: Final = 0x9E3779B1
_PRIME64_1: Final = np.uint64(0x9E3779B185EBCA87)
_MIX: Final = np.uint64(0x165667919E3779F9)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_FINAL: Final = np.uint64(37)
_IS_X86: Final = platform.machine() in ("x86_64", "AMD64")

_WORD: Final = ir.IntType(64)
_LANES: Final = ir.VectorType(_WORD, 8)
_SWAP: Final = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _all(value: int) -> Any:
    return ir.Constant(_LANES, [value] * 8)


def _key(at: int) -> Any:
    """Eight words of the secret, from byte `at` on."""
    return ir.Constant(_LANES, [int.from_bytes(_SECRET[at + 8 * i : at + 8 * i + 8], "little") for i in range(8)])


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_WORD, offset)), _LANES.as_pointer())


def _copy_kib(builder: Any, args: Any, *, is_end: bool) -> None:
    """Copies one KiB from `source` to `to` and adds it to the lanes. The input's last KiB ends with a special
    stripe."""
    to, source, lanes_at = args
    lanes_ptr = _at(builder, lanes_at, 0)
    lanes = builder.load(lanes_ptr, align=8)
    past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    for stripe in range(_NUM_STRIPES):
        key_at = _LAST_AT if is_end and stripe == _NUM_STRIPES - 1 else 8 * stripe
        data = builder.load(_at(builder, source, _STRIPE * stripe), align=1)
        stored = builder.store(data, _at(builder, to, _STRIPE * stripe), align=_STRIPE)
        stored.set_metadata("nontemporal", past_caches)
        mixed = builder.xor(data, _key(key_at))
        product = builder.mul(builder.and_(mixed, _all(0xFFFFFFFF)), builder.lshr(mixed, _all(32)))
        lanes = builder.add(builder.add(lanes, builder.shuffle_vector(data, data, _SWAP)), product)
    if not is_end:
        lanes = builder.xor(builder.xor(lanes, builder.lshr(lanes, _all(47))), _key(_SCRAMBLE_AT))
        lanes = builder.mul(lanes, _all(_PRIME32_1))
    builder.store(lanes, lanes_ptr, align=8)


_SIGNATURE: Final = types.void(types.intp, types.intp, types.intp)


@intrinsic  # type: ignore[untyped-decorator]
def _full_kib(typing: Any, to: Any, source: Any, lanes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _copy_kib(builder, args, is_end=False)
        return context.get_dummy_value()

    return _SIGNATURE, generate


@intrinsic  # type: ignore[untyped-decorator]
def _last_kib(typing: Any, to: Any, source: Any, lanes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _copy_kib(builder, args, is_end=True)
        return context.get_dummy_value()

    return _SIGNATURE, generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing: Any) -> Any:
    """Makes stores that bypassed the caches visible to every reader, before any reader is notified."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:  # whose ordinary locks do not wait for such stores
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        else:  # pragma: no cover - other processors
            builder.fence("release")
        return context.get_dummy_value()

    return types.void(), generate


_MERGE_KEYS: Final = np.array(
    [int.from_bytes(_SECRET[_MERGE_AT + 8 * i : _MERGE_AT + 8 * i + 8], "little") for i in range(8)], np.uint64
)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _folded(one: Any, other: Any) -> Any:  # pragma: no cover - runs as machine code
    """Both halves of the 128-bit product, xored."""
    low, high = one & _LOW, one >> _HALF
    other_low, other_high = other & _LOW, other >> _HALF
    cross = (low * other_low >> _HALF) + (high * other_low & _LOW) + low * other_high
    upper = (high * other_low >> _HALF) + (cross >> _HALF) + high * other_high
    return (one * other) ^ upper


def _copy_runs(  # pragma: no cover - runs as machine code
    to: Any, source: Any, run_bytes: int, lanes: Any, lanes_at: int
) -> Any:
    last, num_kib = to.shape[0] - 1, run_bytes // KIB
    for run in range(last + 1):
        for kib in range(num_kib):
            at = kib * KIB
            if run == last and kib == num_kib - 1:
                _last_kib(to[run] + at, source[run] + at, lanes_at)
            else:
                _full_kib(to[run] + at, source[run] + at, lanes_at)
    _fence()
    total = np.uint64(to.shape[0] * run_bytes) * _PRIME64_1
    for pair in range(4):
        total += _folded(lanes[2 * pair] ^ _MERGE_KEYS[2 * pair], lanes[2 * pair + 1] ^ _MERGE_KEYS[2 * pair + 1])
    total = (total ^ (total >> _FINAL)) * _MIX
    return total ^ (total >> _HALF)


_ADDRESSES: Final = types.Array(types.int64, 1, "C")
_WORDS: Final = types.Array(types.uint64, 1, "C")
_OPTIONS: Final = {"nogil": True, "boundscheck": False}
_TYPES: Final = types.uint64(_ADDRESSES, _ADDRESSES, types.intp, _WORDS, types.intp)
try:
    copy_runs = njit(_TYPES, cache=True, **_OPTIONS)(_copy_runs)
except RuntimeError:  # the machine code cannot be stored, so it is compiled at each start
    copy_runs = njit(_TYPES, **_OPTIONS)(_copy_runs)

"""The machine code of kvtransfer.fused: imported only where numba is installed."""

from __future__ import annotations

import platform
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

KIB: Final = 1024
_STRIPE: Final = 64
_NUM_STRIPES: Final = KIB // _STRIPE
_SCRAMBLE_AT: Final = 128  # of the secret
_LAST_AT: Final = 121
_PRIME32_1: Final = 0x9E3779B1
_IS_X86: Final = platform.machine() in ("x86_64", "AMD64")

_WORD: Final = ir.IntType(64)
_LANES: Final = ir.VectorType(_WORD, 8)
_SWAP: Final = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _all(value: int) -> Any:
    return ir.Constant(_LANES, [value] * 8)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_WORD, offset)), _LANES.as_pointer())


def _copy_kib(builder: Any, args: Any, *, is_end: bool) -> None:
    """One KiB from `source` to `to`, and into the lanes. The input's last KiB ends with a stripe of its own kind."""
    to, source, lanes_at, secret = args
    lanes_ptr = _at(builder, lanes_at, 0)
    lanes = builder.load(lanes_ptr, align=8)
    past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    for stripe in range(_NUM_STRIPES):
        key_at = _LAST_AT if is_end and stripe == _NUM_STRIPES - 1 else 8 * stripe
        data = builder.load(_at(builder, source, _STRIPE * stripe), align=1)
        stored = builder.store(data, _at(builder, to, _STRIPE * stripe), align=_STRIPE)
        stored.set_metadata("nontemporal", past_caches)
        mixed = builder.xor(data, builder.load(_at(builder, secret, key_at), align=1))
        product = builder.mul(builder.and_(mixed, _all(0xFFFFFFFF)), builder.lshr(mixed, _all(32)))
        lanes = builder.add(builder.add(lanes, builder.shuffle_vector(data, data, _SWAP)), product)
    if not is_end:
        key = builder.load(_at(builder, secret, _SCRAMBLE_AT), align=1)
        lanes = builder.xor(builder.xor(lanes, builder.lshr(lanes, _all(47))), key)
        lanes = builder.mul(lanes, _all(_PRIME32_1))
    builder.store(lanes, lanes_ptr, align=8)


_SIGNATURE: Final = types.void(types.intp, types.intp, types.intp, types.intp)


@intrinsic  # type: ignore[untyped-decorator]
def _full_kib(typing: Any, to: Any, source: Any, lanes: Any, secret: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _copy_kib(builder, args, is_end=False)
        return context.get_dummy_value()

    return _SIGNATURE, generate


@intrinsic  # type: ignore[untyped-decorator]
def _last_kib(typing: Any, to: Any, source: Any, lanes: Any, secret: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _copy_kib(builder, args, is_end=True)
        return context.get_dummy_value()

    return _SIGNATURE, generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing: Any) -> Any:
    """What was stored past the caches is there for every reader, before anybody is told so."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:  # whose ordinary locks do not wait for such stores
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        else:
            builder.fence("release")
        return context.get_dummy_value()

    return types.void(), generate


def _copy_runs(to: Any, source: Any, run_bytes: int, lanes: int, secret: int) -> None:
    last = to.shape[0] - 1
    for run in range(last + 1):
        num_kib = run_bytes // KIB
        for kib in range(num_kib):
            at = kib * KIB
            if run == last and kib == num_kib - 1:
                _last_kib(to[run] + at, source[run] + at, lanes, secret)
            else:
                _full_kib(to[run] + at, source[run] + at, lanes, secret)
    _fence()


_ADDRESSES: Final = types.Array(types.int64, 1, "C")
_OPTIONS: Final = {"nogil": True, "boundscheck": False}
_TYPES: Final = types.void(_ADDRESSES, _ADDRESSES, types.intp, types.intp, types.intp)
try:
    copy_runs = njit(_TYPES, cache=True, **_OPTIONS)(_copy_runs)
except RuntimeError:  # nowhere to keep the machine code: compiled anew at each start
    copy_runs = njit(_TYPES, **_OPTIONS)(_copy_runs)

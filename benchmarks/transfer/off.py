"""Turns the checksum off for pairs that name BLAKE2b, so that a benchmark can measure what the checksum costs.

The product has no such switch. Both processes of the benchmark call `allow` before they make an end; the pairs
to be timed without a checksum are then made with checksums=OFF. Over shm their bytes are copied by the same loop
without the arithmetic, past the caches too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvtransfer.devices import fused, fused_kernel
from kvtransfer.link import inbound, outbound
from kvtransfer.protocol import frames
from kvtransfer.protocol.frames import Checksum
from kvtransfer.transports import shm

OFF: Final = (Checksum.BLAKE2B_64,)
_NOTHING: Final = bytes(frames.DIGEST_BYTES)
_LINE: Final = ir.VectorType(ir.IntType(64), 8)


def allow() -> Callable[[], None]:
    """Returns a function that undoes it."""
    real, land = frames.hasher, shm.ShmReceive._copy

    def hasher(kind: Checksum) -> Callable[[Iterable[memoryview]], bytes]:
        return real(kind) if kind not in OFF else lambda views: _NOTHING

    def copy(self: Any, blocks: tuple[int, ...], sources: array[int]) -> bytes:
        if self._link.checksum not in OFF or self._copier is None:
            return land(self, blocks, sources)
        copier: fused.Copier = self._copier
        _copy_runs(*copier.addresses(blocks, sources), copier.block_bytes)
        return _NOTHING

    def use(which: Any, how: Any) -> None:
        inbound.hasher = outbound.hasher = which  # type: ignore[attr-defined]
        shm.ShmReceive._copy = how  # type: ignore[method-assign]

    _copy_runs(np.empty(0, np.int64), np.empty(0, np.int64), fused.KIB)
    use(hasher, copy)
    return lambda: use(real, land)


@intrinsic  # type: ignore[untyped-decorator]
def _copy_kib(typing: Any, to: Any, source: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for at in range(0, fused.KIB, 64):
            pointers = [
                builder.inttoptr(builder.add(one, ir.Constant(ir.IntType(64), at)), _LINE.as_pointer()) for one in args
            ]
            stored = builder.store(builder.load(pointers[1], align=1), pointers[0], align=64)
            stored.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _copy_runs(to: Any, source: Any, run_bytes: int) -> None:
    for run in range(to.shape[0]):
        for at in range(0, run_bytes, 1024):
            _copy_kib(to[run] + at, source[run] + at)
    fused_kernel._fence()

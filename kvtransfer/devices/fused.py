"""Copies blocks and computes their XXH3-64 in one pass, with stores that bypass the caches.

A large copy is limited by memory bandwidth, so the hash costs no extra time. An ordinary store first reads the cache
line; a store that bypasses the caches does not (docs/decisions/0005-the-pool-is-shared.md). Each byte is loaded only
once, so the digest is that of the stored bytes.

XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) reads 64-byte stripes into eight 64-bit lanes and scrambles the
lanes after each KiB. Here runs are whole KiBs, so the end of the input is the only special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, final

from kvtransfer.protocol.plan import spans_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KIB: Final = 1024
ALIGNMENT: Final = 64  # of every store
_NUM_LANES: Final = 8
# Four 64-bit and three 32-bit primes of the specification, in its order.
_START: Final = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)


@final
class Copier:
    """Copies blocks of one pool into another. The GIL is released meanwhile."""

    @staticmethod
    def between(
        to: memoryview, source: memoryview, block_bytes: int, runs_per_block: tuple[int, int] = (1, 1)
    ) -> Copier | None:
        """`runs_per_block`: of the two pools. None if blocks of this size or at these addresses cannot be copied this
        way, or if numba is missing."""
        if not _suits(block_bytes // max(runs_per_block)):
            return None
        import numpy as np

        one = Copier(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8), block_bytes, runs_per_block)
        return None if one.is_unaligned else one

    def __init__(
        self, to: NDArray[np.uint8], source: NDArray[np.uint8], block_bytes: int, runs_per_block: tuple[int, int]
    ) -> None:
        import numpy as np

        num_pieces = max(runs_per_block)
        self._piece_bytes = block_bytes // num_pieces  # of one run in both pools
        self._memory = (to, source)  # kept alive
        self._to, self._source = to.ctypes.data, source.ctypes.data
        self._limits = (len(to) // block_bytes, len(source) // block_bytes)
        self._run_bytes = [block_bytes // runs for runs in runs_per_block]
        self._offsets: list[NDArray[np.int64]] = []  # of the pieces of block 0, in each pool; none: it is one
        if num_pieces > 1:
            pieces = tuple((index * self._piece_bytes, self._piece_bytes) for index in range(num_pieces))
            for run_bytes, num_blocks in zip(self._run_bytes, self._limits, strict=True):
                spans = spans_of(pieces, run_bytes, num_blocks)
                self._offsets.append(np.array([at for at, _ in spans], np.int64))
        self._lanes = np.empty(_NUM_LANES, np.uint64)
        self._lanes_at = self._lanes.ctypes.data
        self._run = _kernel()

    @property
    def is_unaligned(self) -> bool:
        return self._to % ALIGNMENT != 0

    def addresses(self, to: Sequence[int], source: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The addresses of the blocks' pieces. Raises IndexError on a block outside its pool, which nothing else
        checks."""
        import numpy as np

        if len(to) != len(source) or not len(to):
            raise IndexError(f"{len(source)} blocks to be copied to {len(to)}")
        for name, blocks, limit in (("target", to, self._limits[0]), ("source", source, self._limits[1])):
            if min(blocks) < 0 or max(blocks) >= limit:
                raise IndexError(f"{name} blocks {min(blocks)}..{max(blocks)} of a pool of {limit}")
        to_at = np.array(to, np.int64) * self._run_bytes[0] + self._to
        source_at = np.array(source, np.int64) * self._run_bytes[1] + self._source
        if self._offsets:
            to_at, source_at = (
                np.add.outer(at, offsets).ravel() for at, offsets in zip((to_at, source_at), self._offsets, strict=True)
            )
        return to_at, source_at

    def copy(self, to: Sequence[int], source: Sequence[int]) -> bytes:
        """Copies each block of `source` to the block at the same place in `to`. One thread at a time.

        Returns XXH3-64 of all of it, in order, as the xxhash package's `digest` does. Raises IndexError.
        """
        to_at, source_at = self.addresses(to, source)
        self._lanes[:] = _start()
        return int(self._run(to_at, source_at, self._piece_bytes, self._lanes, self._lanes_at)).to_bytes(8, "big")


def prepare(run_bytes: int) -> None:
    """Compiles the kernel, or loads the one that an earlier process compiled, so that no transfer waits for it."""
    if _suits(run_bytes):
        _kernel()


def _suits(run_bytes: int) -> bool:
    return run_bytes > 0 and run_bytes % KIB == 0 and _is_installed()


@cache
def _is_installed() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:  # a machine whose pools are on GPUs
        return False
    return True


@cache
def _start() -> NDArray[np.uint64]:
    import numpy as np

    return np.array(_START, np.uint64)


@cache
def _kernel() -> Callable[..., int]:
    from kvtransfer.devices.fused_kernel import copy_runs

    kernel: Callable[..., int] = copy_runs
    return kernel

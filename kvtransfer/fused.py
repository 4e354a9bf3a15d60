"""Copies blocks and computes XXH3-64 of what it copies, in one pass, past the caches.

A copy of much memory waits for memory, so that the arithmetic of the hash is free beside it; and stores that bypass
the caches save the read that an ordinary store begins with (docs/decisions/0005-the-pool-is-shared.md). The digest is
that of the bytes that were stored, since each is loaded once.

XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) reads 64-byte stripes into eight 64-bit lanes and scrambles the
lanes after each KiB. Here runs are whole KiBs, which leaves out every special case but the end of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KIB: Final = 1024
ALIGNMENT: Final = 64  # of every store
_STRIPE: Final = 64
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_MIX: Final = 0x165667919E3779F9
_START: Final = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SCRAMBLE_AT: Final = len(_SECRET) - _STRIPE
_LAST_AT: Final = _SCRAMBLE_AT - 7  # of the secret, for the input's last stripe
_MERGE_AT: Final = 11
_MASK: Final = 2**64 - 1

# (addresses to copy to, addresses to copy from, bytes per run, address of the lanes, address of the secret)
_Kernel = Callable[["NDArray[np.int64]", "NDArray[np.int64]", int, int, int], None]


@final
class Copier:
    """Copies blocks of one pool into another; other threads of the process go on meanwhile."""

    @staticmethod
    def between(to: memoryview, source: memoryview, block_bytes: int) -> Copier | None:
        """None where blocks of this size, at these addresses or without numba cannot be copied this way."""
        if not _suits(block_bytes):
            return None
        import numpy as np

        one = Copier(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8), block_bytes)
        return None if one.is_unaligned else one

    def __init__(self, to: NDArray[np.uint8], source: NDArray[np.uint8], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._to, self._source = (to, to.ctypes.data), (source, source.ctypes.data)
        self._run = _kernel()

    @property
    def is_unaligned(self) -> bool:
        return self._to[1] % ALIGNMENT != 0

    def copy(self, to: Sequence[int], source: Sequence[int]) -> bytes:
        """Copies each block of `source` to the one beside it in `to`.

        Returns XXH3-64 of all of it, in order, as the xxhash package's `digest` does. Raises IndexError on a block
        outside its pool: behind this line nothing checks bounds.
        """
        import numpy as np

        lanes = np.array(_START, np.uint64)
        ends = [
            self._addresses(np.asarray(blocks, np.int64), *memory)
            for blocks, memory in ((to, self._to), (source, self._source))
        ]
        if len(ends[0]) != len(ends[1]) or not len(to):
            raise IndexError(f"{len(source)} blocks to be copied to {len(to)}")
        self._run(ends[0], ends[1], self._block_bytes, lanes.ctypes.data, _secret().ctypes.data)
        return _merge(lanes.tolist(), len(to) * self._block_bytes)

    def _addresses(self, blocks: NDArray[np.int64], memory: NDArray[np.uint8], base: int) -> NDArray[np.int64]:
        if int(blocks.min()) < 0 or (int(blocks.max()) + 1) * self._block_bytes > len(memory):
            raise IndexError(f"blocks {blocks.min()}..{blocks.max()} of {len(memory) // self._block_bytes}")
        return base + blocks * self._block_bytes


def prepare(block_bytes: int) -> None:
    """Compiles, or loads what an earlier process compiled, so that no transfer waits for it."""
    if _suits(block_bytes):
        _kernel()


def _suits(block_bytes: int) -> bool:
    return block_bytes > 0 and block_bytes % KIB == 0 and _is_installed()


def _merge(lanes: list[int], num_bytes: int) -> bytes:
    total = num_bytes * _PRIME64[0]
    for pair in range(4):
        at = _MERGE_AT + 16 * pair
        first, second = (int.from_bytes(_SECRET[at + 8 * i : at + 8 * i + 8], "little") for i in range(2))
        product = (lanes[2 * pair] ^ first) * (lanes[2 * pair + 1] ^ second)
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total ^= total >> 37
    total = total * _MIX & _MASK
    total ^= total >> 32
    return total.to_bytes(8, "big")


@cache
def _is_installed() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:  # a machine whose pools lie on GPUs
        return False
    return True


@cache
def _secret() -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(_SECRET, np.uint8)


@cache
def _kernel() -> _Kernel:
    from kvtransfer.fused_kernel import copy_runs

    kernel: _Kernel = copy_runs
    return kernel

"""The checksums of chunks, and their computation over scattered memory.

Both sides list theirs in the handshake. XXH3-64 processes tens of GB/s from the cache. BLAKE2b (8 bytes) is for
machines without the xxhash package, where it takes most of the transfer's time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final


class Checksum(Enum):
    XXH3_64 = "xxh3-64"
    BLAKE2B_64 = "blake2b-64"


def available() -> tuple[Checksum, ...]:
    """In order of preference."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return (Checksum.BLAKE2B_64,)
    return (Checksum.XXH3_64, Checksum.BLAKE2B_64)


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=8)


def hasher(kind: Checksum) -> Callable[[Iterable[memoryview]], bytes]:
    """A function that computes the 8-byte checksum of views, in order."""
    if kind is Checksum.XXH3_64:
        import xxhash

        new: Callable[[], Any] = xxhash.xxh3_64
    else:
        new = _blake2b

    def digest(views: Iterable[memoryview]) -> bytes:
        state = new()
        for view in views:
            state.update(view)
        return bytes(state.digest())

    return digest


DIGEST_BYTES: Final = 8

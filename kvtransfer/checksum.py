"""Which checksum a pair uses, and how it is computed over scattered memory.

Both sides list theirs in the handshake. xxh3-64 reads tens of GB/s from the cache. BLAKE2b (8 bytes long) is for
machines without the xxhash package. It takes most of the transfer's time, which is better than no check.
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
    """A function from memory, in order, to 8 bytes."""
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

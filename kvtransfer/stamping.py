"""Encoding of the stamps of a chunk's blocks: 16 bytes per block, little-endian, in front of the chunk. Pure.

    content hash 8   of the block, from the sender's table when the chunk is packed
    generation 4     of the grant, its low half
    mask 4           the layer groups of the block that this chunk contains

The hashes come from the sender's table, not from the transfer, so a source block that was reassigned is detected. The
receiver computes the expected hash of each granted block from its own copy of the prompt.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

STAMP_BYTES: Final = 16
_LOW: Final = 0xFFFF_FFFF
_WORD: Final = "Q"


def pack(content_hashes: Sequence[int], generation: int, mask: int) -> bytes:
    """One stamp for each content hash."""
    count = len(content_hashes)
    words = array(_WORD, bytes(STAMP_BYTES * count))
    words[::2] = array(_WORD, content_hashes)
    words[1::2] = array(_WORD, [generation & _LOW | mask << 32]) * count
    return _little(words).tobytes()


def content_hashes_in(stamps: bytes) -> tuple[int, ...]:
    return tuple(_words(stamps)[::2])


def difference(seen: bytes, expected: bytes) -> tuple[int, str] | None:
    """(index of the first stamp that differs, the field with both values); None if all are equal."""
    if seen == expected:
        return None
    if len(seen) != len(expected):
        return 0, f"{len(seen)} bytes of stamps, expected {len(expected)}"
    is_, must_be = _words(seen), _words(expected)
    at = next(i for i in range(len(is_)) if is_[i] != must_be[i])
    if at % 2 == 0:
        return at // 2, f"content hash {is_[at]:016x}, expected {must_be[at]:016x}"
    if is_[at] & _LOW != must_be[at] & _LOW:
        return at // 2, f"generation {is_[at] & _LOW}, expected {must_be[at] & _LOW}"
    return at // 2, f"layer groups {is_[at] >> 32:#x}, expected {must_be[at] >> 32:#x}"


def _words(stamps: bytes) -> array[int]:
    words = array(_WORD)
    words.frombytes(stamps)
    return _little(words)


def _little(words: array[int]) -> array[int]:
    if sys.byteorder == "big":  # pragma: no cover
        words.byteswap()
    return words

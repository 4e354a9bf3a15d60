"""The frames of the data connection: one fixed header of 64 bytes, little-endian, then `length` bytes. Pure.

    magic 4, version 1, kind 1, flags 2, attempt 4, generation 8, transfer 16, first 4, count 4,
    slot 4, length 4, checksum 8, crc32 of all that 4

A transfer's id travels as a 16-byte digest, so that headers have one size. A chunk's bytes follow its header
(tcp), or the numbers of the blocks where the receiver finds them do (shm). Nothing is ever allocated from a number
that was received.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from kvtransfer.transport import TransferKey

MAGIC: Final = b"PDKV"
VERSION: Final = 1
MAX_TEXT_BYTES: Final = 512
_BODY: Final = struct.Struct("<4sBBHIQ16sIIII8s")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _BODY.size + _CRC.size
FLAG_LAST: Final = 1
NO_CHECKSUM: Final = bytes(8)


class Kind(IntEnum):
    ANNOUNCE = 1  # sender: this transfer comes over this connection
    CHUNK = 2  # sender: blocks first .. first + count - 1 of the grant
    RETRACT = 3  # sender: gives up; the text says why
    DONE = 4  # receiver: every block is verified; `slot` is for how many microseconds chunks were on their way
    REFUSE = 5  # receiver: the transfer is over and was not verified; the text says why
    CREDIT = 6  # receiver: the chunk in `slot` has been read (shm)


class BadFrame(Exception):
    """The peer sent what no peer of ours sends; the connection cannot be trusted any more."""


class Tag(NamedTuple):
    """A TransferKey as it stands in a header."""

    transfer: bytes
    attempt: int
    generation: int


def tag_of(key: TransferKey) -> Tag:
    digest = hashlib.blake2b(key.transfer_id.encode(), digest_size=16).digest()
    return Tag(digest, key.attempt, key.generation)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    tag: Tag
    first: int = 0
    count: int = 0
    slot: int = 0
    length: int = 0
    checksum: bytes = NO_CHECKSUM
    is_last: bool = False

    def encode(self) -> bytes:
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.kind,
            FLAG_LAST if self.is_last else 0,
            self.tag.attempt,
            self.tag.generation,
            self.tag.transfer,
            self.first,
            self.count,
            self.slot,
            self.length,
            self.checksum,
        )
        return body + _CRC.pack(zlib.crc32(body))


def encode_text(kind: Kind, tag: Tag, text: str) -> bytes:
    """A header and its text, cut to MAX_TEXT_BYTES."""
    payload = text.encode()[:MAX_TEXT_BYTES]
    return Frame(kind, tag, length=len(payload)).encode() + payload


def decode_text(payload: bytes) -> str:
    """Text from the network, fit for a log line: printable, on one line."""
    text = payload.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def decode(header: bytes | bytearray | memoryview, max_chunk_bytes: int) -> Frame:
    """Raises BadFrame on anything that `encode` does not make, and on lengths over the limits."""
    if len(header) != HEADER_BYTES:
        raise BadFrame(f"a header of {len(header)} bytes, expected {HEADER_BYTES}")
    magic, version, kind, flags, attempt, generation, transfer, first, count, slot, length, checksum = (
        _BODY.unpack_from(header)
    )
    if magic != MAGIC:
        raise BadFrame("a header without the magic bytes")
    if version != VERSION:
        raise BadFrame(f"frame version {version}, expected {VERSION}")
    if _CRC.unpack_from(header, _BODY.size)[0] != zlib.crc32(memoryview(header)[: _BODY.size]):
        raise BadFrame("a header whose CRC does not match")
    try:
        known = Kind(kind)
    except ValueError:
        raise BadFrame(f"frame kind {kind}") from None
    limit = max_chunk_bytes if known is Kind.CHUNK else MAX_TEXT_BYTES if known in TEXT_KINDS else 0
    if length > limit:
        raise BadFrame(f"a {known.name} frame of {length} bytes, at most {limit}")
    is_last = bool(flags & FLAG_LAST)
    return Frame(known, Tag(transfer, attempt, generation), first, count, slot, length, checksum, is_last)


TEXT_KINDS: Final = (Kind.RETRACT, Kind.REFUSE)
SENDER_KINDS: Final = (Kind.ANNOUNCE, Kind.CHUNK, Kind.RETRACT)
RECEIVER_KINDS: Final = (Kind.DONE, Kind.REFUSE, Kind.CREDIT)

"""The bytes of a data connection: frames, their stamps and checksums, and the greeting with its proofs. Pure.

A frame is one fixed header of 68 bytes, little-endian, and what follows it:

    magic 4, version 1, kind 1, flags 2, attempt 4, generation 8, transfer 16, first 4, count 4,
    slot 4, length 4, checksum 8, shard 2, group 1, groups 1, crc32 of all that 4

A transfer's id is sent as a 16-byte digest, so that headers have one size. A chunk's header is followed by the stamps
of its blocks, then by `length` bytes whose meaning depends on the transport: the blocks themselves (tcp), or the
numbers of the source blocks that the receiver reads (shm). No memory is allocated from a number that was received.

A connection begins with a greeting: magic, version, ticket, nonce, and a proof that the sender knows the cluster's
secret. The receiver answers with its own proof (ANSWER_BYTES bytes) before any other frame.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple, final

from kvtransfer.protocol.plan import MAX_GROUPS, WHOLE, Part
from pdserve.core.access.proof import MAC_BYTES, NONCE_BYTES, ClusterSecret
from pdserve.core.kv.kv_shape import TransferKey

# --- stamps of a chunk's blocks -------------------------------------------------------------------------------
# 16 bytes per block, little-endian, in front of the chunk:
#
#     content hash 8   of the block, from the sender's table when the chunk is packed
#     generation 4     of the grant, its low half
#     mask 4           the layer groups of the block that this chunk contains
#
# The hashes come from the sender's table, not from the transfer, so a source block that was reassigned is detected. The
# receiver computes the expected hash of each granted block from its own copy of the prompt.

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


# --- frames ---------------------------------------------------------------------------------------------------

MAGIC: Final = b"PDKV"
VERSION: Final = 3
MAX_TEXT_BYTES: Final = 512
TICKET_BYTES: Final = 16
ANSWER_BYTES: Final = MAC_BYTES
_BODY: Final = struct.Struct("<4sBBHIQ16sIIII8sHBB")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _BODY.size + _CRC.size
FLAG_LAST: Final = 1
FLAG_CANCELLED: Final = 2
NO_CHECKSUM: Final = bytes(8)
_GREETING: Final = MAGIC + bytes([VERSION])
GREETING_BYTES: Final = len(_GREETING) + TICKET_BYTES + NONCE_BYTES + MAC_BYTES


class Kind(IntEnum):
    ANNOUNCE = 1  # sender: this transfer uses this connection
    CHUNK = 2  # sender: blocks first .. first + count - 1 of the grant
    RETRACT = 3  # sender: the transfer is abandoned; the text says why
    # receiver: every block is verified; `slot` is the number of microseconds during which chunks were being transferred
    DONE = 4
    REFUSE = 5  # receiver: the transfer has ended unverified; the text says why
    CREDIT = 6  # receiver: the chunk in `slot` has been read (shm)
    BEAT = 7  # both: still alive


class BadFrame(Exception):
    """The peer sent an invalid frame; the connection cannot be trusted any more."""


class Tag(NamedTuple):
    """A TransferKey as it is written in a header."""

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
    part: Part = WHOLE
    is_cancelled: bool = False  # RETRACT and REFUSE: the owner no longer needs the transfer; nothing failed

    @property
    def num_behind(self) -> int:
        """Bytes that follow the header: a chunk's stamps, and `length`."""
        return self.length + (self.count * STAMP_BYTES if self.kind is Kind.CHUNK else 0)

    def encode(self) -> bytes:
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.kind,
            FLAG_LAST * self.is_last | FLAG_CANCELLED * self.is_cancelled,
            self.tag.attempt,
            self.tag.generation,
            self.tag.transfer,
            self.first,
            self.count,
            self.slot,
            self.length,
            self.checksum,
            *self.part,
        )
        return body + _CRC.pack(zlib.crc32(body))


def beat() -> bytes:
    return Frame(Kind.BEAT, Tag(bytes(16), 0, 0)).encode()


def encode_text(kind: Kind, tag: Tag, text: str, *, is_cancelled: bool = False) -> bytes:
    """A header and its text, truncated to MAX_TEXT_BYTES."""
    payload = text.encode()[:MAX_TEXT_BYTES]
    return Frame(kind, tag, length=len(payload), is_cancelled=is_cancelled).encode() + payload


def decode_text(payload: bytes) -> str:
    """Text from the network, made printable, on one line, for logs."""
    text = payload.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def decode(header: bytes | bytearray | memoryview, max_chunk_bytes: int) -> Frame:
    """Raises BadFrame on anything that `encode` cannot produce, and on lengths over the limits."""
    if len(header) != HEADER_BYTES:
        raise BadFrame(f"a header of {len(header)} bytes, expected {HEADER_BYTES}")
    magic, version, kind, flags, attempt, generation, transfer, first, count, slot, length, checksum, *numbers = (
        _BODY.unpack_from(header)
    )
    _require_version(magic, version)
    if _CRC.unpack_from(header, _BODY.size)[0] != zlib.crc32(memoryview(header)[: _BODY.size]):
        raise BadFrame("a header whose CRC does not match")
    try:
        known = Kind(kind)
    except ValueError:
        raise BadFrame(f"frame kind {kind}") from None
    limit = max_chunk_bytes if known is Kind.CHUNK else MAX_TEXT_BYTES if known in TEXT_KINDS else 0
    if length > limit:
        raise BadFrame(f"a {known.name} frame of {length} bytes, at most {limit}")
    part = Part(*numbers)
    if not part.group < part.groups <= MAX_GROUPS:
        raise BadFrame(f"layer group {part.group} of {part.groups}, at most {MAX_GROUPS}")
    is_last, is_cancelled = bool(flags & FLAG_LAST), bool(flags & FLAG_CANCELLED)
    tag = Tag(transfer, attempt, generation)
    return Frame(known, tag, first, count, slot, length, checksum, is_last, part, is_cancelled)


@final
class FrameDecoder:
    """Divides a stream of frames without chunks, as receivers send them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: memoryview) -> Iterator[tuple[Frame, str]]:
        """The frames that the next bytes complete, each with its text. Raises BadFrame."""
        self._data += data
        while len(self._data) >= HEADER_BYTES:
            frame = decode(self._data[:HEADER_BYTES], 0)
            size = HEADER_BYTES + frame.length
            if len(self._data) < size:
                return
            text = decode_text(bytes(self._data[HEADER_BYTES:size]))
            del self._data[:size]
            yield frame, text


class Greeting(NamedTuple):
    """The sender's first message on a connection."""

    ticket: bytes
    nonce: bytes
    mac: bytes  # over both and the names of the two workers: kvtransfer/protocol/frames.py

    def encode(self) -> bytes:
        """GREETING_BYTES bytes."""
        return _GREETING + self.ticket + self.nonce + self.mac


def decode_greeting(data: bytes) -> Greeting | None:
    """None while bytes are missing. Raises BadFrame, as early as possible, on another version or protocol."""
    if data[:4] != MAGIC[: len(data)]:
        raise BadFrame("a connection that does not begin with the magic bytes")
    if len(data) > len(MAGIC):
        _require_version(MAGIC, data[len(MAGIC)])
    if len(data) < GREETING_BYTES:
        return None
    nonce_at = len(_GREETING) + TICKET_BYTES
    mac_at = nonce_at + NONCE_BYTES
    return Greeting(data[len(_GREETING) : nonce_at], data[nonce_at:mac_at], data[mac_at:])


def _require_version(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise BadFrame("a header without the magic bytes")
    if version != VERSION:
        raise BadFrame(f"frame version {version}, expected {VERSION}")


TEXT_KINDS: Final = (Kind.RETRACT, Kind.REFUSE)


# --- checksums ------------------------------------------------------------------------------------------------
# Of chunks, over scattered memory.
#
# Both sides list theirs in the handshake. XXH3-64 processes tens of GB/s from the cache. BLAKE2b (8 bytes) is for
# machines without the xxhash package, where it takes most of the transfer's time.


DIGEST_BYTES: Final = 8


class Checksum(Enum):
    XXH3_64 = "xxh3-64"
    BLAKE2B_64 = "blake2b-64"


def available_checksums() -> tuple[Checksum, ...]:
    """In order of preference."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return (Checksum.BLAKE2B_64,)
    return (Checksum.XXH3_64, Checksum.BLAKE2B_64)


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


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


# --- proofs ---------------------------------------------------------------------------------------------------
# Both parties know the ticket and the cluster's secret.
#
# A third party that has read a ticket is not admitted, because the greeting must also prove the secret. Each connection
# has a new ticket, so a proof cannot be replayed.


@dataclass(frozen=True, slots=True)
class Parties:
    """The two workers of a connection, and its transport."""

    sender: str  # proof.caller_name
    receiver_incarnation: str
    transport: int


def sender_greeting(secret: ClusterSecret, parties: Parties, ticket: bytes, nonce: bytes) -> Greeting:
    return Greeting(ticket, nonce, secret.mac("kv sender", *_parts(parties, ticket, nonce)))


def is_proven(secret: ClusterSecret, parties: Parties, greeting: Greeting) -> bool:
    return secret.matches(greeting.mac, "kv sender", *_parts(parties, greeting.ticket, greeting.nonce))


def receiver_answer(secret: ClusterSecret, parties: Parties, greeting: Greeting) -> bytes:
    """ANSWER_BYTES bytes, which only the receiver of this connection can make."""
    return secret.mac("kv receiver", *_parts(parties, greeting.ticket, greeting.nonce))


def _parts(parties: Parties, ticket: bytes, nonce: bytes) -> tuple[str | bytes, ...]:
    return parties.sender, parties.receiver_incarnation, str(int(parties.transport)), ticket, nonce

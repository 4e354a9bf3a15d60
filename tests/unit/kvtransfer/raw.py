"""A sender that builds frames by hand, for tests of invalid input."""

from __future__ import annotations

import random
import socket
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtransfer.link.dial import DataConnection, dial
from kvtransfer.protocol.frames import (
    HEADER_BYTES,
    Frame,
    Kind,
    Parties,
    Tag,
    decode,
    hasher,
    pack,
    sender_greeting,
    tag_of,
)
from kvtransfer.protocol.transport import ReceiveOutcome
from kvtransfer.transports.shm import SHM, ShmSend
from pdserve.core.access.proof import NONCE_BYTES, ClusterSecret
from pdserve.core.kv.kv_shape import Grant
from pdserve.v1 import transfer_pb2
from tests.support.cluster_secret import SECRET
from tests.support.transfer_proxy import read_exactly
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Heard, Pair

FIRST_BLOCK = 32
GARBAGE = random.Random(1).randbytes(4096)


def numbers(blocks: range) -> bytes:
    """The source block numbers, as in an shm frame."""
    return array("I", blocks).tobytes()


def connect(pair: Pair, answer: transfer_pb2.OpenResponse) -> socket.socket:
    if answer.transport == SHM:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + answer.address)
    else:
        host, port = answer.address.split(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(WAIT_S)
    return sock


def greet(pair: Pair, answer: transfer_pb2.OpenResponse, secret: ClusterSecret = SECRET, **changes: Any) -> bytes:
    """Sends the greeting of a sender on a data connection."""
    ends = Parties(pair.sender.config.identity.name, answer.receiver_incarnation, answer.transport)
    return sender_greeting(secret, replace(ends, **changes), answer.ticket, b"n" * NONCE_BYTES).encode()


class RawSender:
    """Sends hand-made frames over a properly opened connection."""

    def __init__(self, pair: Pair, name: str = "raw") -> None:
        caller = replace(pair.sender.config, worker_id=name)
        self.connection: DataConnection = dial(caller, pair.host.endpoint, "d0-1")
        self.connection.socket.settimeout(WAIT_S)
        self.pool, self._next_block = pair.source, FIRST_BLOCK
        self.is_shm = isinstance(self.connection.half, ShmSend)
        self._digest = hasher(self.connection.checksum)

    def send(self, data: bytes) -> None:
        self.connection.socket.sendall(data)

    def announce(self, tag: Tag) -> None:
        self.send(Frame(Kind.ANNOUNCE, tag).encode())

    def chunk(
        self, tag: Tag, first: int, payload: bytes, is_last: bool = False, content_hashes: Sequence[int] = ()
    ) -> None:
        """A chunk frame. For shm, the payload is in blocks of the pool that no other transfer reads."""
        count, checksum = len(payload) // BLOCK_BYTES, self._digest([memoryview(payload)])
        body = payload
        if self.is_shm:
            blocks = range(self._next_block, self._next_block + count)
            self._next_block = blocks.stop
            self.pool.memory[blocks.start * BLOCK_BYTES : blocks.stop * BLOCK_BYTES] = payload
            body = numbers(blocks)
        stamps = pack(content_hashes or [0] * count, tag.generation, 1)
        self.send(Frame(Kind.CHUNK, tag, first, count, 0, len(body), checksum, is_last).encode() + stamps + body)

    def hear(self) -> Frame:
        """The next frame that is neither a credit nor a heartbeat."""
        while True:
            frame = decode(read_exactly(self.connection.socket, HEADER_BYTES), 0)
            read_exactly(self.connection.socket, frame.length)
            if frame.kind not in (Kind.CREDIT, Kind.BEAT):
                return frame

    def is_cut(self) -> bool:
        try:
            while self.connection.socket.recv(4096):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.connection.close()


def expected(pair: Pair, blocks: tuple[int, ...]) -> tuple[Grant, Tag, Heard]:
    grant, received = pair.grant(blocks), Heard()
    pair.receiver.expect(grant, received)
    return grant, tag_of(grant.key), received


def assert_still_serves(pair: Pair) -> None:
    assert pair.receiver.is_healthy
    assert pair.move(pair.grant((60,)), (7,))[0].outcome is ReceiveOutcome.VERIFIED

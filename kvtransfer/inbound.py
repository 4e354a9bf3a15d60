"""One connection from a prefill worker, served by one thread of the decode worker.

tcp: a chunk's bytes go from the socket straight into the granted blocks. shm: the chunk lies in the ring and is
copied out. Either way this thread is the only writer, and asks the book before each write: once the book has
said that a transfer is drained, no byte of it is written.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

from kvtransfer.channel import Channel, Gone
from kvtransfer.checksum import hasher
from kvtransfer.frames import HEADER_BYTES, BadFrame, Frame, Kind, Tag, decode, decode_text
from kvtransfer.gate import SHM, TICKET_BYTES, Peer
from kvtransfer.landings import Claim
from kvtransfer.memory import advance, copy, views_of
from kvtransfer.ring import Ring

log = logging.getLogger(__name__)

AUTHENTICATION_S: Final = 5.0
RING_BYTES: Final = 8 * 2**20  # small enough to stay in the last-level cache
MIN_SLOTS: Final = 4
_SCRATCH_BYTES: Final = 64 * 1024


class Hub(Protocol):
    """What a connection asks of its receiver; every method may be called from any thread."""

    memory: memoryview
    block_bytes: int
    chunk_bytes: int

    def admit(self, ticket: bytes, transport: int, inbound: Inbound) -> Peer | None: ...
    def announce(self, tag: Tag, writer: int) -> None: ...
    def claim(self, tag: Tag, writer: int, first: int, count: int) -> Claim | None: ...
    def enter(self, claim: Claim) -> bool: ...
    def leave(self, claim: Claim) -> None: ...
    def settle(self, claim: Claim, num_bytes: int, matches: bool, is_last: bool) -> None: ...
    def retract(self, tag: Tag, writer: int, error: str) -> None: ...
    def ended(self, inbound: Inbound, error: str, is_peers_fault: bool) -> None: ...


class Inbound(threading.Thread):
    def __init__(self, hub: Hub, sock: socket.socket, number: int, transport: int) -> None:
        super().__init__(name=f"kv-inbound-{number}", daemon=True)
        self.number = number
        self.peer: Peer | None = None
        self._hub, self._transport = hub, transport
        self._channel = Channel(sock)
        self._ring: Ring | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._began_s = time.monotonic()

    def begun(self) -> Inbound:
        """Starts it. Raises RuntimeError, and keeps nothing, where the process may have no more threads."""
        try:
            self.start()
        except RuntimeError:
            self._channel.close()
            raise
        return self

    def post(self, data: bytes) -> None:
        """Queues an answer, from any thread."""
        self._channel.post(data)

    def stop(self, reason: str = "closed on this side") -> None:
        self._channel.stop(reason)

    def run(self) -> None:
        error, is_peers_fault = "the connection's thread died", False
        try:
            if self._authenticate():
                self._serve()
            else:
                error = "no valid ticket"
        except Gone as gone:
            error = str(gone)
        except BadFrame as bad:
            error, is_peers_fault = f"protocol error: {bad}", True
        except Exception:  # the thread ends, and its transfers must end with it, visibly
            log.exception("kv connection failed", extra={"connection": self.number})
        finally:
            # Order matters: the book may hand memory back once it hears that this thread writes no more.
            self._hub.ended(self, error, is_peers_fault)
            self._channel.close()
            if self._ring is not None:
                self._ring.close()

    def _authenticate(self) -> bool:
        if self._transport == SHM and not _is_own_user(self._channel.socket):
            return False
        ticket = bytearray(TICKET_BYTES)
        view = memoryview(ticket)
        while view:
            received = self._channel.receive([view])
            left_s = self._began_s + AUTHENTICATION_S - time.monotonic()
            if received == 0 and (left_s <= 0 or not self._channel.wait(left_s)):
                return False
            view = view[received:]
        self.peer = self._hub.admit(bytes(ticket), self._transport, self)
        if self.peer is None:
            return False
        self._digest = hasher(self.peer.checksum)
        if self._transport == SHM:
            slots = max(MIN_SLOTS, RING_BYTES // self._hub.chunk_bytes)
            self._ring = Ring.create(slots, self._hub.chunk_bytes)
            self._ring.offer(self._channel.socket)
        return True

    def _serve(self) -> None:
        header = bytearray(HEADER_BYTES)
        while True:
            self._channel.fill(memoryview(header))
            frame = decode(header, self._hub.chunk_bytes)
            if frame.kind is Kind.CHUNK and self._ring is not None:
                self._land_from_ring(frame, self._ring)
            elif frame.kind is Kind.CHUNK:
                self._land_from_socket(frame)
            elif frame.kind is Kind.ANNOUNCE:
                self._hub.announce(frame.tag, self.number)
            elif frame.kind is Kind.RETRACT:
                text = bytearray(frame.length)
                self._channel.fill(memoryview(text))
                self._hub.retract(frame.tag, self.number, decode_text(bytes(text)))
            else:
                raise BadFrame(f"a {frame.kind.name} frame from a sender")
            self._channel.flush()

    def _land_from_socket(self, frame: Frame) -> None:
        self._require_size(frame, frame.length)
        claim = self._hub.claim(frame.tag, self.number, frame.first, frame.count)
        if claim is None:
            self._discard(frame.length)
            return
        views = views_of(self._hub.memory, claim.blocks, self._hub.block_bytes)
        rest, left = list(views), frame.length
        while left:
            if not self._hub.enter(claim):
                self._discard(left)
                return
            try:
                received = self._channel.receive(rest)
            finally:
                self._hub.leave(claim)
            if received == 0:
                self._channel.wait()
            left -= received
            advance(rest, received)
        self._settle(claim, frame, views)

    def _land_from_ring(self, frame: Frame, ring: Ring) -> None:
        size = frame.count * self._hub.block_bytes
        if frame.length != 0 or frame.slot >= ring.slots:
            raise BadFrame(f"a chunk in slot {frame.slot} with {frame.length} bytes behind its header")
        self._require_size(frame, size)
        claim = self._hub.claim(frame.tag, self.number, frame.first, frame.count)
        if claim is not None and self._hub.enter(claim):
            views = views_of(self._hub.memory, claim.blocks, self._hub.block_bytes)
            try:
                copy(views, [ring.slot(frame.slot, size)])
            finally:
                self._hub.leave(claim)
            self.post(_credit(frame))
            self._settle(claim, frame, views)
        else:
            self.post(_credit(frame))

    def _settle(self, claim: Claim, frame: Frame, views: Sequence[memoryview]) -> None:
        # The checksum is taken of the granted blocks, not of the ring: it covers every copy on the way.
        matches = hmac.compare_digest(self._digest(views), frame.checksum)
        num_bytes = frame.count * self._hub.block_bytes
        self._hub.settle(claim, num_bytes, matches, frame.is_last)

    def _require_size(self, frame: Frame, size: int) -> None:
        is_sane = frame.count > 0 and size == frame.count * self._hub.block_bytes and size <= self._hub.chunk_bytes
        if not is_sane:
            raise BadFrame(f"a chunk of {frame.count} blocks in {size} bytes; a block has {self._hub.block_bytes}")

    def _discard(self, left: int) -> None:
        while left:
            received = self._channel.receive([self._scratch[:left]])
            if received == 0:
                self._channel.wait()
            left -= received


def _credit(frame: Frame) -> bytes:
    return Frame(Kind.CREDIT, frame.tag, slot=frame.slot).encode()


def _is_own_user(sock: socket.socket) -> bool:

    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())

"""One connection from a prefill worker, served by one thread of the decode worker: reads frames and sends answers.

The transport receives a chunk's bytes. Before each write it asks the transfer table, through this connection, so no
byte is written after a transfer was reported as drained.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, final

from kvtransfer.link.channel import Channel, Gone, Silent
from kvtransfer.link.gate import Peer
from kvtransfer.protocol.frames import (
    GREETING_BYTES,
    HEADER_BYTES,
    STAMP_BYTES,
    BadFrame,
    Frame,
    Kind,
    beat,
    decode,
    decode_greeting,
    decode_text,
    hasher,
)
from kvtransfer.protocol.lease import Heartbeat
from kvtransfer.protocol.plan import PartLayout, arrival_of
from kvtransfer.protocol.transfers import Claim
from kvtransfer.reshape.convert import Unpacker
from kvtransfer.transports.common.interface import ReceiveHalf, ReceiveLink, Transport
from pdserve.core.access.hosts import network_of
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.kv.kv_shape import KvShape, is_same_bytes

if TYPE_CHECKING:
    from kvtransfer.link.receiver import PlainReceiver

log = logging.getLogger(__name__)

AUTHENTICATION_S: Final = (
    3.0  # from the accepted connection to the proof; a sender sends its greeting as soon as it is connected
)


@final
class Accepted:
    """A connection whose sender has sent nothing yet. It costs no thread."""

    __slots__ = ("ends_s", "host", "socket", "transport")

    def __init__(self, sock: socket.socket, transport: Transport, now_s: float) -> None:
        """Raises OSError if the peer has disconnected."""
        sock.setblocking(False)
        is_local = sock.family not in (socket.AF_INET, socket.AF_INET6)
        self.socket, self.transport = sock, transport
        self.host = "" if is_local else network_of(sock.getpeername()[0])
        self.ends_s = now_s + AUTHENTICATION_S

    def has_sent(self) -> bool:
        """If the socket is readable. False: the peer has disconnected."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False


class Inbound(threading.Thread):
    """The thread of one connection, and the ReceiveLink of its transport."""

    def __init__(self, receiver: PlainReceiver, accepted: Accepted, number: int) -> None:
        super().__init__(name=f"kv-inbound-{number}", daemon=True)
        self.number, self.host = number, accepted.host
        self.peer: Peer | None = None
        self.pool, self.memory = receiver.pool, receiver.memory
        self.block_bytes, self.chunk_bytes = receiver.block_bytes, receiver.chunk_bytes
        self.channel = Channel(accepted.socket, clock=receiver.clock)
        self.enter, self.leave = receiver.enter, receiver.leave
        self._receiver, self._transport = receiver, accepted.transport
        self._half: ReceiveHalf | None = None
        self._unpacker: Unpacker | None = None  # if blocks arrive in another format
        self._ends_s = accepted.ends_s

    def started(self) -> Inbound:
        """Starts the thread. Raises RuntimeError, and closes everything, if the process cannot have more threads."""
        try:
            self.start()
        except RuntimeError:
            self.channel.close()
            raise
        return self

    def post(self, data: bytes) -> None:
        """Queues an answer, from any thread."""
        self.channel.post(data)

    def stop(self, reason: str = "closed on this side") -> None:
        self.channel.stop(reason)

    def run(self) -> None:
        error, is_peers_fault, is_silent = "the connection's thread died", False, False
        try:
            if self._authenticate():
                self._serve()
            else:
                error = "no valid ticket, or no proof of the cluster's secret"
        except Gone as gone:
            error, is_silent = str(gone), isinstance(gone, Silent)
        except BadFrame as bad:
            error, is_peers_fault = f"protocol error: {bad}", True
        except TransferFailed as failed:
            error = failed.message
        except Exception:  # the thread ends, so its transfers must end and be reported
            log.exception("kv connection failed", extra={"connection": self.number})
        finally:
            # In this order, because the table may free memory as soon as `ended` reports that this writer is gone.
            if self._half is not None:
                self._half.close()
            self._receiver.ended(self, error, is_peers_fault=is_peers_fault, is_silent=is_silent)
            self.channel.close()

    def digest(self, views: Iterable[memoryview]) -> bytes:
        return self._digest(views)

    def views(self, claim: Claim) -> list[memoryview]:
        return self.target.views(self.memory, claim.blocks, claim.part, self.pool.runs_per_block)

    def size_of(self, frame: Frame) -> int:
        return frame.count * self.target.bytes_of(frame.part)

    def settle(self, claim: Claim, frame: Frame, checksum: bytes) -> None:
        matches = hmac.compare_digest(checksum, frame.checksum)
        self._receiver.settle(claim, self._link.size_of(frame), matches, frame.is_last)

    @property
    def _link(self) -> ReceiveLink:
        """The link that the transport uses: this connection, or an unpacker in front of it."""
        return self if self._unpacker is None else self._unpacker

    def _authenticate(self) -> bool:
        if self._receiver.tls is not None and not self._transport.is_same_host:
            self.channel.secure(self._receiver.tls.current().peer_server, self._left_s)
        data, greeting = bytearray(GREETING_BYTES), None
        at = 0
        while greeting is None:
            received = self.channel.receive([memoryview(data)[at:]])
            # raises on invalid bytes and other versions as soon as they are visible
            greeting = decode_greeting(bytes(data[: at + received]))
            left_s = self._left_s()
            if received == 0 and (left_s <= 0 or not self.channel.wait(left_s)):
                return False
            at += received
        admitted = self._receiver.admit(greeting, self._transport.kind)
        if admitted is None:
            return False
        self.peer, answer = admitted
        self.channel.post(answer)
        self.checksum = self.peer.checksum
        self._digest = hasher(self.checksum)
        peer, mine = self.peer, self._receiver.shape
        self.target = PartLayout.to_receive(peer.shape, mine)
        self.source = self._source_of(peer, mine)
        if peer.wire_dtype != mine.dtype:
            if not self.pool.is_on_host:
                raise TransferFailed(f"{peer.wire_dtype} for {mine.dtype}: blocks on a GPU cannot be converted")
            self._unpacker = Unpacker(self, arrival_of(peer.shape, mine, peer.wire_dtype), mine.form)
        try:
            self._half = self._transport.receiver(self._link)
        except ConnectionError as lost:
            raise Gone(f"connection lost: {lost}") from lost
        self.channel.watch(Heartbeat(self._receiver.lease, self._receiver.clock()), beat())
        self._receiver.connected(self.peer, self._transport.name)
        return True

    def _left_s(self) -> float:
        return self._ends_s - self._receiver.clock()

    def _source_of(self, peer: Peer, mine: KvShape) -> PartLayout:
        """The layout of the sender's blocks. Between different degrees, a sender on a device sends heads directly out
        of its blocks."""
        plain = PartLayout.to_send(peer.shape, mine, peer.wire_dtype)
        is_cut = self._transport.is_for_devices and not is_same_bytes(peer.shape, mine)
        try:
            return PartLayout.to_cut(peer.shape, mine) if is_cut and peer.wire_dtype == mine.dtype else plain
        except ConfigError:  # a sender in host memory sends converted blocks
            return plain

    def _serve(self) -> None:
        header = bytearray(HEADER_BYTES)
        assert self._half is not None
        self.channel.meanwhile = self._half.poll  # closes finished writes while the rest of a frame has not arrived
        while True:
            self.channel.fill(memoryview(header))
            frame = decode(header, self.chunk_bytes)
            if frame.kind is Kind.CHUNK:
                self._receive_chunk(frame, self._half)
            elif frame.kind is Kind.ANNOUNCE:
                self._announce(frame)
            elif frame.kind is Kind.RETRACT:
                text = bytearray(frame.length)
                self.channel.fill(memoryview(text))
                self._receiver.retract(
                    frame.tag, self.number, decode_text(bytes(text)), is_cancelled=frame.is_cancelled
                )
            elif frame.kind is not Kind.BEAT:
                raise BadFrame(f"a {frame.kind.name} frame from a sender")
            self.channel.flush()

    def _announce(self, frame: Frame) -> None:
        self._require_part(frame)
        self._receiver.announce(frame.tag, self.number, frame.part, self.target.count)

    def _require_part(self, frame: Frame) -> None:
        if frame.part.shard != self.target.index:
            raise BadFrame(f"shard {frame.part.shard} from the rank that has shard {self.target.index}")
        try:
            self.target.runs(frame.part)
        except ConfigError as error:
            raise BadFrame(error.message) from error

    def _receive_chunk(self, frame: Frame, half: ReceiveHalf) -> None:
        self._require_part(frame)
        if not 0 < self._link.size_of(frame) <= self.chunk_bytes:
            raise BadFrame(f"a chunk of {frame.count} blocks of {self.block_bytes} bytes, at most {self.chunk_bytes}")
        half.check(frame)
        stamps = bytearray(frame.count * STAMP_BYTES)
        self.channel.fill(memoryview(stamps))
        claim = self._receiver.claim(frame, self.number, bytes(stamps))
        half.receive(frame, claim if claim is None or self._unpacker is None else self._unpacker.staged(claim))

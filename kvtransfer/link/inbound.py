"""One connection from a prefill worker: its proof, on the listening thread, and then a thread that reads frames and
sends answers.

The transport receives a chunk's bytes. Before each write it asks the transfer table, through this connection, so no
byte is written after a transfer was reported as drained.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, final

from kvtransfer.link.channel import Channel, Gone, Silent, accepted
from kvtransfer.link.gate import LOCAL, Peer
from kvtransfer.protocol.frames import (
    GREETING_BYTES,
    HEADER_BYTES,
    STAMP_BYTES,
    BadFrame,
    Frame,
    Greeting,
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
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.tls.reasons import tls_failure

if TYPE_CHECKING:
    from kvtransfer.link.receiver import PlainReceiver

log = logging.getLogger(__name__)

#: From the accepted connection to the proof. A sender sends its greeting as soon as it is connected.
AUTHENTICATION_S: Final = 3.0


@final
class Accepted:
    """A connection that has not proven itself yet. It costs no thread: the listening thread does its TLS handshake and
    reads its greeting, as the bytes arrive."""

    __slots__ = ("_data", "_tls", "ends_s", "events", "fd", "has_sent", "host", "is_secured", "socket", "transport")

    def __init__(
        self, sock: socket.socket, transport: Transport, tls: ReloadingCertificates | None, now_s: float
    ) -> None:
        """Raises OSError if the peer has disconnected."""
        sock.setblocking(False)
        is_local = sock.family not in (socket.AF_INET, socket.AF_INET6)
        self.socket, self.transport = sock, transport
        self.fd = sock.fileno()  # TLS replaces the socket, but not the descriptor
        self.host = LOCAL if is_local else network_of(sock.getpeername()[0])
        self.ends_s = now_s + AUTHENTICATION_S
        self.events = selectors.EVENT_READ  # what `advance` waits for
        self.has_sent = False
        self.is_secured = tls is None or transport.is_same_host
        self._tls, self._data = tls, bytearray()

    def advance(self) -> Greeting | None:
        """Reads what has arrived, when the socket is ready. None while bytes are missing. Raises Gone, or BadFrame on
        invalid bytes and other versions as soon as they are visible."""
        self.has_sent = True
        if not self.is_secured and not self._shake_hands():
            return None
        part = bytearray(GREETING_BYTES)
        while len(self._data) < GREETING_BYTES:  # TLS may hold bytes that the selector does not see
            try:
                received = self.socket.recv_into(part, GREETING_BYTES - len(self._data))
            except BlockingIOError:
                return None
            except OSError as error:
                raise Gone(f"connection lost: {error}") from error
            if received == 0:
                raise Gone("connection closed by the peer")
            self._data += part[:received]
            decode_greeting(bytes(self._data))
        return decode_greeting(bytes(self._data))

    @property
    def missing(self) -> str:
        """Why it is rejected if its time is over now."""
        if not self.has_sent:
            return "it has sent nothing"
        return "no complete greeting in time" if self.is_secured else "no TLS handshake in time"

    def _shake_hands(self) -> bool:
        assert self._tls is not None
        self.events = selectors.EVENT_READ
        try:
            if not isinstance(self.socket, ssl.SSLSocket):
                self.socket = accepted(self.socket, self._tls.current().peer_server)
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.events = selectors.EVENT_WRITE
            return False
        except OSError as error:
            raise Gone(f"TLS handshake failed: {tls_failure(str(error)) or error}") from error
        self.is_secured = True
        return True


class Inbound(threading.Thread):
    """The thread of one connection of an authenticated sender, and the ReceiveLink of its transport."""

    def __init__(self, receiver: PlainReceiver, accepted: Accepted, peer: Peer, number: int) -> None:
        """Raises OSError if the process has no more descriptors."""
        super().__init__(name=f"kv-inbound-{number}", daemon=True)
        self.number, self.peer = number, peer
        self.pool, self.memory = receiver.pool, receiver.memory
        self.block_bytes, self.chunk_bytes = receiver.block_bytes, receiver.chunk_bytes
        self.channel = Channel(accepted.socket, clock=receiver.clock)
        self.enter, self.leave = receiver.enter, receiver.leave
        self._receiver, self._transport = receiver, accepted.transport
        self._half: ReceiveHalf | None = None
        self._unpacker: Unpacker | None = None  # if blocks arrive in another format

    def post(self, data: bytes) -> None:
        """Queues an answer, from any thread."""
        self.channel.post(data)

    def stop(self, reason: str = "closed on this side") -> None:
        self.channel.stop(reason)

    def run(self) -> None:
        error, is_peers_fault, is_silent = "the connection's thread died", False, False
        try:
            self._connect()
            self._serve()
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

    def _connect(self) -> None:
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

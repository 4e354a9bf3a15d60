"""tcp: a chunk's bytes follow its frame on the socket, which reads source blocks and writes granted blocks directly."""

from __future__ import annotations

import socket
from typing import Final, final

from kvtransfer.link.channel import Channel
from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.plan import advance
from kvtransfer.protocol.transfers import Claim, Job
from kvtransfer.transports.common.interface import OnHost, ReceiveHalf, ReceiveLink, SendHalf, SendLink
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

TCP: Final = transfer_pb2.TRANSPORT_KIND_TCP

_ANY_HOST: Final = ("0.0.0.0", "::", "")
CHUNK_BYTES: Final = 4 * 2**20
WAKE_BYTES: Final = 2**20  # smaller reads are not worth a system call, a lock and a wake
_SCRATCH_BYTES: Final = 64 * 1024


@final
class TcpSend:
    """Sends one chunk at a time. Its source blocks are read until all of it is written to the socket."""

    chunk_bytes = CHUNK_BYTES

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def is_free(self) -> bool:
        return self._link.writer.is_idle

    def post(self, job: Job) -> None:
        link = self._link
        views = link.views(job)
        head = link.head(job, link.digest(views), length=sum(map(len, views)))
        link.writer.stream([memoryview(head), *views], lambda: link.finished(job))

    def abandon(self, job: Job) -> None:
        """The frame must be completed so that the next one can be parsed. The rest is sent from a copy."""
        self._link.writer.detach()

    def on_credit(self, frame: Frame) -> None:
        raise BadFrame("a CREDIT frame, which tcp does not use")

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class TcpReceive:
    """Reads directly into the granted blocks. Before each read it checks that the transfer has not ended."""

    def __init__(self, link: ReceiveLink) -> None:
        self._link = link

    def check(self, frame: Frame) -> None:
        size = self._link.size_of(frame)
        if frame.length != size:
            raise BadFrame(f"a chunk of {frame.count} blocks with {frame.length} bytes, expected {size}")

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        if claim is None:
            discard(self._link.channel, frame.length)
            return
        link = self._link
        views = link.views(claim)
        rest, left = list(views), frame.length
        while left:
            if not link.enter(claim):
                discard(link.channel, left)
                return
            try:
                received = link.channel.receive(rest)
            finally:
                link.leave(claim)
            if received == 0:
                link.channel.wake_at(min(left, WAKE_BYTES))
                link.channel.wait()
            left -= received
            advance(rest, received)
        link.channel.wake_at(1)
        link.settle(claim, frame, link.digest(views))

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


def discard(channel: Channel, num_bytes: int) -> None:
    """Reads and discards bytes."""
    channel.wake_at(1)
    scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
    while num_bytes:
        received = channel.receive([scratch[:num_bytes]])
        if received == 0:
            channel.wait()
        num_bytes -= received


class TcpListener:
    """Listens and connects over TCP, for all transports that work between hosts."""

    is_same_host = False

    def listen(self, host: str) -> socket.socket:
        listener = socket.socket(_family(host), socket.SOCK_STREAM)
        listener.bind((host, 0))
        return listener

    def address(self, listener: socket.socket) -> str:
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        target = host_and_port(address, endpoint)
        sock = socket.socket(_family(target[0]), socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(target)
        except BaseException:
            sock.close()
            raise
        return sock

    def admits(self, sock: socket.socket) -> bool:
        return True


@final
class Tcp(OnHost, TcpListener):
    kind: int = TCP
    name = "tcp"
    order = 40
    has_slots = False

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        return sock, TcpSend()

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        return TcpReceive(link)


TRANSPORT: Final = Tcp()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(address: str, endpoint: str) -> tuple[str, int]:
    """Where to connect. For a receiver that listens on every address, the host is that of its gRPC endpoint."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host in _ANY_HOST:
        host = endpoint.rpartition(":")[0].strip("[]")
    return host, int(port)

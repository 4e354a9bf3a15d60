"""Accepts connections: keeps each one as a bare socket until its client has sent something, and does TLS handshakes.

All clients share the kernel's queue of connections, and wait for those before them. A bare socket costs a fifth of
asyncio's transport and uvicorn's protocol. So one client cannot open connections that send nothing much faster than
they are accepted and, above the limit, closed again.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

from pdserve.gateway.connection import LINGER_BYTES, LINGER_S, host_of
from pdserve.gateway.open_connections import Connections
from pdserve.listening import MAX_ACCEPTED
from pdserve.outage_log import LogLimit
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.tls.reasons import tls_failure

if TYPE_CHECKING:
    from pdserve.gateway.connection import Connection

# Connections that wait in the kernel; it has a limit of its own. If there is no room, a client tries again after 1 s.
KERNEL_BACKLOG: Final = 65_535
RETRY_S: Final = 1.0  # without descriptors or memory for another socket
_NO_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)
_DROPPED_BYTES: Final = 65_536  # at a time

log = logging.getLogger(__name__)


@final
class Arrivals:
    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        rejection: bytes,
    ) -> None:
        """Runs on the current event loop, until close(). `rejection` answers a client that makes room for others."""
        self.rejection = rejection
        self.connections = connections
        self._listener, self._make_protocol = listener, make_protocol
        self._bare: dict[int, Arrival] = {}  # by descriptor; the lingering ones too
        self._poll = select.epoll()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = LogLimit()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(KERNEL_BACKLOG)
        self._loop.add_reader(listener, self._accept)
        self._loop.add_reader(self._poll, self._hand_over)

    def close(self) -> None:
        """Idempotent."""
        if self._poll.closed:
            return
        self._loop.remove_reader(self._listener)
        self._loop.remove_reader(self._poll)
        for one in list(self._bare.values()):
            one.drop()
        self._poll.close()
        self._listener.close()

    def forget(self, descriptor: int) -> None:
        if self._bare.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    # ------------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        if self._tasks:  # those which have sent something are served before more are accepted
            return
        for _ in range(max(1, min(MAX_ACCEPTED, self.connections.limits.max_connections // 4))):
            try:
                self._accept_one()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                self._pause(error)
                break
        self._hand_over()

    def _accept_one(self) -> None:
        if self.connections.num_open >= self.connections.limits.max_connections:
            self._hand_over(reads_rejected=False)  # a connection whose request has come makes no room
        sock, _ = self._listener.accept()
        try:
            self._poll.register(sock, select.EPOLLIN)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        self._bare[sock.fileno()] = arrival = Arrival(sock, self)
        self.connections.num_open += 1
        if self.connections.make_room():
            self.connections.silent[arrival] = None
        else:
            arrival.end_idle()

    def _pause(self, error: OSError) -> None:
        """Because the event loop would call _accept() without end."""
        if count := self._failures.due(time.monotonic()):
            log.error("connections cannot be accepted", extra={"times": count, "cause": str(error)})
        self._loop.remove_reader(self._listener)
        self._loop.call_later(RETRY_S, self._resume)

    def _resume(self) -> None:
        if not self._poll.closed:
            self._loop.add_reader(self._listener, self._accept)

    def _hand_over(self, *, reads_rejected: bool = True) -> None:
        """`reads_rejected`: also drops what clients of rejected connections have sent. Once a turn, which bounds it."""
        for descriptor, _ in self._poll.poll(0):
            arrival = self._bare[descriptor]
            if not (reads_rejected or arrival.is_open):
                continue
            if not arrival.has_sent():
                arrival.drop()
            elif arrival.is_open:
                task = self._loop.create_task(self._connect(arrival.release()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _connect(self, sock: socket.socket) -> None:
        self.connections.num_open -= 1  # the protocol counts it
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, sock)
        except OSError:  # the client has closed it
            sock.close()


@final
class Arrival:
    """A connection whose client has sent nothing before its release or its rejection."""

    __slots__ = ("_arrivals", "_left_bytes", "_sock", "_timer", "is_open")

    def __init__(self, sock: socket.socket, arrivals: Arrivals) -> None:
        self._sock, self._arrivals = sock, arrivals
        self.is_open = True  # False: rejected. What its client sends is read and dropped.
        self._left_bytes = LINGER_BYTES
        self._wait(arrivals.connections.limits.header_s)

    def has_sent(self) -> bool:
        """False if the client has closed it, or has sent too much after the rejection. For a socket that is ready."""
        try:
            if self.is_open:
                return bool(self._sock.recv(1, socket.MSG_PEEK))
            num_bytes = len(self._sock.recv(_DROPPED_BYTES))
        except OSError:
            return False
        self._left_bytes -= num_bytes
        return num_bytes > 0 and self._left_bytes >= 0

    def release(self) -> socket.socket:
        """The socket, which still counts as open."""
        connections = self._arrivals.connections
        self._timer.cancel()
        self._arrivals.forget(self._sock.fileno())
        connections.silent.pop(self, None)
        connections.rejected.pop(self, None)
        return self._sock

    def drop(self) -> None:
        if self.is_open:
            self.is_open = False
            self._arrivals.connections.num_open -= 1
        self.release().close()

    def end_idle(self) -> None:
        """Its request may be on its way, so it gets an answer, and time to read it."""
        if not self._arrivals.rejection:
            self.drop()
            return
        self._timer.cancel()
        with contextlib.suppress(OSError):  # the client has closed it
            self._sock.send(self._arrivals.rejection, socket.MSG_MORE)  # in one packet with the end
            self._sock.shutdown(socket.SHUT_WR)
        self.is_open = False
        self._wait(LINGER_S)
        self._arrivals.connections.linger_silent(self)

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)


# --- TLS handshake --------------------------------------------------------------------------------------------
# The handshake of an accepted connection, under the same limits as a connection that sends nothing.
#
# uvicorn by itself would learn of a connection only after its handshake, and would wait a minute for it. So it accepts
# plain connections, and this protocol turns each into a TLS connection, with the current certificates.

# asyncio gives each TLS connection a buffer of this size for reading; its own 256 KiB would be 128 MiB for 512 of them.
asyncio.sslproto.SSLProtocol.max_size = 32 * 1024  # type: ignore[attr-defined]


@final
class Handshake(asyncio.Protocol):
    """`http` takes over once both sides agree. Before that, nothing is sent in plain text."""

    def __init__(self, http: Connection, connections: Connections, tls: ReloadingCertificates) -> None:
        self._http, self._all, self._tls = http, connections, tls
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport, self._is_open = transport, True
        self._all.num_open += 1
        transport.pause_reading()  # the first bytes belong to the handshake
        self._all.idle[self] = host_of(transport)
        if self._all.make_room():
            self._task = asyncio.get_running_loop().create_task(self._shake_hands())
        else:
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()

    def drop(self) -> None:
        self._transport.abort()

    end_idle = drop  # without TLS there is no way to answer

    async def _shake_hands(self) -> None:
        limit_s, early = self._all.limits.header_s, _EarlyBytes(self._transport)
        try:
            secured: Any = await asyncio.get_running_loop().start_tls(
                self._transport,
                early,
                self._tls.current().caller_server,
                server_side=True,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except OSError as error:  # the client does not use TLS, does not trust the certificate, or lacks one
            self._all.handshake_failed(tls_failure(str(error)) or str(error) or type(error).__name__)
            secured = None
        finally:
            self._leave()
        if secured is None or early.has_ended:
            self._transport.abort()
            return
        secured.set_protocol(self._http)
        self._http.connection_made(secured)
        if early.data:
            self._transport.resume_reading()
            self._http.data_received(bytes(early.data))

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._all.num_open -= 1
        self._all.idle.pop(self, None)


@final
class _EarlyBytes(asyncio.Protocol):
    """Keeps what a client sends together with the end of its handshake: one piece, and the rest stays in the kernel."""

    def __init__(self, plain: Any) -> None:
        self.data = bytearray()
        self.has_ended = False
        self._plain = plain  # transport below TLS

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._plain.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = True

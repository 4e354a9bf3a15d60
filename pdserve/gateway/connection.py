"""One HTTP connection: uvicorn's protocol, with limits on connections, headers and waits.

uvicorn itself waits without limit for a request's headers, accepts headers of any size, never drops a client that stops
reading, and loses the body of a request that offers another protocol. Bodies are limited in body.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pdserve.core.log_limit import LogLimit
from pdserve.gateway import errors, sse
from pdserve.gateway.handshake import Handshake

log = logging.getLogger(__name__)

KEEPALIVE_IDLE_S: Final = 20
KEEPALIVE_EVERY_S: Final = 10
KEEPALIVE_PROBES: Final = 2
# After an answer before the end of its request's body, at most this much of the body is read and dropped.
LINGER_S: Final = 5.0
LINGER_BYTES: Final = 64 * 2**20
MAX_LINGERING: Final = 128  # connections


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int
    max_header_bytes: int  # of a request line and its headers
    header_s: float  # time to receive these
    idle_s: float  # between two requests
    stall_s: float  # time that a client may read nothing


@final
@dataclass(slots=True)
class Connections:
    """All open connections of a server. Those without a request are closed first when there are too many."""

    limits: ConnectionLimits
    idle: OrderedDict[Connection | Handshake, None] = field(default_factory=OrderedDict)  # longest idle first
    lingering: OrderedDict[Connection, None] = field(default_factory=OrderedDict)  # oldest first
    num_open: int = 0  # without the lingering ones
    num_dropped: int = 0
    failures: LogLimit = field(default_factory=LogLimit)  # of TLS handshakes

    def handshake_failed(self, why: str) -> None:
        """Limited, because any process that reaches the port can cause failures."""
        if count := self.failures.due(time.monotonic()):
            log.warning("TLS handshakes failed", extra={"connections": count, "why": why})

    def make_room(self) -> bool:
        """Closes the longest idle connection if there are too many. False if none is idle."""
        if self.num_open <= self.limits.max_connections:
            return True
        self.num_dropped += 1
        if not self.idle:
            return False
        oldest, _ = self.idle.popitem(last=False)
        oldest.end_idle()
        return True

    def linger(self, connection: Connection) -> None:
        self.num_open -= 1
        self.idle.pop(connection, None)
        if len(self.lingering) >= MAX_LINGERING:
            oldest, _ = self.lingering.popitem(last=False)
            oldest.drop()
        self.lingering[connection] = None


@final
class Connection(HttpToolsProtocol):  # type: ignore[misc]
    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # of the request whose headers are being read
        self._is_in_head = True
        self._ignores_rest = False  # further data is read and dropped, so that a disconnect is noticed
        self._is_open = False
        self._num_answers = 0
        self._left_bytes = LINGER_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._is_open = True
        self._all.num_open += 1
        if not self._all.make_room():
            self._reject_busy()
            return
        _set_options(transport, self._all.limits.stall_s)
        self._all.idle[self] = None
        self._wait(self._all.limits.header_s)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_open:
            self._is_open = False
            self._all.num_open -= 1
        self._all.idle.pop(self, None)
        self._all.lingering.pop(self, None)
        self._stop_waiting()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._ignores_rest or self.parser is None:
            if self in self._all.lingering:
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    self.drop()
            return
        if self._is_in_head:
            # All earlier data belongs to the headers; this data may also contain a part of the body.
            if self._head_bytes > self._all.limits.max_header_bytes:
                self._reject_head()
                return
            if self._head_bytes == 0:
                self._wait(self._all.limits.header_s)
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # It could queue thousands. HTTP/1.1 lets a server answer fewer requests and then close the connection.
            raise httptools.HttpParserError("pipelined requests are not supported")
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._ignores_rest:
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > (
            self._all.limits.max_header_bytes
        ):
            self._reject_head()
            return
        if self._offers_protocol():
            return
        self._is_in_head, self._head_bytes = False, 0
        self._stop_waiting()
        self._all.idle.pop(self, None)
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self)

    def on_body(self, body: bytes) -> None:
        if not self._ignores_rest:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignores_rest and not self._offers_protocol():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_answers += 1
        if not self.transport.is_closing() and not self._ignores_rest:
            self._unset_keepalive_if_required()  # uvicorn's own timer ends with any byte
            self._is_in_head = True
            self._all.idle[self] = None
            self._wait(self._all.limits.idle_s)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # An error message would be inserted into the running answer.
            if self.cycle.more_body:
                self.drop()  # the body is broken
            else:
                self._ignores_rest = True
                self.cycle.keep_alive = False
            return
        self._reject(400, "invalid_request_error", "invalid_http", "a request that is not HTTP/1.1")

    def read_again(self, rest: bytes) -> None:
        """Parses the headers that were read without their offer of another protocol, and then `rest`."""
        is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        kept += [(b"connection", b"close")] * is_last
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % pair for pair in kept]
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def drop(self) -> None:
        self.transport.abort()

    def end_idle(self) -> None:
        """Ends an idle connection, to make room. If it is new, its request may be on its way, so it gets an answer."""
        if self._num_answers:
            self.drop()  # clients know that a connection that they use again may be closed
        else:
            self._reject_busy()

    def end_answer(self) -> None:
        """Closes the connection after its answer. While a client sends its body, that would make the kernel reset the
        connection, and the client could lose the answer. The body is then read and dropped first (RFC 9112, 9.6)."""
        if self.cycle is not None and self.cycle.more_body:
            self._ignores_rest = True
            self._linger()
        else:
            self.transport.close()

    # ------------------------------------------------------------------------------------------------------------

    def _offers_protocol(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self.drop)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reject_head(self) -> None:
        most = self._all.limits.max_header_bytes
        self._reject(431, "invalid_request_error", "headers_too_large", f"headers of over {most} bytes")

    def _reject(self, status: int, kind: str, code: str, message: str) -> None:
        if self._ignores_rest:
            return
        self._ignores_rest = True
        self._stop_waiting()
        body = sse.to_json(errors.body(message, kind, code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._linger()

    def _reject_busy(self) -> None:
        self._reject(503, "server_error", "too_many_connections", "too many open connections")

    def _linger(self) -> None:
        if not self._is_open or self.transport.is_closing():
            return
        self._is_open = False
        self._all.linger(self)
        self._wait(LINGER_S)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()


@final
class _AnswerTransport:
    """What uvicorn writes an answer to."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.write = connection, connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.end_answer()


@final
class _Parser(httptools.HttpRequestParser):  # type: ignore[misc]
    """Ignores the header `Upgrade`, as RFC 9110 (7.8) allows. llhttp ends such a request after its headers, but a
    client that offers HTTP/2 (curl --http2, Java's HttpClient) sends its body in HTTP/1.1."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: answer the first of several requests
        self._connection = connection

    def feed_data(self, data: bytes) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._connection.read_again(data[offer.args[0] :])


def _set_options(transport: asyncio.Transport, stall_s: float) -> None:
    """Makes the kernel send each chunk at once, and close a connection whose client reads nothing or whose host has
    disappeared (Linux only)."""
    sock = transport.get_extra_info("socket")
    # asyncio sets it only on sockets that were made with the number of TCP; without it, a chunk waits 40 ms for an ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

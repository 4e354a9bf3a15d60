"""One HTTP connection: uvicorn's protocol, with limits on connections, headers and waits.

uvicorn itself waits without limit for a request's headers, accepts headers, trailers and chunk extensions of any size,
never drops a client that stops reading, and loses the body of a request that offers another protocol. Bodies are
limited in app.py, requests per caller in app.py.

Each byte of a connection is counted: as a part of a head, of a body, of a chunked body's framing, or as dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pdserve.core.access.hosts import network_of
from pdserve.core.errors import ShuttingDown
from pdserve.gateway.api import errors, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.open_connections import Connections

KEEPALIVE_IDLE_S: Final = 20
KEEPALIVE_EVERY_S: Final = 10
KEEPALIVE_PROBES: Final = 2
# A request with a body up to this size is rejected without being served, and its connection stays open.
SHED_BYTES: Final = 65_536
# After an answer before the end of its request's body, at most this much of the body is read and dropped.
LINGER_S: Final = 5.0
LINGER_BYTES: Final = 64 * 2**20
# Heads and chunked bodies are parsed in pieces of this size, so that little is parsed beyond a limit.
PIECE_BYTES: Final = 1024
# A byte of a body may have this many bytes of framing; a chunk of two bytes has 2.5 for each.
FRAMING_SHARE: Final = 4
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


@final
class Connection(HttpToolsProtocol):  # type: ignore[misc]
    url: bytes  # the target of the request that is being read

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
        self._left_bytes = LINGER_BYTES  # that are still read and dropped
        self._shed: ErrorReply | None = None  # the answer to the request whose body is being read and dropped
        self._has_shed = False  # a request that ended in the data that is being read
        self._is_chunked = False  # the body that is being read
        self._body_bytes = self._framing_bytes = self._trailer_bytes = 0  # of that body

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_HeadHoldingTransport(transport, self.loop))  # type: ignore[arg-type]
        self._is_open = True
        self._host = host_of(transport)
        self._all.num_open += 1
        if not self._all.make_room():
            self._reject_idle()
            return
        self._all.idle[self] = self._host
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
        self._has_shed = False
        if len(data) <= PIECE_BYTES:
            self._feed(data)
            return
        view = memoryview(data)
        while view:
            # A shed request leaves no cycle that would keep the parser from what follows its body.
            is_counted = self._is_in_head or self._is_chunked or self._shed is not None
            size = PIECE_BYTES if is_counted and not self._ignores_rest else len(view)
            self._feed(view[:size])
            view = view[size:]

    def _feed(self, data: bytes | memoryview) -> None:
        if self._ignores_rest or self.parser is None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                self.drop()
            return
        if self._is_in_head or not (self._shed is not None or self.cycle.more_body):  # blank lines may follow a body
            # All earlier data belongs to the headers; this data may also contain a part of the body.
            if self._head_bytes > self._all.limits.max_header_bytes:
                self._reject_head() if self._is_in_head else self._ignore_rest()
                return
            if self._head_bytes == 0 and self._is_in_head:
                self._wait(self._all.limits.header_s)
            self._head_bytes += len(data)
            super().data_received(data)
        elif self._is_chunked:
            before = self._body_bytes
            super().data_received(data)
            self._count_framing(len(data), self._body_bytes - before)
        else:
            super().data_received(data)

    def on_message_begin(self) -> None:
        if self._has_shed or self._is_answering():
            # It could queue thousands. HTTP/1.1 lets a server answer fewer requests and then close the connection.
            raise httptools.HttpParserError("pipelined requests are not supported")
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)
            return
        # A trailer is dropped: merged into the headers, it could authorize a request (RFC 9110, 6.5.1).
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._all.limits.max_header_bytes:
            self._reject_head("trailers")

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
        if found := self._fault():
            self._reject(*found)
            return
        self._is_in_head, self._head_bytes = False, 0
        self._body_bytes = self._framing_bytes = self._trailer_bytes = 0
        self._shed = self._shed_answer()
        if self._shed is not None:  # it stays among the idle ones, because it is in no caller's share
            self._wait(self._all.limits.header_s, self._end_shed)
            return
        self._stop_waiting()
        self._all.idle.pop(self, None)
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self)
        self.transport.is_head_next = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._ignores_rest and self._shed is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._shed is not None and not self._ignores_rest:
            self._send_shed(self._shed)
            self._has_shed = True
            self._await_request()
        elif not self._ignores_rest and not self._offers_protocol():
            super().on_message_complete()
            if self._is_chunked:
                self._is_chunked = False
                self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_answers += 1
        if self.transport.is_closing() or self._ignores_rest:
            return
        if self.cycle.more_body:  # the rest of the body must not be taken for a request
            self._stop_waiting()
            self.end_answer()
        else:
            self._unset_keepalive_if_required()  # uvicorn's own timer ends with any byte
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        if self._ignores_rest:
            return
        if self._has_shed:  # its answer has been sent
            self._ignores_rest = True
            self._linger()
            return
        if self._is_answering() and not self.cycle.more_body:
            self._ignore_rest()  # an error message would be inserted into the running answer
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
        """Ends an idle connection. If it is new, its request may be on its way, so it gets an answer."""
        if self._shed is not None:
            self._end_shed()
        elif self._num_answers:
            self.drop()  # clients know that a connection that they use again may be closed
        else:
            self._reject_idle()

    def shutdown(self) -> None:
        """By uvicorn, which does not know of a shed request."""
        if self._shed is not None:
            self._end_shed()
        else:
            super().shutdown()

    def end_answer(self) -> None:
        """Closes the connection after its answer. While a client sends its body, that would make the kernel reset the
        connection, and the client could lose the answer. The body is then read and dropped first (RFC 9112, 9.6)."""
        if self.cycle is not None and self.cycle.more_body:
            self._ignores_rest = True
            self._linger()
        else:
            self.transport.close()

    # ------------------------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        """After an answer; the connection stays open."""
        self._is_in_head = True
        self._all.idle[self] = self._host
        self._wait(self._all.limits.idle_s)

    def _shed_answer(self) -> ErrorReply | None:
        """The answer to a request that is rejected by its head alone; None: it is served. A request of unknown or large
        size, or whose client does not read its answers, is served, and then rejected within it."""
        is_plain = self.parser.get_method() == b"POST" and not self._is_chunked and self.parser.should_keep_alive()
        if not is_plain or self.expect_100_continue or self.flow.write_paused or self._is_answering():
            return None
        sizes = [value for name, value in self.headers if name == b"content-length"]
        if not (len(sizes) == 1 and sizes[0].isdigit() and len(sizes[0]) <= 6 and int(sizes[0]) <= SHED_BYTES):
            return None
        return self._all.shed(self.url, self.headers)

    def _send_shed(self, found: ErrorReply, more_head: bytes = b"") -> None:
        more = [b"%s: %s\r\n" % pair for pair in self.server_state.default_headers]
        more += [f"{name}: {value}\r\n".encode() for name, value in found.headers]
        self.transport.write(b"".join(_json_answer(found.status, found.body, b"".join([*more, more_head]))))
        self._shed = None
        self._num_answers += 1

    def _end_shed(self) -> None:
        """Answers before the body has come, and closes the connection."""
        assert self._shed is not None
        self._send_shed(self._shed, b"connection: close\r\n")
        self._ignores_rest = True
        self._linger()

    def _offers_protocol(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _wait(self, seconds: float, then: Callable[[], None] | None = None) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, then or self.drop)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ignore_rest(self) -> None:
        self._ignores_rest = True
        self.cycle.keep_alive = False

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _fault(self) -> tuple[int, str, str, str] | None:
        """Why the head of a request is refused although llhttp accepts it (RFC 9110 and 9112)."""
        version, codings, hosts = self.parser.get_http_version(), [], []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value.strip().lower())
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    return 417, "invalid_request_error", "expectation_failed", "an expectation other than 100-continue"
                self.expect_100_continue = version != "1.0"
        self._is_chunked = bool(codings)
        if len(hosts) > 1 or (not hosts and version != "1.0") or not all(map(_HOST.fullmatch, hosts)):
            return _invalid(f"{len(hosts)} host headers or an invalid one; a request has one, HOST or HOST:PORT")
        if version not in ("1.0", "1.1"):
            return 505, "invalid_request_error", "invalid_http", "a version other than HTTP/1.1 and HTTP/1.0"
        if codings and version == "1.0":
            return _invalid("a transfer-encoding in HTTP/1.0")
        if codings and codings != [b"chunked"]:
            return 501, "invalid_request_error", "unknown_coding", "a transfer-encoding other than chunked"
        if b"#" in self.url:
            return _invalid("a target with a fragment")
        if self.url == b"*" and self.parser.get_method() == b"OPTIONS":
            self.url = b"/"
        return None if self.url.startswith(b"/") else self._take_authority()

    def _take_authority(self) -> tuple[int, str, str, str] | None:
        """Of a target in absolute form, which proxies use: its host is the one that counts (RFC 9112, 3.2.2)."""
        scheme, separator, rest = self.url.partition(b"://")
        authority, path = re.match(rb"([^/?]*)(.*)", rest).groups()  # type: ignore[union-attr]
        if (
            not separator
            or scheme.lower() not in (b"http", b"https")
            or not _HOST.fullmatch(authority)
            or not authority
        ):
            return _invalid("a target other than a path or an http URL")
        self.url = path if path.startswith(b"/") else b"/" + path
        self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", authority)]
        return None

    def _count_framing(self, num_bytes: int, body_bytes: int) -> None:
        """Of a piece of a chunked body: sizes, extensions and trailers. They have as much time as headers."""
        if self._ignores_rest or not self._is_chunked:
            return
        self._framing_bytes += num_bytes - body_bytes
        most = self._all.limits.max_header_bytes
        if self._framing_bytes > most + FRAMING_SHARE * self._body_bytes:
            what = f"over {most} bytes of chunk sizes, extensions or trailers"
            self._reject(400, "invalid_request_error", "invalid_http", what)
        elif body_bytes:
            self._stop_waiting()
        elif self._timer is None and num_bytes > 2:  # not the end of a chunk, after which a client may pause
            self._wait(self._all.limits.header_s, self._reject_late)

    def _reject_late(self) -> None:
        what = f"chunk sizes, extensions or trailers took over {self._all.limits.header_s:g} s"
        self._reject(408, "timeout_error", "deadline", what)

    def _reject_head(self, what: str = "headers") -> None:
        most = self._all.limits.max_header_bytes
        self._reject(431, "invalid_request_error", "headers_too_large", f"{what} of over {most} bytes")

    def _reject(self, status: int, kind: str, code: str, message: str) -> None:
        if self._ignores_rest:
            return
        self._ignores_rest = True
        self._stop_waiting()
        if self._is_answering():  # its body is still being received
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True  # for the application
            self.cycle.message_event.set()
            if has_begun:
                self.drop()
                return
        head, body = _rejection(status, kind, code, message)
        is_head = self.parser is not None and self.parser.get_method() == b"HEAD"
        self.transport.write(head if is_head else head + body)
        self.transport.flush()
        self._linger()

    def _reject_idle(self) -> None:
        self._reject(*(_ENDING if self._all.is_ending else _BUSY))

    def _linger(self) -> None:
        if not self._is_open or self.transport.is_closing():
            return
        self._is_open = False
        self._all.linger(self)
        self._wait(LINGER_S)
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has closed the connection
                self.transport.write_eof()
        self.flow.resume_reading()


@final
class _HeadHoldingTransport:
    """Sends the head of an answer with what follows in the same turn of the event loop, because a system call costs
    more than the chunk of a token."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._call_soon = transport, loop.call_soon
        self._held = b""
        self.is_head_next = False  # the next data is held
        self.get_extra_info, self.is_closing = transport.get_extra_info, transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading
        self.can_write_eof = transport.can_write_eof

    def write(self, data: bytes) -> None:
        if self.is_head_next:
            self.is_head_next, self._held = False, data
            self._call_soon(self.flush)
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def flush(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            if not self.is_closing():  # the client has not disconnected
                self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()


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


def _rejection(status: int, kind: str, code: str, message: str) -> tuple[bytes, bytes]:
    return _json_answer(status, errors.body(message, kind, code), b"connection: close\r\n")


def _json_answer(status: int, value: Mapping[str, Any], more_head: bytes) -> tuple[bytes, bytes]:
    """Head and body."""
    body = sse.to_json(value)
    head = b"content-type: application/json\r\ncontent-length: %d\r\n%s\r\n" % (len(body), more_head)
    return STATUS_LINE[status] + head, body


_BUSY: Final = (503, "server_error", "too_many_connections", "too many open connections")
BUSY: Final = b"".join(_rejection(*_BUSY))
_ENDING: Final = (503, "server_error", ShuttingDown.reason.lower(), ShuttingDown().message)


def host_of(transport: asyncio.BaseTransport) -> str:
    """Empty if the client has closed the connection."""
    peer = transport.get_extra_info("peername")
    return network_of(peer[0]) if peer else ""


def _invalid(message: str) -> tuple[int, str, str, str]:
    return 400, "invalid_request_error", "invalid_http", message


def set_options(listener: socket.socket, stall_s: float) -> None:
    """Of the connections that it accepts from now on. The kernel sends each chunk at once, and closes a connection
    whose client reads nothing or whose host has disappeared (Linux only)."""
    # Without it, a chunk waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

"""The rules of RFC 9110 and 9112 on the gateway's port, and limits on every part of a request outside of its body."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from pdserve.gateway.arrivals import _EarlyBytes
from pdserve.gateway.connection import (
    LINGER_BYTES,
    PIECE_BYTES,
    Connection,
)
from pdserve.gateway.open_connections import ConnectionLimits, Connections
from tests.unit.gateway.conftest import Served, gateway, read_all, serve, until
from tests.unit.gateway.test_limits import code_of, exchange, read_one, status_of

Connect = Callable[[str], socket.socket]
MOST = 16_384  # bytes of headers
BODY = b'{"prompt": "hello"}'
JSON = b"content-type: application/json\r\n"
CHUNKED = b"host: x\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SIZED = b"content-length: %d\r\n" % len(BODY)


def get(lines: bytes = b"host: x\r\n", target: bytes = b"/health", version: bytes = b"1.1") -> bytes:
    return b"GET %s HTTP/%s\r\n%sconnection: close\r\n\r\n" % (target, version, lines)


def tokenize(rest: bytes) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n" + rest


HEADS = {
    "no host": (get(b""), 400),
    "no host in 1.0": (get(b"", version=b"1.0"), 200),
    "two hosts": (get(b"host: x\r\nhost: x\r\n"), 400),
    "two hosts in 1.0": (get(b"host: x\r\nhost: x\r\n", version=b"1.0"), 400),
    "a path in the host": (get(b"host: x/y\r\n"), 400),
    "a user in the host": (get(b"host: a@b\r\n"), 400),
    "a folded line": (get(b"host: x\r\na: b\r\n c\r\n"), 400),
    "a space before the colon": (get(b"host: x\r\na : b\r\n"), 400),
    "a space before the first line": (get(b" a: b\r\nhost: x\r\n"), 400),
    "a line that ends in LF": (get(b"host: x\r\na: b\n"), 400),
    "CR in a value": (get(b"host: x\r\na: b\rc\r\n"), 400),
    "NUL in a value": (get(b"host: x\r\na: b\0c\r\n"), 400),
    "DEL in an id": (get(b"host: x\r\nx-request-id: b\x7fc\r\n"), 400),
    "an absolute target": (get(target=b"http://x/health"), 200),
    "an absolute target without a path": (get(target=b"http://x"), 307),
    "an absolute target with a user": (get(target=b"http://a@x/health"), 400),
    "another scheme": (get(target=b"ftp://x/health"), 400),
    "a target without a slash": (get(target=b"health"), 400),
    "a fragment": (get(target=b"/health#x"), 400),
    "a target outside of ASCII": (get(target=b"/h\xc3\xa9"), 400),
    "an asterisk": (get(target=b"*"), 400),
    "OPTIONS": (b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
    "another version": (get(version=b"2.0"), 505),
    "an unknown version": (get(version=b"1.2"), 400),
    "an unknown expectation": (get(b"host: x\r\nexpect: more\r\n"), 417),
}
BODIES = {
    "a size": (tokenize(b"host: x\r\n" + SIZED + b"\r\n" + BODY), 200),
    "chunks": (tokenize(CHUNKED + CHUNKS), 200),
    "size and coding": (tokenize(SIZED + CHUNKED + CHUNKS), 400),
    "coding and size": (tokenize(b"transfer-encoding: chunked\r\nhost: x\r\n" + SIZED + b"\r\n" + CHUNKS), 400),
    "two sizes": (tokenize(b"host: x\r\n" + SIZED + SIZED + b"\r\n" + BODY), 400),
    "a list of sizes": (tokenize(b"host: x\r\ncontent-length: 19, 19\r\n\r\n" + BODY), 400),
    "a signed size": (tokenize(b"host: x\r\ncontent-length: +19\r\n\r\n" + BODY), 400),
    "gzip": (tokenize(b"transfer-encoding: gzip, chunked\r\nhost: x\r\n\r\n" + CHUNKS), 501),
    "gzip in its own line": (tokenize(b"transfer-encoding: gzip\r\n" + CHUNKED + CHUNKS), 501),
    "chunked is not last": (tokenize(b"transfer-encoding: chunked, gzip\r\nhost: x\r\n\r\n" + CHUNKS), 400),
    "chunked twice": (tokenize(b"transfer-encoding: chunked\r\n" + CHUNKED + CHUNKS), 400),
    "identity": (tokenize(b"transfer-encoding: identity\r\nhost: x\r\n\r\n" + CHUNKS), 501),
    "chunks in 1.0": (b"POST /tokenize HTTP/1.0\r\n" + CHUNKED + CHUNKS, 400),
    "a size with 0x": (tokenize(CHUNKED + b"0x13\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a size with a space": (tokenize(CHUNKED + b"13 \r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a size line that ends in LF": (tokenize(CHUNKED + b"13\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a size over 64 bits": (tokenize(CHUNKED + b"1" + b"0" * 16 + b"\r\n"), 400),
    "a chunk without its end": (tokenize(CHUNKED + b"13\r\n" + BODY + b"0\r\n\r\n"), 400),
    "an extension": (tokenize(CHUNKED + b"13;a=b\r\n" + BODY + b"\r\n0\r\n\r\n"), 200),
    "a folded trailer": (tokenize(CHUNKED + b"13\r\n" + BODY + b"\r\n0\r\na: b\r\n c\r\n\r\n"), 400),
}


@pytest.mark.parametrize(("data", "status"), [*HEADS.values(), *BODIES.values()], ids=[*HEADS, *BODIES])
def test_the_form_of_a_request_is_checked(toy: Served, raw: Connect, data: bytes, status: int) -> None:
    answer = exchange(raw(toy.address), data)
    assert status_of(answer) == status
    assert answer.count(b"HTTP/1.1 %d" % status) == 1


def test_a_redirect_does_not_name_the_callers_host(toy: Served, raw: Connect) -> None:
    for target in (b"/ui/", b"/", b"/docs//", b"http://evil.example/ui/"):
        for host in (b"evil.example", b"evil.example/ui/?", b"["):
            answer = exchange(raw(toy.address), get(b"host: %s\r\n" % host, target))
            assert b"evil" not in answer
            assert status_of(answer) in (307, 400)


def test_the_host_of_an_absolute_target_counts(toy: Served, raw: Connect) -> None:
    """A page of another site could otherwise call the port by its own name (DNS rebinding)."""
    for target, status in ((b"http://evil.example/v1/models", 403), (b"http://127.0.0.1:1/v1/models", 200)):
        assert status_of(exchange(raw(toy.address), get(b"host: localhost\r\n", target))) == status


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/v1/models", "/version", "/load", "/metrics", "/ui", "/docs", "/"]
)
def test_head_is_answered_like_get_without_a_body(toy: Served, path: str) -> None:
    given, head = httpx.get(f"{toy.url}{path}"), httpx.head(f"{toy.url}{path}")
    assert (head.status_code, head.content) == (given.status_code, b"")
    if path not in ("/metrics", "/load"):  # Whose text changes.
        without = {name: value for name, value in given.headers.items() if name != "date"}
        assert {name: value for name, value in head.headers.items() if name != "date"} == without


def test_head_of_the_live_view_takes_no_viewers_place(bundled: Served, raw: Connect) -> None:
    for _ in range(12):  # More than the router allows at a time; all stay open.
        connection = raw(bundled.address)
        connection.sendall(b"HEAD /ui/events HTTP/1.1\r\nhost: x\r\n\r\n")
        found = b""
        while b"\r\n\r\n" not in found:
            found += connection.recv(65_536)
        assert status_of(found) == 200
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in found
    with httpx.stream("GET", f"{bundled.url}/ui/events") as answer:
        assert answer.status_code == 200


def test_a_request_id_is_encoded_once(toy: Served, raw: Connect) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1}'
    for given, status in (("é-Ω", 200), ("plain", 200), ("100%25", 200)):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + JSON
        head += b"x-request-id: %s\r\n" % given.encode()
        answer = exchange(raw(toy.address), head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert status_of(answer) == status
        assert b"x-request-id: %s\r\n" % given.encode() in answer
        assert toy.sdk.explain(given).request_id == given
    latin = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: \xe9\r\n" + JSON
    assert status_of(exchange(raw(toy.address), latin + b"content-length: %d\r\n\r\n" % len(body) + body)) == 400


def test_a_trailer_authorizes_nothing(raw: Connect) -> None:
    with serve(token="right") as served:
        head = tokenize(CHUNKED) + b"%x\r\n%s\r\n" % (len(BODY), BODY)
        answer = exchange(raw(served.address), head + b"0\r\nauthorization: Bearer right\r\n\r\n")
        assert (status_of(answer), code_of(answer)) == (401, "invalid_api_key")


def test_the_rest_of_a_body_is_not_taken_for_a_request(toy: Served, raw: Connect) -> None:
    hidden = get()
    for path in (b"/nothing", b"/ping"):
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, len(hidden) + 5)
        connection = raw(toy.address)
        connection.sendall(head)
        first = read_one(connection)
        assert status_of(first) in (200, 404)
        with contextlib.suppress(OSError):
            connection.sendall(b"12345" + hidden)
        assert read_all(connection) == b""


class Wire(asyncio.Transport):
    """Keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return socket.socket() if name == "socket" else default

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_aborted

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    close = abort


async def waits(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def connect() -> tuple[Connection, Wire]:
    limits = ConnectionLimits(max_connections=8, max_header_bytes=MOST, header_s=10.0, idle_s=10.0, stall_s=10.0)
    config = uvicorn.Config(waits, ws="none", lifespan="off", log_config=None)
    connection = Connection(config, ServerState(), {}, connections=Connections(limits=limits))
    wire = Wire()
    connection.connection_made(wire)
    return connection, wire


HEAD = b"POST /tokenize HTTP/1.1\r\n" + CHUNKED
UNCOUNTED = {
    "header line": (b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"v"),
    "header lines": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n"),
    "spaces of a header": (b"GET / HTTP/1.1\r\nhost: x\r\na:", b" "),
    "path": (b"GET /", b"p"),
    "blank lines": (b"", b"\r\n"),
    "trailer": (HEAD + b"1\r\n{\r\n0\r\na: ", b"v"),
    "name of a trailer": (HEAD + b"0\r\n", b"v"),
    "trailers": (HEAD + b"0\r\n", b"a: b\r\n"),
    "extension": (HEAD + b"1;a=", b"v"),
    "name of an extension": (HEAD + b"1;", b"v"),
    "zeros of a size": (HEAD, b"0"),
    "chunks of a byte": (HEAD, b"1\r\na\r\n"),
    "chunks with extensions": (HEAD, b"1;aaaaaaaaaa\r\na\r\n"),
}


@pytest.mark.parametrize("size", [1, 7, 300, 65_536], ids=str)
@pytest.mark.parametrize(("head", "piece"), UNCOUNTED.values(), ids=list(UNCOUNTED))
async def test_every_part_outside_of_a_body_is_limited(head: bytes, piece: bytes, size: int) -> None:
    """The bytes until the answer are counted, whatever the pieces in which they arrive."""
    connection, wire = connect()
    connection.data_received(head)
    data = (piece * 200_000)[: 16 * MOST]
    taken = 0
    for start in range(0, len(data), size):
        if wire.written:
            break
        connection.data_received(data[start : start + size])
        taken += size
    assert wire.written.split(b" ")[1] in (b"400", b"431")
    assert taken < 6 * (MOST + PIECE_BYTES) + size
    assert connection._framing_bytes <= 5 * MOST + PIECE_BYTES
    connection.connection_lost(None)


async def test_parts_within_their_limits_are_taken() -> None:
    connection, wire = connect()
    connection.data_received(HEAD)
    for _ in range(1000):
        connection.data_received(b"2\r\n{}\r\n" * 10)  # 2.5 bytes of framing for each of the body
    connection.data_received(b"0\r\na: " + b"v" * (MOST - 100) + b"\r\n\r\n")
    assert not wire.written
    assert connection._body_bytes == 20_000
    assert not connection.cycle.more_body
    connection.connection_lost(None)


async def test_a_head_is_sent_with_what_follows_at_once() -> None:
    connection, wire = connect()
    connection.data_received(get())  # `waits` answers nothing
    connection.transport.write(b"head, ")
    assert not wire.written
    connection.transport.write(b"chunk")
    assert wire.written == b"head, chunk"
    connection.transport.write(b", next")
    assert wire.written == b"head, chunk, next"
    await asyncio.sleep(0)
    assert wire.written == b"head, chunk, next"
    connection.connection_lost(None)


async def test_a_head_alone_is_sent_in_the_next_turn() -> None:
    connection, wire = connect()
    connection.data_received(get())
    connection.transport.write(b"head")
    await asyncio.sleep(0)
    assert wire.written == b"head"
    connection.connection_lost(None)


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_an_end_sends_what_was_written_before(end: str) -> None:
    """asyncio's transport would have sent it already."""
    connection, wire = connect()
    connection.data_received(get())
    connection.transport.write(b"head")
    getattr(connection.transport, end)()
    assert wire.written == b"head"
    assert wire.is_aborted
    await asyncio.sleep(0)
    assert wire.written == b"head"
    connection.connection_lost(None)


@pytest.mark.parametrize("kept", [b"keep-alive", b"close"])
async def test_dropped_bytes_are_counted(kept: bytes) -> None:
    """After a pipelined request, data is dropped while the answer runs."""
    connection, wire = connect()
    connection.data_received(get().replace(b"close", kept) + get())
    for _ in range(LINGER_BYTES // 2**20 + 3):  # two of them before it is clear that they are dropped
        connection.data_received(bytes(2**20))
    assert wire.is_aborted
    assert not wire.written
    connection.connection_lost(None)


@pytest.mark.parametrize("rest", [b"0\r\na: ", b"1;a=", b"000"], ids=["trailer", "extension", "zeros"])
def test_framing_that_does_not_end_is_answered_in_time(toy: Served, raw: Connect, rest: bytes) -> None:
    with gateway(toy.router, header_s=0.3, body_s=600.0) as host:
        answer = exchange(raw(host.address), tokenize(CHUNKED) + b"1\r\n{\r\n" + rest + b"0" * 2000)
        assert (status_of(answer), code_of(answer)) == (408, "deadline")
        until(lambda: not host._server._connections.num_open)


def test_bytes_after_a_handshake_are_not_collected() -> None:
    paused: list[bool] = []

    class Plain:
        def pause_reading(self) -> None:
            paused.append(True)

    early = _EarlyBytes(Plain())
    early.data_received(b"GET")
    assert paused == [True]

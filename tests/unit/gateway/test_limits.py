"""Limits of the gateway's port: each applies, and callers within the limits are served at the same time."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import openai
import pytest

from pdserve import Client, ConfigError, Unauthenticated
from pdserve.gateway import connection, open_connections
from pdserve.listening import MAX_ACCEPTED
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, is_idle, read_all, serve, until

Connect = Callable[[str], socket.socket]
OK = b'{"prompt": "hello", "max_tokens": 2}'


def post(body: bytes = OK, path: str = "/v1/completions", **headers: str) -> bytes:
    given = {"host": "x", "content-length": str(len(body)), "connection": "close", "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def code_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return read_all(connection)


def read_one(connection: socket.socket) -> bytes:
    """One answer of a connection that stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(65_536)
    head, _, body = found.partition(b"\r\n\r\n")
    [size] = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < size:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def test_a_small_request_is_answered(toy: Served, raw: Connect) -> None:
    assert status_of(exchange(raw(toy.address), post())) == 200


def test_many_connections_wait_for_a_busy_gateway(toy: Served, raw: Connect) -> None:
    """Without room in the kernel, a client's attempt would be dropped, and repeated after a second."""
    is_over, is_busy = threading.Event(), threading.Event()
    with gateway(toy.router) as host, contextlib.ExitStack() as stack:
        stack.callback(is_over.set)

        def block() -> None:
            is_busy.set()
            is_over.wait(2 * WAIT_S)

        host._loop.call_soon_threadsafe(block)
        assert is_busy.wait(WAIT_S)
        name, _, port = host.address.rpartition(":")
        opened = [stack.enter_context(socket.socket()) for _ in range(2 * MAX_ACCEPTED)]
        for one in opened:
            one.setblocking(False)
            one.connect_ex((name, int(port)))
        # Over loopback, a connection is established at once (state 1), or dropped.
        states = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] for one in opened]
        assert states == [1] * len(opened)


def test_a_chunk_does_not_wait_for_an_acknowledgement(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        connection = raw(host.address)
        connection.sendall(post(connection="keep-alive"))
        assert status_of(read_one(connection)) == 200
        until(lambda: len(host._server._connections.idle) == 1)
        [accepted] = host._server._connections.idle
        sock = accepted.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_body_is_rejected_by_its_declared_size(toy: Served, raw: Connect) -> None:
    answer = exchange(raw(toy.address), post(b"", content_length=str(100 * 2**20)))
    assert (status_of(answer), code_of(answer)) == (413, "body_too_large")


def test_a_chunked_body_is_limited(toy: Served, raw: Connect) -> None:
    connection = raw(toy.address)
    connection.sendall(post(b"", content_length="", transfer_encoding="chunked"))
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    sent = 0
    try:
        for _ in range(1600):  # 100 MiB
            connection.sendall(chunk)
            sent += 1
    except OSError:
        pass  # The server has closed the connection.
    assert sent < 1600
    answer = read_all(connection)
    assert not answer or status_of(answer) == 413


def test_openais_client_reads_why_its_body_is_rejected(toy: Served) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        toy.openai.completions.create(model="toy", prompt="x" * 5_000_000)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"v" * 1000) for n in range(64)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"v" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"p" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["many", "long", "path"],
)
def test_large_heads_are_rejected(toy: Served, raw: Connect, head: bytes) -> None:
    connection = raw(toy.address)
    try:
        connection.sendall(head)
    except OSError:
        return  # Closed before everything was sent.
    answer = read_all(connection)
    assert not answer or (status_of(answer), code_of(answer)) == (431, "headers_too_large")


def test_an_endless_head_is_rejected(toy: Served, raw: Connect) -> None:
    connection = raw(toy.address)
    connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
    with pytest.raises(OSError):
        connection.sendall(b"v" * 100_000_000)


@pytest.mark.parametrize(
    "data", [b"", b"G", b"GET /health HTTP/1.1\r\nx: y\r\n", b"\r\n"], ids=["nothing", "byte", "head", "line"]
)
def test_a_missing_head_ends_the_connection(toy: Served, raw: Connect, data: bytes) -> None:
    with gateway(toy.router, header_s=0.3) as host:
        connection = raw(host.address)
        connection.sendall(data)
        assert read_all(connection) == b""


def test_a_slow_head_ends_the_connection(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, header_s=0.3) as host:
        connection = raw(host.address)
        connection.settimeout(0.02)
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s:
            try:
                connection.sendall(b"\r\n")
                if connection.recv(10) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        pytest.fail("the connection is still open")


def test_a_missing_body_times_out(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, body_s=0.3) as host:
        answer = exchange(raw(host.address), post(b"{", content_length="100"))
    assert (status_of(answer), code_of(answer)) == (408, "deadline")


def test_an_idle_connection_is_closed_after_its_answer(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, idle_s=0.3) as host:
        answer = exchange(raw(host.address), post(connection="keep-alive"))
    assert status_of(answer) == 200


def test_a_new_connection_closes_the_longest_idle_one(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=3) as host:
        idle = [raw(host.address) for _ in range(3)]
        for one in idle:  # In this order.
            one.sendall(post(connection="keep-alive"))
            assert status_of(read_one(one)) == 200
        assert status_of(exchange(raw(host.address), post())) == 200
        assert read_all(idle[0]) == b""
        idle[1].sendall(post())
        assert status_of(read_all(idle[1])) == 200


def test_a_connection_that_makes_room_before_its_first_answer_gets_one(toy: Served, raw: Connect) -> None:
    """Its request may be on its way: a client must not take a full gateway for a broken one."""
    with gateway(toy.router, max_connections=2) as host:
        new = [raw(host.address) for _ in range(2)]
        until(lambda: host._server._connections.num_open == 2)
        assert status_of(exchange(raw(host.address), post())) == 200
        answer = exchange(new[0], post())
        assert (status_of(answer), code_of(answer)) == (503, "too_many_connections")
        assert status_of(exchange(new[1], post())) == 200


def test_connections_whose_end_is_awaited_are_limited(
    toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_connections, "MAX_LINGERING", 3)
    monkeypatch.setattr(connection, "LINGER_S", 60.0)
    with gateway(toy.router, max_body_bytes=1024) as host:
        unread = []
        for count in range(1, 8):
            unread.append(raw(host.address))
            unread[-1].sendall(post(b"", content_length="1000000"))
            assert status_of(read_all(unread[-1])) == 413
            until(lambda count=count: len(host._server._connections.lingering) == min(count, 3))
        assert host._server._connections.num_open == 0
        assert status_of(exchange(raw(host.address), post(b"{}"))) == 400
        for one in unread:
            one.close()
        until(lambda: not host._server._connections.lingering)


def send_forever(client: socket.socket) -> None:
    while True:
        client.sendall(bytes(65_536))


@pytest.mark.parametrize(("linger_s", "linger_bytes"), [(0.2, 2**30), (60.0, 2**22)])
def test_the_rest_of_a_body_is_read_for_a_limited_time_and_size(
    toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch, linger_s: float, linger_bytes: int
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", linger_s)
    monkeypatch.setattr(connection, "LINGER_BYTES", linger_bytes)
    with gateway(toy.router, max_body_bytes=1024) as host:
        client = raw(host.address)
        client.sendall(post(b"", content_length=str(2**40)))
        assert status_of(read_all(client)) == 413
        with pytest.raises(OSError):
            send_forever(client)
        until(lambda: not host._server._connections.lingering)


def test_an_answer_arrives_before_the_end_of_its_body(toy: Served) -> None:
    """http.client sends the whole body first, and then reads. Without lingering two of three answers were lost."""
    body = b'"' + b"x" * 5_000_000 + b'"'
    for _ in range(10):
        client = http.client.HTTPConnection(toy.address, timeout=60.0)
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert client.getresponse().status == 413
        client.close()


def test_idle_connections_block_no_caller(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=20) as host:
        for wanted in (4, 8, 12, 16, 20, 20, 20, 20):
            for _ in range(4):  # Fewer than the backlog, because the kernel would retry after 1 s.
                raw(host.address)
            until(lambda wanted=wanted: host._server._connections.num_open >= wanted)
        assert status_of(exchange(raw(host.address), post())) == 200
        until(lambda: host._server._connections.num_open <= 20)


def test_connections_over_the_limit_are_rejected_if_all_are_busy(raw: Connect) -> None:
    with serve(worker={"toy_step_s": 0.02}, max_connections=2) as served:
        busy = [raw(served.address) for _ in range(2)]
        for one in busy:
            one.sendall(post(b'{"prompt": "hello", "max_tokens": 4000, "stream": true}'))
            assert status_of(one.recv(64)) == 200
        answer = read_all(raw(served.address))
        assert (status_of(answer), code_of(answer)) == (503, "too_many_connections")
        for one in busy:
            one.close()
        until(lambda: is_idle(served.sdk))


@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_first_of_pipelined_requests_is_answered(raw: Connect, is_together: bool, is_streamed: bool) -> None:
    """The connection then ends, so that a client sends the others again."""
    with serve(worker={"toy_step_s": 0.01}) as served:
        body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": is_streamed}
        request = post(json.dumps(body).encode(), connection="keep-alive")
        connection = raw(served.address)
        connection.sendall(request * (50 if is_together else 1))
        if not is_together:
            until(lambda: served.sdk.topology().running_requests > 0)
            connection.sendall(request)
        answer = read_all(connection)
        assert (status_of(answer), answer.count(b"HTTP/1.1")) == (200, 1)
        assert (b"[DONE]" in answer) if is_streamed else (b'"completion_tokens":20' in answer)
        until(lambda: is_idle(served.sdk))
        assert status_of(exchange(raw(served.address), post())) == 200


def test_text_after_a_request_does_not_end_its_answer(toy: Served, raw: Connect) -> None:
    assert status_of(exchange(raw(toy.address), post(connection="keep-alive") + b"garbage \x00" * 1000)) == 200


def test_a_broken_chunk_is_answered(toy: Served, raw: Connect) -> None:
    request = post(b"", content_length="", transfer_encoding="chunked") + b"1\r\n{\r\n"
    connection = raw(toy.address)
    connection.sendall(request)
    answer = exchange(connection, b"no size\r\n")
    assert (status_of(answer), code_of(answer)) == (400, "invalid_http")


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
@pytest.mark.parametrize("is_split", [True, False])
def test_an_offer_of_another_protocol_is_ignored(toy: Served, raw: Connect, offer: str, is_split: bool) -> None:
    """As Java's HttpClient and `curl --http2` send it."""
    request = post(connection="Upgrade, HTTP2-Settings", upgrade=offer, http2_settings="AAEAAEAAAAIAAAAA")
    connection = raw(toy.address)
    for _ in range(2):
        for part in [request[one : one + 1] for one in range(len(request))] if is_split else [request]:
            connection.sendall(part)
        assert status_of(read_one(connection)) == 200
    closing = post(connection="close, Upgrade", upgrade=offer)
    assert status_of(exchange(connection, closing)) == 200


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT host:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 10,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
def test_other_protocols_get_an_error(toy: Served, raw: Connect, data: bytes) -> None:
    answer = exchange(raw(toy.address), data)
    assert (status_of(answer), code_of(answer)) == (400, "invalid_http")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"seed": ' + b"9" * 1_000_000 + b', "prompt": "x"}',
        b'{"prompt": "x", "max_tokens": 1e400}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_invalid_body_is_rejected(toy: Served, raw: Connect, body: bytes, path: str) -> None:
    assert status_of(exchange(raw(toy.address), post(body, path))) == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 400),
        ({"content_encoding": "gzip"}, 400),
        ({"x_slo_ttft_ms": "soon"}, 400),
        ({"x_slo_tpot_ms": "nan"}, 400),
        ({"x_slo_tpot_ms": "-1"}, 400),
        ({"x_request_id": "x" * 129}, 400),
        ({"authorization": "Basic abc"}, 401),
        ({"authorization": "Bearer "}, 200),  # As clients without a key send it.
        ({"traceparent": "nonsense"}, 200),
    ],
)
def test_headers_are_checked(toy: Served, raw: Connect, headers: dict[str, str], status: int) -> None:
    assert status_of(exchange(raw(toy.address), post(**headers))) == status


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /v1/nothing", 404), ("GET /v1/completions", 405), ("DELETE /v1/models", 405), ("GET /..%2f..%2fetc", 404)],
)
def test_other_paths_and_methods_have_openai_s_errors(
    toy: Served, raw: Connect, request_line: str, status: int
) -> None:
    answer = exchange(raw(toy.address), f"{request_line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert status_of(answer) == status
    assert code_of(answer) in ("not_found", "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/models", "GET, HEAD"), ("/v1/responses/r", "DELETE, GET, HEAD"), ("/v1/conversations", "POST")],
)
def test_a_wrong_method_gets_all_that_the_path_has(toy: Served, raw: Connect, path: str, allowed: str) -> None:
    answer = exchange(raw(toy.address), f"PATCH {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert status_of(answer) == 405
    assert f"allow: {allowed}".lower().encode() in answer.lower().splitlines()


def test_the_token_is_checked_before_the_body_is_read(raw: Connect) -> None:
    with serve(token="right") as served:
        for given in ("", "Bearer", "Bearer wrong"):
            connection = raw(served.address)
            connection.sendall(post(b"", content_length="1000", authorization=given))  # The body never comes.
            answer = read_all(connection)
            assert (status_of(answer), code_of(answer)) == (401, "invalid_api_key")
            assert b"www-authenticate: Bearer" in answer
        assert status_of(exchange(raw(served.address), post(authorization="bearer right"))) == 200
        found = served.openai.completions.create(model="toy", prompt="hello", max_tokens=2)
        assert found.usage is not None
        assert found.usage.completion_tokens == 2
        for path in ("/v1/models", "/metrics"):
            request = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            assert status_of(exchange(raw(served.address), request)) == 401
        health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert status_of(exchange(raw(served.address), health)) == 200


def test_a_public_host_needs_a_router_with_a_token(toy: Served, raw: Connect) -> None:
    with (
        pytest.raises(ConfigError, match="anyone could call this port"),
        gateway(toy.router, host="0.0.0.0", insecure=True),
    ):
        pass
    with serve(token="right", host="0.0.0.0", insecure=True) as served:
        port = served.address.rpartition(":")[2]
        assert status_of(exchange(raw(f"127.0.0.1:{port}"), post())) == 401
        assert status_of(exchange(raw(f"127.0.0.1:{port}"), post(authorization="Bearer right"))) == 200


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    with serve(worker={"toy_step_s": 0.02}) as served:
        yield served


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("after_s", "is_half"), [(0.0, False), (0.05, False), (0.3, False), (0.05, True)])
def test_a_disconnected_client_frees_its_memory(
    slow: Served, raw: Connect, is_streamed: bool, after_s: float, is_half: bool
) -> None:
    """A client that only stops sending looks the same, so its request is cancelled and the connection ends too."""
    body = {"prompt": "hello " * 100, "max_tokens": 4000, "n": 2, "temperature": 1, "stream": is_streamed}
    connection = raw(slow.address)
    connection.sendall(post(json.dumps(body).encode()))
    if after_s:
        until(lambda: slow.sdk.topology().running_requests > 0)
        time.sleep(after_s)  # At a random moment.
    if is_half:
        connection.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in read_all(connection)
    else:
        connection.close()
    until(lambda: is_idle(slow.sdk))
    text = slow.openai.completions.create(model="toy", prompt="x", max_tokens=2).choices[0].text
    assert len(text) > 0


def test_a_client_that_reads_nothing_is_disconnected(raw: Connect) -> None:
    with serve(stall_s=1.0) as served:
        connection = raw(served.address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": ["hello"] * 64, "max_tokens": 4000, "temperature": 1, "stream": True}
        connection.sendall(post(json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode()))
        until(lambda: served.sdk.topology().running_requests > 0)
        until(lambda: is_idle(served.sdk), within_s=60.0)
        assert b"[DONE]" not in read_all(connection)


def test_a_long_answer_is_charged_before_its_work(raw: Connect) -> None:
    with serve(max_held_bytes=4 * 2**20) as toy:
        long = b'{"prompt": "x", "max_tokens": 4000, "n": 4, "temperature": 1, "logprobs": 64}'
        answer = exchange(raw(toy.address), post(long))
        assert status_of(answer) == 400
        assert b"an answer of up to" in answer
        assert not toy.sdk.topology().running_requests
        slow = raw(toy.address)  # a stream holds few of its tokens at a time, here three of four MiB
        body = b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "logprobs": 48, "stream": true}'
        slow.sendall(post(body))
        assert slow.recv(1) == b"H"
        until(lambda: status_of(exchange(raw(toy.address), post(body))) == 429)
        assert status_of(exchange(raw(toy.address), post())) == 200
    with serve() as toy:
        tokens = json.dumps({"prompt": "x" * 100_000, "return_token_strs": True}).encode()
        with gateway(toy.router, max_held_bytes=2**20) as host:
            answer = exchange(raw(host.address), post(tokens, "/tokenize"))
            assert (status_of(answer), b"an answer of up to" in answer) == (400, True)


def test_a_running_gateway_takes_new_limits(toy: Served) -> None:
    with gateway(toy.router) as host:
        host.reload({"max_body_bytes": 1024, "header_s": 0.1, "idle_s": 2.0, "stall_s": 3.0, "drain_s": 0.0})
        where, _, port = host.address.rpartition(":")
        with socket.create_connection((where, int(port)), timeout=60.0) as sock:
            assert status_of(exchange(sock, post(b"x" * 1025))) == 413
        with socket.create_connection((where, int(port)), timeout=60.0) as sock:
            assert exchange(sock, b"GET / HT") == b""
        limits = host._server._connections.limits
        assert (limits.idle_s, limits.stall_s, host._server._config.drain_s) == (2.0, 3.0, 0.0)


def test_callers_cannot_fill_the_log(raw: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Of the gateway, the router and the workers, which are all in this process."""
    with serve(token="operator", max_body_bytes=1024) as served:
        caplog.clear()
        caplog.set_level(logging.WARNING)
        key = {"authorization": "Bearer operator"}
        stream = b'{"prompt": "hello", "max_tokens": 4000, "ignore_eos": true, "stream": true}'
        requests = [
            b"no HTTP\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",  # TLS
            b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            post(OK),
            post(OK, authorization="Bearer wrong"),
            post(OK, authorization="Basic x"),
            post(b"{", **key),
            post(b"[" * 1000, **key),
            post(b" " * 2000, **key),
            post(b'{"prompt": 5, "x": 1}', **key),
            post(b'{"prompt": ""}', **key),
            post(b'{"prompt": "x", "max_tokens": 10000000}', **key),
            post(b"", content_length="", transfer_encoding="chunked", **key) + b"x\r\n",
        ]
        for request in requests * 3:
            connection = raw(served.address)
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            read_all(connection)
        for request in (post(stream, **key), post(b"{", content_length="100", **key)) * 3:
            connection = raw(served.address)
            connection.sendall(request)
            if b"hello" in request:
                assert connection.recv(1) == b"H"
            connection.close()
        until(lambda: is_idle(served.sdk))
        for token in ("wrong", None):
            for _ in range(3):
                with Client(served.router, token=token) as stranger, pytest.raises(Unauthenticated):
                    stranger.model()
        assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []

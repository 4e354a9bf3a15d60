"""A request that the gate rejects gets 429 from its head alone, and its connection stays open."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.core.access.gate import Gate
from pdserve.core.access.shares import OPERATOR
from pdserve.core.errors import Overloaded
from pdserve.gateway import door
from pdserve.gateway.api import errors
from pdserve.gateway.connection import SHED_BYTES, Connection
from pdserve.gateway.server import GatewayHost
from tests.unit.gateway.conftest import Served, gateway, read_all, serve, until
from tests.unit.gateway.test_http_rules import Wire, connect
from tests.unit.gateway.test_limits import OK, code_of, exchange, post, read_one, status_of

Connect = Callable[[str], socket.socket]


def gate_of(host: GatewayHost) -> Gate:
    assert host._server._gateway is not None
    return host._server._gateway.gate.core


def close_gate(gate: Gate) -> None:
    """The cluster rejects requests of an hour of CPU time, so that the gate stays closed for the test."""

    class Closed(dict[int, Any]):
        def get(self, priority: int, default: Any = None) -> Any:
            flow = super().get(priority, default)
            if flow is not None:
                flow.level_s, flow.passes = -1e6, -1e6
            return flow

    gate.rejected(OPERATOR, 0, 1.0, 0.0)
    gate._callers[OPERATOR] = Closed(gate._callers[OPERATOR])


def open_gate(gate: Gate) -> None:
    gate._callers.clear()


def test_a_shed_request_keeps_its_connection(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        connection = raw(host.address)
        request = post(connection="keep-alive")
        connection.sendall(request)
        assert status_of(read_one(connection)) == 200  # the caller is known now
        close_gate(gate_of(host))
        for _ in range(3):
            connection.sendall(request)
            answer = read_one(connection)
            assert (status_of(answer), code_of(answer)) == (429, "load_shed")
            head = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
            [retry] = [int(line.split(b":")[1]) for line in head if line.startswith(b"retry-after:")]
            assert retry in (1, 2)
        open_gate(gate_of(host))
        connection.sendall(request)
        assert status_of(read_one(connection)) == 200
        until(lambda: gate_of(host).running == 0)
        assert 'cause="cluster"} 3.0' in host._server._metrics.text()


def test_a_caller_is_shed_without_a_check_of_its_token(
    toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check asks the router, which is what overload must not wait for."""
    monkeypatch.setattr(door, "REMEMBER_S", 0.0)
    with gateway(toy.router) as host:
        connection = raw(host.address)
        connection.sendall(post(connection="keep-alive"))
        assert status_of(read_one(connection)) == 200
        close_gate(gate_of(host))
        connection.sendall(post(connection="keep-alive"))
        answer = read_one(connection)
        assert code_of(answer) == "load_shed"
        assert b"connection: close" not in answer


def test_the_body_of_a_shed_request_is_dropped_as_it_comes(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        connection = raw(host.address)
        connection.sendall(post(connection="keep-alive"))
        read_one(connection)
        close_gate(gate_of(host))
        body = OK[:-1] + b" " * (SHED_BYTES - len(OK)) + b"}"
        connection.sendall(post(body, connection="keep-alive")[:-60_000])
        connection.sendall(body[-60_000:])
        assert code_of(read_one(connection)) == "load_shed"
        open_gate(gate_of(host))
        connection.sendall(post(connection="keep-alive"))
        assert status_of(read_one(connection)) == 200


def begin_shed(host: GatewayHost, connection: socket.socket) -> None:
    """The gateway is reading the body of a shed request, whose last byte does not come."""
    connection.sendall(post(connection="keep-alive"))
    assert status_of(read_one(connection)) == 200
    close_gate(gate_of(host))
    connection.sendall(post(connection="keep-alive")[:-1])
    until(lambda: 'cause="cluster"} 1.0' in host._server._metrics.text())


def is_answered_early(answer: bytes) -> bool:
    return (status_of(answer), code_of(answer)) == (429, "load_shed") and b"\r\nconnection: close\r\n" in answer


def test_a_shed_request_whose_body_is_late_is_answered(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, header_s=0.2) as host:
        connection = raw(host.address)
        begin_shed(host, connection)
        assert is_answered_early(read_all(connection))


def test_a_shed_request_is_answered_when_the_gateway_ends(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        connection = raw(host.address)
        begin_shed(host, connection)
        host.stop()
        assert is_answered_early(read_all(connection))


def test_shed_requests_without_their_bodies_make_room(toy: Served, raw: Connect) -> None:
    """They hold no share of any caller, so one caller could take all places."""
    with gateway(toy.router, max_connections=24) as host:
        first = raw(host.address)
        begin_shed(host, first)
        for _ in range(24):
            raw(host.address).sendall(post(connection="keep-alive")[:-1])
        until(lambda: 'cause="cluster"} 25.0' in host._server._metrics.text())
        health = raw(host.address)
        health.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert status_of(read_all(health)) == 200
        assert is_answered_early(read_all(first))


def shedding() -> tuple[Connection, Wire]:
    connection, wire = connect()
    connection._all.shed = lambda url, headers: errors.reply(Overloaded("full", 1.0))
    return connection, wire


async def test_a_request_that_follows_a_shed_one_at_once_is_not_served() -> None:
    """Answers to thousands of them would hold up the event loop."""
    connection, wire = shedding()
    request = post(connection="keep-alive")
    connection.data_received(request[:-1])
    connection.data_received(request[-1:] + request * 1000)
    assert wire.written.count(b"HTTP/1.1 429 ") == 1
    assert connection in connection._all.lingering
    connection.connection_lost(None)


async def test_requests_that_wait_for_their_answers_are_all_shed() -> None:
    connection, wire = shedding()
    for _ in range(3):
        connection.data_received(post(connection="keep-alive"))
    assert wire.written.count(b"HTTP/1.1 429 ") == 3
    connection.connection_lost(None)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_head_after_a_shed_body_is_limited(has_begun: bool) -> None:
    """`has_begun`: it comes with blank lines that follow the body."""
    connection, wire = shedding()
    request = post(connection="keep-alive")
    connection.data_received(request[:-1])
    connection.data_received(request[-1:] + b"\r\n" * 100_000 * has_begun)
    if not has_begun:
        connection.data_received(b"POST /v1/completions HTTP/1.1\r\n" + b"a:\r\n" * 50_000)
    assert [part[:3] for part in wire.written.split(b"HTTP/1.1 ")[1:]] == [b"429", b"431"]
    connection.connection_lost(None)


def test_large_and_chunked_requests_are_shed_too(toy: Served, raw: Connect) -> None:
    """Their connections end, because the rest of a body is not read."""
    with gateway(toy.router) as host:
        exchange(raw(host.address), post())
        close_gate(gate_of(host))
        large = b" " * (SHED_BYTES + 1)
        for data in (
            post(large, connection="keep-alive"),
            post(b"5\r\n", content_length="", transfer_encoding="chunked", connection="keep-alive"),
            post(b"", content_length=str(2 * SHED_BYTES), expect="100-continue", connection="keep-alive"),
            post(),
        ):
            answer = exchange(raw(host.address), data)
            assert (status_of(answer), code_of(answer)) == (429, "load_shed")
        assert gate_of(host).running == 0


def test_other_paths_and_health_are_not_shed(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        exchange(raw(host.address), post())
        close_gate(gate_of(host))
        body = json.dumps({"prompt": "hello"}).encode()
        assert status_of(exchange(raw(host.address), post(body, path="/tokenize"))) == 200
        assert (
            status_of(exchange(raw(host.address), b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
            == 200
        )


def is_shed(host: GatewayHost, url: bytes, *headers: tuple[bytes, bytes]) -> bool:
    assert host._server._gateway is not None
    return host._server._gateway.shed(url, headers) is not None


def test_a_query_makes_no_other_path(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        exchange(raw(host.address), post())
        assert not is_shed(host, b"/v1/messages?beta=true")
        close_gate(gate_of(host))
        assert is_shed(host, b"/v1/messages?beta=true")
        assert not is_shed(host, b"/tokenize?/v1/messages")


def test_an_unknown_token_is_checked_before_it_is_shed() -> None:
    with serve(token="operator") as served, gateway(served.router) as host:
        connection = http.client.HTTPConnection(host.address, timeout=60.0)

        def status_with(token: str) -> int:
            headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
            connection.request("POST", "/v1/completions", OK, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status

        assert status_with("operator") == 200
        close_gate(gate_of(host))
        assert [status_with(token) for token in ("operator", "wrong", "operator")] == [429, 401, 429]
        own, wrong = (b"x-api-key", b"operator"), (b"x-api-key", b"wrong")
        assert is_shed(host, b"/v1/messages", own, wrong)
        assert not is_shed(host, b"/v1/messages", wrong, own)  # the first counts, as for a request that is served
        connection.close()


def test_only_an_answer_counts_as_accepted(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        too_long = json.dumps({"prompt": "hello", "max_tokens": 10**6}).encode()
        assert status_of(exchange(raw(host.address), post(too_long))) == 400
        [flow] = gate_of(host)._callers[OPERATOR].values()
        assert flow.accepted_rps == 0.0
        assert status_of(exchange(raw(host.address), post())) == 200
        assert flow.accepted_rps > 0.0

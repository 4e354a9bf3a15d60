"""Connections whose clients have sent nothing yet are bare sockets, with the same limits as all others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, final

import pytest

from pdserve.config import GatewayConfig
from pdserve.gateway import arrivals, connection, open_connections
from pdserve.gateway.arrivals import Arrivals
from pdserve.gateway.connection import Connection
from pdserve.gateway.open_connections import Connections
from pdserve.gateway.server import GatewayHost, _connection_limits
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, read_all, until
from tests.unit.gateway.test_limits import OK, Connect, code_of, exchange, post, read_one, send_forever, status_of

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() resets the connection


def num_protocols(host: GatewayHost) -> int:
    assert host._server._server is not None
    return len(host._server._server.server_state.connections)


def test_a_silent_connection_has_no_protocol(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        silent = raw(host.address)
        until(lambda: host._server._connections.num_open == 1)
        assert num_protocols(host) == 0
        silent.sendall(post(connection="keep-alive"))
        assert status_of(read_one(silent)) == 200
        assert (num_protocols(host), host._server._connections.num_open) == (1, 1)


def test_a_flood_of_silent_connections_gets_no_protocol(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=4) as host:
        flood = [raw(host.address) for _ in range(40)]
        until(lambda: host._server._connections.num_dropped == 36)
        assert (num_protocols(host), host._server._connections.num_open) == (0, 4)
        assert status_of(exchange(raw(host.address), post())) == 200
        for one in flood[:36]:
            assert code_of(read_all(one)) == "too_many_connections"
        assert status_of(exchange(flood[-1], post())) == 200


def test_a_rejected_silent_connection_lingers_for_limited_time(
    toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "LINGER_S", 0.2)
    with gateway(toy.router, max_connections=1) as host:
        silent = [raw(host.address) for _ in range(3)]
        until(lambda: host._server._connections.num_dropped == 2)
        until(lambda: not host._server._connections.rejected)
        assert (host._server._connections.num_open, len(host._server._connections.silent)) == (1, 1)
        assert status_of(exchange(silent[-1], post())) == 200


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_closes_a_silent_connection_frees_it(toy: Served, raw: Connect, is_reset: bool) -> None:
    with gateway(toy.router) as host:
        silent = raw(host.address)
        until(lambda: host._server._connections.num_open == 1)
        if is_reset:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        silent.close()
        until(lambda: host._server._connections.num_open == 0)
        assert not host._server._connections.silent


def test_silent_connections_end_with_the_gateway(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=1) as host:
        rejected, silent = raw(host.address), raw(host.address)
        until(lambda: host._server._connections.num_dropped == 1)
    assert read_all(silent) == b""
    assert code_of(read_all(rejected)) == "too_many_connections"
    assert (host._server._connections.num_open, len(host._server._connections.rejected)) == (0, 0)
    with pytest.raises(OSError):  # nobody reads what it sends
        until(lambda: rejected.send(b"x") == 0)


@contextlib.contextmanager
def paused(host: GatewayHost) -> Iterator[None]:
    """The gateway's event loop does nothing within."""
    is_over, is_paused = threading.Event(), threading.Event()

    def pause() -> None:
        is_paused.set()
        is_over.wait(WAIT_S)

    host._loop.call_soon_threadsafe(pause)
    assert is_paused.wait(WAIT_S)
    try:
        yield
    finally:
        is_over.set()


def make_busy(host: GatewayHost, count: int) -> None:
    """Counts connections whose requests never end: more than a single caller may have. Before any other connects."""
    host._server._connections.num_open += count


@pytest.mark.parametrize("num_busy", [0, 5])
def test_a_silent_flood_ends_no_connection_that_has_sent_something(toy: Served, raw: Connect, num_busy: int) -> None:
    with gateway(toy.router, max_connections=8) as host:
        make_busy(host, num_busy)
        client = raw(host.address)
        client.sendall(post()[:10])
        until(lambda: len(host._server._connections.idle) == 1)
        for _ in range(30):
            raw(host.address)
        until(lambda: host._server._connections.num_dropped == 30 + 1 + num_busy - 8)
        assert status_of(exchange(client, post()[10:])) == 200


def test_connections_that_send_something_leave_silent_ones_a_quarter(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=8) as host:
        started = [raw(host.address) for _ in range(8)]
        for one in started:
            one.sendall(post()[:10])
        until(lambda: len(host._server._connections.idle) == 8)
        client = raw(host.address)
        until(lambda: len(host._server._connections.silent) == 1)
        for _ in range(20):
            raw(host.address).sendall(post()[:10])
        until(lambda: host._server._connections.num_dropped == 21)
        assert status_of(exchange(client, post())) == 200


def test_a_host_with_many_connections_makes_room(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=8) as host, socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.settimeout(WAIT_S)
        name, port = host.address.split(":")
        other.connect((name, int(port)))
        other.sendall(post()[:10])
        until(lambda: len(host._server._connections.idle) == 1)
        for _ in range(20):
            raw(host.address).sendall(post()[:10])
        until(lambda: host._server._connections.num_dropped == 20 + 1 - 8)
        assert status_of(exchange(other, post()[10:])) == 200


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_that_has_come_is_served_before_others_are_accepted(
    toy: Served, raw: Connect, is_first: bool
) -> None:
    """Its connection is the oldest silent one, so the next one to make room."""
    with gateway(toy.router, max_connections=8) as host:
        silent = []
        for count in range(1, 9):  # in this order
            silent.append(raw(host.address))
            until(lambda count=count: host._server._connections.num_open == count)
        with paused(host):
            if is_first:
                silent[0].sendall(post())
            for _ in range(4):
                raw(host.address)
            if not is_first:
                silent[0].sendall(post())
        assert status_of(read_all(silent[0])) == 200


@pytest.mark.parametrize(("num_busy", "num_started"), [(0, 0), (32, 0), (36, 0), (20, 10), (20, 20)])
def test_none_makes_room_in_the_turn_in_which_it_is_accepted(
    toy: Served, raw: Connect, num_busy: int, num_started: int
) -> None:
    with gateway(toy.router, max_connections=40) as host:
        make_busy(host, num_busy)
        for _ in range(num_started):
            raw(host.address).sendall(post()[:10])
        until(lambda: len(host._server._connections.idle) == num_started)
        with paused(host):
            client = raw(host.address)
            client.sendall(HEALTH)
            for _ in range(60):
                raw(host.address)
        assert status_of(read_all(client)) == 200


def test_a_rejected_client_reads_why_after_its_body(toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "LINGER_S", 60.0)
    with gateway(toy.router, max_connections=1) as host:
        client = raw(host.address)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        until(lambda: host._server._connections.num_open == 1)
        raw(host.address)
        until(lambda: len(host._server._connections.rejected) == 1)
        client.sendall(post(b"x" * 8_000_000))  # more than the kernel holds
        assert code_of(read_all(client)) == "too_many_connections"
        client.close()
        until(lambda: not host._server._connections.rejected)


def test_a_rejected_client_may_send_a_limited_size(toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "LINGER_S", 60.0)
    monkeypatch.setattr(arrivals, "LINGER_BYTES", 2**20)
    with gateway(toy.router, max_connections=1) as host:
        client = raw(host.address)
        until(lambda: host._server._connections.num_open == 1)
        raw(host.address)
        until(lambda: len(host._server._connections.rejected) == 1)
        with pytest.raises(OSError):
            send_forever(client)
        until(lambda: not host._server._connections.rejected)


@pytest.mark.parametrize("num_early", [1, 3])
def test_rejected_silent_connections_end_no_early_answer(
    toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch, num_early: int
) -> None:
    for module in (arrivals, connection):
        monkeypatch.setattr(module, "LINGER_S", 60.0)
    monkeypatch.setattr(open_connections, "MAX_LINGERING", 3)
    with gateway(toy.router, max_connections=1, max_body_bytes=1024) as host:
        early = []
        for _ in range(num_early):
            early.append(raw(host.address))
            early[-1].sendall(post(b"", content_length="1000000"))
            assert status_of(read_all(early[-1])) == 413
        for _ in range(8):
            raw(host.address)
        until(lambda: host._server._connections.num_dropped == 7)
        until(lambda: len(host._server._connections.rejected) == 3 - num_early)
        assert len(host._server._connections.lingering) == num_early
        for one in early:  # still read
            one.sendall(bytes(500_000))


def test_accepted_connections_have_the_options_of_a_reload(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        host.reload({"stall_s": 3.0})
        client = raw(host.address)
        client.sendall(post(connection="keep-alive"))
        assert status_of(read_one(client)) == 200
        until(lambda: len(host._server._connections.idle) == 1)
        [accepted] = host._server._connections.idle
        assert isinstance(accepted, Connection)
        sock = accepted.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_connection_that_its_client_has_closed_makes_room(toy: Served, raw: Connect) -> None:
    """Its error must not reach the connection for which it makes room: that one would have no limits."""
    with gateway(toy.router) as host:
        client = raw(host.address)
        client.sendall(post(OK)[:10])
        until(lambda: num_protocols(host) == 1)

        async def close_and_make_room() -> None:
            client.close()  # the event loop does not know it yet; an answer is then answered by a reset
            [accepted] = host._server._connections.idle
            accepted.end_idle()

        asyncio.run_coroutine_threadsafe(close_and_make_room(), host._loop).result(WAIT_S)
        until(lambda: host._server._connections.num_open == 0 and not host._server._connections.lingering)


@final
class FullListener(socket.socket):
    """Has no descriptors for connections while `is_full`. A limit of the whole process could fail other threads."""

    is_full = True

    def accept(self) -> tuple[socket.socket, Any]:
        if self.is_full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_accepting_goes_on_when_descriptors_are_free_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "RETRY_S", 0.01)

    async def accept() -> int:
        with FullListener() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            connections = Connections(limits=_connection_limits(GatewayConfig(router="h:1")))
            accepting = Arrivals(listener, connections, asyncio.Protocol, b"")
            try:
                client.setblocking(False)
                client.connect_ex(listener.getsockname())
                async with asyncio.timeout(WAIT_S):
                    while not caplog.records:
                        await asyncio.sleep(0.01)
                    assert connections.num_open == 0
                    listener.is_full = False
                    while connections.num_open == 0:
                        await asyncio.sleep(0.01)
            finally:
                accepting.close()
            return connections.num_open

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(accept()) == 0
    assert [one.getMessage() for one in caplog.records] == ["connections cannot be accepted"]


def test_accepting_goes_on_after_a_socket_could_not_be_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "RETRY_S", 0.01)

    class Poll:
        """Fails once, as beyond the kernel's max_user_watches."""

        def __init__(self, real: select.epoll) -> None:
            self._real, self._has_failed = real, False

        def register(self, sock: socket.socket, events: int) -> None:
            if not self._has_failed:
                self._has_failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._real.register(sock, events)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    async def accept() -> None:
        with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
            listener.bind(("127.0.0.1", 0))
            connections = Connections(limits=_connection_limits(GatewayConfig(router="h:1")))
            accepting = Arrivals(listener, connections, asyncio.Protocol, b"")
            accepting._poll = Poll(accepting._poll)  # type: ignore[assignment]
            try:
                async with asyncio.timeout(WAIT_S):
                    for one in (first, second):
                        one.setblocking(False)
                        await asyncio.get_running_loop().sock_connect(one, listener.getsockname())
                    assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
                    while not connections.silent:
                        await asyncio.sleep(0.01)
                assert connections.num_open == 1
            finally:
                accepting.close()
            assert connections.num_open == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(accept())
    assert [one.getMessage() for one in caplog.records] == ["connections cannot be accepted"]

"""Connections whose clients have sent nothing yet are bare sockets, with the same limits as all others."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
import struct
from typing import Any, final

import pytest

from pdserve.config import GatewayConfig
from pdserve.gateway import arrivals, connection
from pdserve.gateway.arrivals import Arrivals
from pdserve.gateway.connection import Connection, Connections
from pdserve.gateway.server import GatewayHost, _connection_limits
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, read_all, until
from tests.unit.gateway.test_limits import OK, Connect, code_of, exchange, post, read_one, send_forever, status_of

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() resets the connection


def num_protocols(host: GatewayHost) -> int:
    assert host._server is not None
    return len(host._server.server_state.connections)


def test_a_silent_connection_has_no_protocol(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        silent = raw(host.address)
        until(lambda: host._connections.num_open == 1)
        assert num_protocols(host) == 0
        silent.sendall(post(connection="keep-alive"))
        assert status_of(read_one(silent)) == 200
        assert (num_protocols(host), host._connections.num_open) == (1, 1)


def test_a_flood_of_silent_connections_gets_no_protocol(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=4) as host:
        flood = [raw(host.address) for _ in range(40)]
        until(lambda: host._connections.num_dropped == 36)
        assert (num_protocols(host), host._connections.num_open) == (0, 4)
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
        until(lambda: host._connections.num_dropped == 2)
        until(lambda: not host._connections.rejected)
        assert (host._connections.num_open, len(host._connections.idle)) == (1, 1)
        assert status_of(exchange(silent[-1], post())) == 200


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_closes_a_silent_connection_frees_it(toy: Served, raw: Connect, is_reset: bool) -> None:
    with gateway(toy.router) as host:
        silent = raw(host.address)
        until(lambda: host._connections.num_open == 1)
        if is_reset:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        silent.close()
        until(lambda: host._connections.num_open == 0)
        assert not host._connections.idle


def test_silent_connections_end_with_the_gateway(toy: Served, raw: Connect) -> None:
    with gateway(toy.router, max_connections=1) as host:
        rejected, silent = raw(host.address), raw(host.address)
        until(lambda: host._connections.num_dropped == 1)
    assert read_all(silent) == b""
    assert code_of(read_all(rejected)) == "too_many_connections"
    assert (host._connections.num_open, len(host._connections.rejected)) == (0, 0)
    with pytest.raises(OSError):  # nobody reads what it sends
        until(lambda: rejected.send(b"x") == 0)


def test_a_rejected_client_reads_why_after_its_body(toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "LINGER_S", 60.0)
    with gateway(toy.router, max_connections=1) as host:
        client = raw(host.address)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        until(lambda: host._connections.num_open == 1)
        raw(host.address)
        until(lambda: len(host._connections.rejected) == 1)
        client.sendall(post(b"x" * 8_000_000))  # more than the kernel holds
        assert code_of(read_all(client)) == "too_many_connections"
        client.close()
        until(lambda: not host._connections.rejected)


def test_a_rejected_client_may_send_a_limited_size(toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "LINGER_S", 60.0)
    monkeypatch.setattr(arrivals, "LINGER_BYTES", 2**20)
    with gateway(toy.router, max_connections=1) as host:
        client = raw(host.address)
        until(lambda: host._connections.num_open == 1)
        raw(host.address)
        until(lambda: len(host._connections.rejected) == 1)
        with pytest.raises(OSError):
            send_forever(client)
        until(lambda: not host._connections.rejected)


@pytest.mark.parametrize("num_early", [1, 3])
def test_rejected_silent_connections_end_no_early_answer(
    toy: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch, num_early: int
) -> None:
    for module in (arrivals, connection):
        monkeypatch.setattr(module, "LINGER_S", 60.0)
    monkeypatch.setattr(connection, "MAX_LINGERING", 3)
    with gateway(toy.router, max_connections=1, max_body_bytes=1024) as host:
        early = []
        for _ in range(num_early):
            early.append(raw(host.address))
            early[-1].sendall(post(b"", content_length="1000000"))
            assert status_of(read_all(early[-1])) == 413
        for _ in range(8):
            raw(host.address)
        until(lambda: host._connections.num_dropped == 7)
        until(lambda: len(host._connections.rejected) == 3 - num_early)
        assert len(host._connections.lingering) == num_early
        for one in early:  # still read
            one.sendall(bytes(500_000))


def test_accepted_connections_have_the_options_of_a_reload(toy: Served, raw: Connect) -> None:
    with gateway(toy.router) as host:
        host.reload({"stall_s": 3.0})
        client = raw(host.address)
        client.sendall(post(connection="keep-alive"))
        assert status_of(read_one(client)) == 200
        until(lambda: len(host._connections.idle) == 1)
        [accepted] = host._connections.idle
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
            [accepted] = host._connections.idle
            accepted.end_idle()

        asyncio.run_coroutine_threadsafe(close_and_make_room(), host._loop).result(WAIT_S)
        until(lambda: host._connections.num_open == 0 and not host._connections.lingering)


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
                    while not connections.idle:
                        await asyncio.sleep(0.01)
                assert connections.num_open == 1
            finally:
                accepting.close()
            assert connections.num_open == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(accept())
    assert [one.getMessage() for one in caplog.records] == ["connections cannot be accepted"]

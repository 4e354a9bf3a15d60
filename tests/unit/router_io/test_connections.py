"""Limits of the router's port on the number and age of connections, and their effect on callers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.toy import answer
from pdserve.wire import peer_server
from router.service.measure import num_connections
from router.service.server import _server_options
from tests.unit.router_io.conftest import Connect, Front, until
from tests.unit.router_io.processes import Program

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def connections(front: Front, stack: contextlib.ExitStack, count: int, sent: bytes = b"") -> list[socket.socket]:
    port = int(front.server.address.rsplit(":", 1)[1])
    made = []
    for _ in range(count):
        one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        one.setblocking(False)
        if sent:
            one.sendall(sent)
        made.append(one)
    return made


def num_open(made: list[socket.socket]) -> int:
    return sum(not is_closed(one) for one in made)


def is_closed(one: socket.socket) -> bool:
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def num_accepted(front: Front) -> int:
    return num_connections(int(front.server.address.rsplit(":", 1)[1]))


async def test_connections_over_the_limit_are_closed(connect: Connect, sockets: contextlib.ExitStack) -> None:
    front = await connect(max_connections=10)
    made = connections(front, sockets, 40, PREFACE)
    await until(lambda: num_open(made) <= 10)
    await until(lambda: 0 < num_accepted(front) <= 10)


async def test_idle_connections_are_closed(connect: Connect, sockets: contextlib.ExitStack) -> None:
    front = await connect(connection_idle_s=0.2)
    made = connections(front, sockets, 20, PREFACE)
    await until(lambda: num_open(made) == 0)


async def test_connections_without_a_preface_are_closed(
    connect: Connect, sockets: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "HANDSHAKE_S", 0.2)
    front = await connect()
    made = [*connections(front, sockets, 10), *connections(front, sockets, 10, PREFACE[:9])]
    await until(lambda: num_open(made) == 0)


async def test_a_client_does_not_notice_the_limits(connect: Connect, slow_decode: Program) -> None:
    """A stream continues after its connection's maximum age; later calls use a new connection."""
    front = await connect(slow_decode, connection_age_s=0.2, connection_idle_s=0.1)
    expected = bytes(answer(list(b"hello"), 60))  # 60 steps of 20 ms: several ages

    async def generate() -> bytes:
        return (await front.client.generate("hello", max_tokens=60, temperature=0)).text.encode()

    for _ in range(2):
        assert await asyncio.gather(*(generate() for _ in range(3))) == [expected] * 3
    for _ in range(100):
        assert await front.client.tokenize("ab") == [97, 98]


def test_the_grace_covers_the_longest_request() -> None:
    options = dict(_server_options(RouterConfig(model="toy", request_timeout_s=700.0)))
    assert options["grpc.max_connection_age_grace_ms"] > 700_000


@pytest.mark.parametrize(
    ("name", "value"), [("max_connections", 0), ("connection_idle_s", 0.0), ("connection_age_s", float("inf"))]
)
async def test_a_limit_out_of_range_is_rejected(connect: Connect, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        await connect(**{name: value})

"""A client that knows two routers: both get work, and one that ends is left out."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import openai
import pytest

from pdserve import AsyncClient, Client
from pdserve.client.connect import is_loopback, may_have_several
from pdserve.client.retries import Retries
from pdserve.core.errors import NotFound, ShuttingDown, Unavailable
from pdserve.testing import Cluster
from tests.unit.gateway.conftest import PATIENT, WAIT_S, gateway

REQUESTS = 20
IN_TURN = 6  # successes in a row, of which a client that calls both routers in turn would have only one
ONCE = Retries(limit=0)
MOVED_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[Cluster, Cluster]]:
    slow = {"toy_step_s": 0.01}
    with (
        Cluster(prefill=0, router=PATIENT, worker=slow) as first,
        Cluster(prefill=0, router=PATIENT, worker=slow) as second,
    ):
        yield first, second


@pytest.fixture
def draining(pair: tuple[Cluster, Cluster]) -> Iterator[tuple[Cluster, Cluster]]:
    """The first router drains until the test ends, because it still answers a request."""
    with (
        Client(pair[0].address) as client,
        client.stream("x", max_tokens=4000, ignore_eos=True) as answer,
    ):
        next(answer)
        yield pair


def begin_drain(cluster: Cluster) -> None:
    cluster._hosts["router"].drain()


async def until_left_out(call: Callable[[], Awaitable[object]]) -> None:
    """Until the client has learned that the router drains. Its calls meet that router no more."""
    deadline_s, row = time.monotonic() + WAIT_S, 0
    while row < IN_TURN:
        assert time.monotonic() < deadline_s, "calls still go to the draining router"
        try:
            await call()
            row += 1
        except ShuttingDown:
            row = 0
    for _ in range(REQUESTS):
        await call()


def both(pair: tuple[Cluster, Cluster]) -> str:
    return "ipv4:" + ",".join(one.address for one in pair)


def served(pair: tuple[Cluster, Cluster], ids: list[str]) -> Counter[int]:
    """The number of these requests that each router knows."""
    found: Counter[int] = Counter()
    for number, cluster in enumerate(pair):
        with Client(cluster.address) as client:
            for request_id in ids:
                try:
                    client.explain(request_id)
                except NotFound:
                    continue
                found[number] += 1
    return found


def test_requests_go_to_both_and_one_that_ends_is_left_out(pair: tuple[Cluster, Cluster]) -> None:
    with Client(both(pair)) as client:
        client.generate("connect", max_tokens=1)
        ids = [client.generate("x", max_tokens=1).request_id for _ in range(REQUESTS)]
        found = served(pair, ids)
        assert found.total() == REQUESTS
        assert min(found[0], found[1]) >= REQUESTS // 4
        assert {client.explain(one).request_id for one in ids} == set(ids)
        with pytest.raises(NotFound):
            client.explain("nobody")
        pair[0].stop()
        for _ in range(REQUESTS):
            assert client.with_token(None).generate("x", max_tokens=1).choices


async def test_the_asyncio_client_does_the_same(pair: tuple[Cluster, Cluster]) -> None:
    async with AsyncClient(both(pair)) as client:
        await client.generate("connect", max_tokens=1)
        ids = [(await client.generate("x", max_tokens=1)).request_id for _ in range(REQUESTS)]
        found = await asyncio.to_thread(served, pair, ids)
        assert min(found[0], found[1]) >= REQUESTS // 4
        assert {(await client.explain(one)).request_id for one in ids} == set(ids)
        await asyncio.to_thread(pair[1].stop)
        for _ in range(REQUESTS):
            assert (await client.generate("x", max_tokens=1)).choices


def test_a_gateway_uses_both(pair: tuple[Cluster, Cluster]) -> None:
    with (
        gateway(both(pair)) as host,
        openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x", max_retries=0) as client,
    ):
        for number in range(2 * REQUESTS):
            if number == REQUESTS:
                pair[0].stop()
            assert client.completions.create(model="toy", prompt="x", max_tokens=1).choices


def test_a_list_is_on_this_host_if_each_address_is() -> None:
    assert is_loopback("ipv4:127.0.0.1:1,127.0.0.1:2")
    assert not is_loopback("ipv4:127.0.0.1:1,10.0.0.1:2")


def test_a_draining_router_costs_no_retries(draining: tuple[Cluster, Cluster]) -> None:
    with Client(both(draining), retries=ONCE) as client:
        client.generate("connect", max_tokens=1)
        begin_drain(draining[0])
        asyncio.run(until_left_out(lambda: asyncio.to_thread(client.generate, "x", max_tokens=1)))


async def test_the_asyncio_client_leaves_a_draining_router_out(draining: tuple[Cluster, Cluster]) -> None:
    async with AsyncClient(both(draining), retries=ONCE) as client:
        await client.generate("connect", max_tokens=1)
        await asyncio.to_thread(begin_drain, draining[0])
        await until_left_out(lambda: client.generate("x", max_tokens=1))


def test_if_all_drain_the_error_says_so(draining: tuple[Cluster, Cluster]) -> None:
    with (
        Client(draining[1].address) as other,
        other.stream("x", max_tokens=4000, ignore_eos=True) as answer,
        Client(both(draining), retries=ONCE) as client,
    ):
        next(answer)
        client.generate("connect", max_tokens=1)
        for one in draining:
            begin_drain(one)
        for _ in range(REQUESTS):  # by a router, and then by the client itself
            with pytest.raises(ShuttingDown, match="the server is shutting down; retry") as caught:
                client.generate("x", max_tokens=1)
            assert caught.value.retry_after_s == 1.0


def test_a_single_router_answers_while_it_drains(draining: tuple[Cluster, Cluster]) -> None:
    with Client(draining[0].address, retries=ONCE) as client:
        client.model()
        begin_drain(draining[0])
        for _ in range(IN_TURN):
            assert client.topology().running_requests == 1
        with pytest.raises(ShuttingDown):
            client.generate("x", max_tokens=1)


@pytest.mark.parametrize(
    ("address", "may_be"),
    [
        ("ipv4:127.0.0.1:1,127.0.0.1:2", True),
        ("routers.example:9000", True),
        ("dns:///routers.example:9000", True),
        ("dns://127.0.0.1:53/routers.example:9000", True),
        ("localhost:9000", False),
        ("127.0.0.1:9000", False),
        ("10.0.0.1:9000", False),
        ("ipv6:[fd00::1]:9000", False),
        ("[fd00::1]:9000", False),
        ("unix:/tmp/router.sock", False),
    ],
)
def test_a_list_and_a_name_may_be_several_routers(address: str, may_be: bool) -> None:
    assert may_have_several(address) is may_be


def test_all_addresses_of_a_name_are_used(named: Named) -> None:
    first, second = named.clusters
    with first, second, Client(named.target) as client:
        ids = [client.generate("x", max_tokens=1).request_id for _ in range(REQUESTS)]
        found = served((first, second), ids)
        assert found.total() == REQUESTS
        assert min(found[0], found[1]) >= REQUESTS // 4
        first.stop()
        for _ in range(REQUESTS):
            assert client.generate("x", max_tokens=1).choices


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_name_that_moves_is_asked_for_again(named: Named, is_late: bool) -> None:
    """gRPC alone would wait 30 s between questions. `is_late`: the first answer after the failure is the old one."""
    first, second = named.clusters
    named.hosts[:] = ["127.0.0.1"]
    async with AsyncClient(named.target, retries=ONCE) as client, first, second:
        await client.generate("connect", max_tokens=1)
        if not is_late:
            named.hosts[:] = ["127.0.0.2"]
        asked = named.num_asked
        await asyncio.to_thread(first.stop)
        deadline_s = time.monotonic() + MOVED_S
        while not await is_answered(client):
            assert time.monotonic() < deadline_s, "calls still go to the old address"
            if named.num_asked > asked:
                named.hosts[:] = ["127.0.0.2"]
            await asyncio.sleep(0.01)
        assert named.num_asked > asked


async def is_answered(client: AsyncClient) -> bool:
    try:
        await client.generate("x", max_tokens=1)
    except Unavailable:
        return False
    return True


@dataclass
class Named:
    """Two routers that are not started, and a name whose addresses a test may change. gRPC asks the DNS server of the
    target."""

    clusters: tuple[Cluster, Cluster]
    target: str
    hosts: list[str]
    num_asked: int = 0  # questions about IPv4


@pytest.fixture
def named() -> Iterator[Named]:
    with (
        socket.create_server(("127.0.0.1", 0)) as free,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
    ):
        port = free.getsockname()[1]
        free.close()
        server.bind(("127.0.0.1", 0))
        hosts = ["127.0.0.1", "127.0.0.2"]
        first, second = (Cluster(prefill=0, router={**PATIENT, "host": host, "port": port}) for host in hosts)
        one = Named((first, second), f"dns://127.0.0.1:{server.getsockname()[1]}/routers.example:{port}", hosts)
        thread = threading.Thread(target=answer_names, args=(server, one))
        thread.start()
        try:
            yield one
        finally:
            server.sendto(b"", server.getsockname())
            thread.join()


def answer_names(server: socket.socket, named: Named) -> None:
    """The hosts for each question about IPv4, nothing for others."""
    while True:
        question, peer = server.recvfrom(512)
        if not question:
            return
        end = question.index(b"\0", 12) + 5
        hosts = tuple(named.hosts) if question[end - 4 : end - 2] == b"\0\1" else ()
        answers = [b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(host) for host in hosts]
        head = question[:2] + b"\x85\x80\0\1" + struct.pack(">HHH", len(answers), 0, 0)
        server.sendto(head + question[12:end] + b"".join(answers), peer)
        named.num_asked += bool(hosts)

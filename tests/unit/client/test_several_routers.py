"""A client that knows two routers: both get work, and one that ends is left out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import openai
import pytest

from pdserve import AsyncClient, Client
from pdserve.client.connect import is_loopback
from pdserve.core.errors import NotFound
from pdserve.testing import Cluster
from tests.unit.gateway.conftest import PATIENT, gateway

REQUESTS = 20


@pytest.fixture
def pair() -> Iterator[tuple[Cluster, Cluster]]:
    with Cluster(prefill=0, router=PATIENT) as first, Cluster(prefill=0, router=PATIENT) as second:
        yield first, second


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

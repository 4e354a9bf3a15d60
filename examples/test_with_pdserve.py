"""How to test a program that calls pdserve. Run it with `python -m pytest examples/test_with_pdserve.py`.

`summary` and `summary_later` stand for the program.
"""

from __future__ import annotations

import pytest

from pdserve import AsyncClient, Client, Overloaded, Retries
from pdserve.testing import Cluster, MockTransport, toy_answer


def summary(client: Client, text: str) -> str:
    try:
        return client.generate(f"Summary of {text}:", max_tokens=8, temperature=0.0).text
    except Overloaded:
        return "no summary now"


async def summary_later(client: AsyncClient, text: str) -> str:
    done = await client.generate(f"Summary of {text}:", max_tokens=8, temperature=0.0)
    return done.text


def test_the_answer_is_returned() -> None:
    """Without a cluster: a function answers the client's requests."""
    with Client(transport=MockTransport(lambda request: f"<{request.text}>")) as client:
        assert summary(client, "a book") == "<Summary of a book:>"


def test_a_busy_cluster_gives_no_summary() -> None:
    def busy(request: object) -> str:
        raise Overloaded("all workers are busy", retry_after_s=1.0)

    with Client(transport=MockTransport(busy), retries=Retries(limit=0)) as client:
        assert summary(client, "a book") == "no summary now"


def test_with_a_cluster() -> None:
    """With a router, a prefill worker and two decode workers in this process; one of the workers crashes."""
    with Cluster(prefill=1, decode=2) as cluster, Client(cluster.address) as client:
        expected = toy_answer("Summary of a book:", 8)
        assert summary(client, "a book") == expected
        cluster.stop_worker("decode-0")
        assert summary(client, "a book") == expected


@pytest.mark.asyncio
async def test_with_a_cluster_and_an_event_loop() -> None:
    async with Cluster() as cluster, AsyncClient(cluster.address) as client:
        assert await summary_later(client, "a book") == toy_answer("Summary of a book:", 8)

"""A cancelled request frees all blocks on both workers, in whatever stage it is."""

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest

from pdserve import AsyncClient
from pdserve.engine.toy import answer
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Few blocks and slow steps, so that requests are cancelled in every stage, including queued and preempted."""
    config = tmp_path_factory.mktemp("config") / "slow.toml"
    config.write_text("[worker]\ntoy_step_s = 0.01\nmax_batch_tokens = 128\nkv_blocks = 160\ninbox_depth = 4\n")
    with Cluster("--model", "toy", "--config", str(config)) as cluster:
        yield cluster


@pytest.mark.parametrize("after_pieces", [0, 1, 2, 20])
def test_closing_a_stream_frees_its_blocks(slow: Cluster, after_pieces: int) -> None:
    """Before anything, after the prefill worker's token (KV may still be moving), and while it decodes."""
    with slow.client.stream(toy_prompt(700, salt=after_pieces), max_tokens=400, temperature=0) as stream:
        for _ in range(after_pieces):
            next(stream)
    slow.wait_until_idle()


def test_many_disconnects_leak_no_block(slow: Cluster) -> None:
    """60 requests, two of three leave after a random time; the others' answers are exact."""
    draw = random.Random(5)

    async def one(client: AsyncClient, i: int, leave_s: float | None) -> None:
        prompt = toy_prompt(draw.randrange(1, 900), salt=i)
        call = client.generate(prompt, max_tokens=40, temperature=0.5, seed=i)
        if leave_s is None:
            assert list((await call).token_ids) == answer(prompt, 40, seed=i)
            return
        with contextlib.suppress(TimeoutError):  # the answer may also come before the client leaves
            async with asyncio.timeout(leave_s):
                await call

    async def run() -> None:
        async with AsyncClient(slow.target) as client:
            await asyncio.gather(*(one(client, i, None if i % 3 == 0 else draw.uniform(0.0, 3.0)) for i in range(60)))

    asyncio.run(run())
    slow.wait_until_idle()

"""Deaths in the middle of work, and what the client must not notice."""

from __future__ import annotations

import asyncio
import time

from pdserve import AsyncClient, Completion
from pdserve.engine.toy import answer
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt

STREAMS = 8
TOKENS = 400


def a_decode_worker_dies_in_mid_stream(cluster: Cluster, *, all_die: bool = False) -> None:
    """SIGKILL while it decodes, or of all decode workers: greedy and seeded streams go on at the exact next token.

    Each stream has got enough of its answer not to be suspected of killing its workers (router/recovery.py).
    """
    prompts = [toy_prompt(40 + 30 * i, salt=11) for i in range(STREAMS)]
    options = [{"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i} for i in range(STREAMS)]
    expected = [answer(p, TOKENS, seed=None if i % 2 else i) for i, p in enumerate(prompts)]
    seen: list[list[int]] = [[] for _ in prompts]
    attempts = [0] * STREAMS

    async def follow(client: AsyncClient, i: int) -> None:
        stream = client.stream(prompts[i], max_tokens=TOKENS, **options[i])
        async for piece in stream:
            seen[i].extend(piece.token_ids)
        attempts[i] = stream.completion.timings.attempts

    async def run() -> None:
        async with AsyncClient(cluster.target) as client:
            streams = [asyncio.create_task(follow(client, i)) for i in range(STREAMS)]
            while not all(len(tokens) >= 12 for tokens in seen):
                await asyncio.sleep(0.01)
            assert not any(len(tokens) >= TOKENS - 20 for tokens in seen), "too fast to be killed in mid-stream"
            busiest = await busiest_decode_worker(client)
            others = [worker for worker in ("d0", "d1") if all_die and worker != busiest]
            for worker in (busiest, *others):
                cluster.kill(worker)
            await asyncio.gather(*streams)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert seen == expected
    assert max(attempts) > 1, "nobody was on the killed worker"
    cluster.wait_until_idle(within_s=60)


def a_prefill_worker_dies_while_it_prefills(cluster: Cluster) -> None:
    """SIGKILL while prompts are on it: another prefill worker, or the decode worker itself, takes over."""
    prompts = [toy_prompt(2500 + 100 * i, salt=17) for i in range(STREAMS)]
    expected = [answer(p, 24, seed=i) for i, p in enumerate(prompts)]

    async def run() -> list[Completion]:
        async with AsyncClient(cluster.target) as client:
            calls = [
                asyncio.create_task(client.generate(p, max_tokens=24, temperature=0.7, seed=i))
                for i, p in enumerate(prompts)
            ]
            deadline = time.monotonic() + 20
            while not await _is_prefilling(client, "p0"):
                assert time.monotonic() < deadline, "p0 never had a prompt"
                await asyncio.sleep(0.005)
            cluster.kill("p0")
            return await asyncio.gather(*calls)

    done = asyncio.run(asyncio.wait_for(run(), 60))
    assert [list(one.token_ids) for one in done] == expected
    assert max(one.timings.attempts for one in done) > 1, "nobody was on the killed worker"
    cluster.wait_until_idle(within_s=60)


async def busiest_decode_worker(client: AsyncClient) -> str:
    workers = (await client.topology()).of_role("decode")
    return max(workers, key=lambda worker: worker.running).worker_id


async def _is_prefilling(client: AsyncClient, worker_id: str) -> bool:
    topology = await client.topology()
    return any(w.worker_id == worker_id and w.is_connected and w.running + w.waiting > 0 for w in topology.workers)

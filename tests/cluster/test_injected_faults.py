"""A whole cluster with faults injected into its KV transfers: `up --inject-faults`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from pdserve import AsyncClient, Completion, PdserveError
from pdserve.engine.toy import answer
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt

FRAMES = "seed=5,share=0.3,longest_s=0.2,drop=1,delay=1,duplicate=1,corrupt=2,truncate=1,stall=1,cut=1"
DEADLINE_S = 60.0
NEEDS_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
#: Two pools of one process meet the same faults in tests/unit/kvtransfer/test_fault_storm.py, over every transport.
SLOW = (("shm", pytest.mark.slow), ("nixl", (pytest.mark.slow, NEEDS_NIXL)))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["tcp", *(pytest.param(one, marks=marks) for one, marks in SLOW)])
def test_answers_are_exact_or_typed_errors_under_transfer_faults(transport: str, tmp_path: Path) -> None:
    prompts = [toy_prompt(60 + 11 * i, salt=i) for i in range(60)]
    flags = ("--model", "toy", "--prefill", "2", "--decode", "2", "--transport", transport, "--log-dir", str(tmp_path))

    async def ask(client: AsyncClient, prompt: list[int], gate: asyncio.Semaphore) -> Completion | PdserveError:
        async with gate:
            try:
                return await client.generate(prompt, max_tokens=16, temperature=0, timeout_s=DEADLINE_S)
            except PdserveError as error:
                return error

    async def run(cluster: Cluster) -> list[Completion | PdserveError]:
        gate = asyncio.Semaphore(12)
        async with AsyncClient(cluster.target) as client:
            return await asyncio.gather(*(ask(client, prompt, gate) for prompt in prompts))

    with Cluster(*flags, "--inject-faults", FRAMES) as cluster:
        done = asyncio.run(run(cluster))
        cluster.wait_until_idle(within_s=60)
    finished = [(i, one) for i, one in enumerate(done) if isinstance(one, Completion)]
    assert [list(one.token_ids) for _, one in finished] == [answer(prompts[i], 16) for i, _ in finished]
    assert len(finished) >= 50, Counter(type(one).__name__ for one in done)
    logs = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "fault injected" in logs
    assert "faults are injected into KV transfers" in logs

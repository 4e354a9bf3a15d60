"""Each architecture through a real cluster of one prefill and two decode workers that run vLLM: prefill, transfer,
decode, prefix hits, preemption and a killed worker, in float32, judged by transformers in float64."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import AsyncClient, Completion
from tests.cluster.cluster import Cluster
from tests.cluster.families import BUNDLED, VOCAB, prompts
from tests.cluster.faults import all_have, decode_worker_of
from tests.cluster.suite import generate_all, tokens_of
from tests.models.far_oracle import FarOracle
from tests.models.fork_server import forking_python
from tests.models.tiny import TINY, build, reference

START_S, TURN_S = 600.0, 300.0  # on a machine with many more processes than cores
pytestmark = pytest.mark.timeout(START_S + 6 * TURN_S)

MOST_TURNS = 3  # until a text was preempted, and until one was on the killed worker
LENGTHS = (1, 2, 31, 33, 64, 100, 257)
POOL_TOKENS = 768  # of each worker
LONG = (40, 75, 90, 130, 61, 52)  # prompts of texts that do not fit into the pools of both decode workers
LONG_TOKENS = 260


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forking_python(tmp_path_factory.mktemp("forks")) as found:
        yield found


def settings(python: Path, block_size: int) -> str:
    return (
        f'[worker]\nengine = "vllm"\nengine_python = "{python}"\ndtype = "float32"\ncuda_graphs = false\nthreads = 1\n'
        f"block_size = {block_size}\nkv_blocks = {POOL_TOKENS // block_size}\nmax_batch_tokens = 96\n"
        '[router]\npolicy = "round-robin"\n'  # transfers whenever it can
    )


@pytest.mark.parametrize("name", TINY)
def test_a_cluster_answers_as_transformers_does(name: str, python: Path, tmp_path: Path) -> None:
    family, own = TINY[name]
    model = build(family, own | {"vocab_size": VOCAB}, tmp_path / name)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / part, model / part)
    config = tmp_path / "cluster.toml"
    has_latents = "kv_lora_rank" in own and family != "MiniCPM3"  # whose MLA vLLM computes as plain attention
    config.write_text(settings(python, 16 if has_latents else 32))
    transport = ("shm", "tcp")[sum(map(ord, name)) % 2]
    flags = ("--prefill", "1", "--decode", "2", "--transport", transport, "--config", str(config))
    oracle = FarOracle(reference(name, model, tmp_path / "reference"))
    with Cluster("--model", str(model), *flags, start_s=START_S) as cluster:
        cached = [answer_all(cluster, oracle) for _ in range(2)][1]
        assert sum(one.usage.cached_prompt_tokens for one in cached) > 0
        for turn in range(MOST_TURNS):
            done = answer_long(cluster, oracle, turn, is_killed=False)
            if sum(one.timings.preemptions for one in done):
                break
        else:
            raise AssertionError(f"no text was preempted, {MOST_TURNS} times")
        for turn in range(MOST_TURNS):
            done = answer_long(cluster, oracle, turn, is_killed=True)
            if max(one.timings.attempts for one in done) > 1:
                break
        else:
            raise AssertionError(f"no text was on the killed worker, {MOST_TURNS} times")


def answer_all(cluster: Cluster, oracle: FarOracle) -> list[Completion]:
    """Texts whose prompts are transferred."""
    texts = prompts(LENGTHS)
    done = generate_all(cluster, texts, max_tokens=32, temperature=0, ignore_eos=True)
    oracle.assert_exact(texts, tokens_of(done, 32))
    assert "remote" in {one.timings.path for one in done}
    cluster.wait_until_idle(within_s=TURN_S)
    return done


def answer_long(cluster: Cluster, oracle: FarOracle, turn: int, *, is_killed: bool) -> list[Completion]:
    """Texts whose blocks do not fit into the pools. If `is_killed`, the worker of one dies while all decode."""
    texts = prompts(LONG, seed=turn + 10 * is_killed)
    seen: list[list[int]] = [[] for _ in texts]

    async def follow(client: AsyncClient, at: int) -> Completion:
        name = f"{is_killed}-{turn}-{at}"
        options = {"max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True, "request_id": name}
        stream = client.stream(texts[at], **options)
        async for piece in stream:
            seen[at].extend(piece.token_ids)
        return stream.completion

    async def run() -> list[Completion]:
        async with AsyncClient(cluster.target) as client:
            streams = [asyncio.create_task(follow(client, at)) for at in range(len(texts))]
            if is_killed:
                await all_have(12, seen, streams)
                shortest = min(range(len(texts)), key=lambda at: len(seen[at]))
                os.kill(pids[await decode_worker_of(client, f"True-{turn}-{shortest}")], signal.SIGKILL)
            return await asyncio.gather(*streams)

    cluster.wait_until_idle(within_s=TURN_S)  # a worker that was killed is back
    pids = {worker: cluster.pid_of(worker) for worker in ("d0", "d1")}  # found now: it takes long beside many processes
    done = asyncio.run(asyncio.wait_for(run(), TURN_S))
    oracle.assert_exact(texts, tokens_of(done, LONG_TOKENS))
    return done

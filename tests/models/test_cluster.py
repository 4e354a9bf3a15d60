"""A real cluster whose workers run vLLM in an environment of their own: prefill, transfer, decode, prefix hits, and
killed workers, judged by transformers in float64."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve import AsyncClient, Completion
from pdserve.core.types import Sampling
from tests.cluster.cluster import Cluster
from tests.cluster.families import BUNDLED, VOCAB, prompts
from tests.cluster.faults import all_have, decode_worker_of, kill_rank, ranks_of
from tests.cluster.suite import LENGTHS, generate_all, tokens_of
from tests.models.far_oracle import FarOracle
from tests.models.tiny import TINY, build

pytestmark = pytest.mark.timeout(900)

TOKENS = 32
MOST_TURNS = 3  # to kill a worker in the middle of a text
GREEDY = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def open_cluster(folder: Path, model: Path, *flags: str) -> Cluster:
    """`folder` gets its configuration."""
    config = folder / "vllm.toml"
    config.write_text(
        f'[worker]\nengine = "vllm"\nengine_python = "{sys.executable}"\ndtype = "float32"\ncuda_graphs = false\n'
        "kv_blocks = 200\nthreads = 1\nmax_batch_tokens = 96\n"
    )
    return Cluster("--model", str(model), "--config", str(config), *flags, start_s=600.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with open_cluster(tmp_path_factory.mktemp("cluster"), BUNDLED, "--decode", "2") as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle() -> FarOracle:
    return FarOracle(BUNDLED)


def test_answers_match_transformers_remote_local_and_cached(cluster: Cluster, oracle: FarOracle) -> None:
    texts = prompts(LENGTHS)
    done = generate_all(cluster, texts, **GREEDY)
    oracle.assert_exact(texts, tokens_of(done, TOKENS))
    assert {one.timings.path for one in done} == {"remote", "local"}
    again = generate_all(cluster, texts, **GREEDY)
    oracle.assert_exact(texts, tokens_of(again, TOKENS))
    assert sum(one.usage.cached_prompt_tokens for one in again) > 0
    cluster.wait_until_idle()


def test_a_grammar_is_followed(cluster: Cluster) -> None:
    assert cluster.client.generate("x = (", max_tokens=20, regex="[0-9]{3}-[a-f]{2}").text[3] == "-"


def test_answers_survive_the_death_of_the_prefill_worker(cluster: Cluster, oracle: FarOracle) -> None:
    cluster.kill("p0")
    texts = prompts(LENGTHS)[-3:]
    done = generate_all(cluster, texts, **GREEDY)
    oracle.assert_exact(texts, tokens_of(done, TOKENS))


def test_answers_survive_the_death_of_their_decode_worker(cluster: Cluster, oracle: FarOracle) -> None:
    """Greedy and seeded texts go on with their next token on the other worker."""
    texts = prompts([20, 130, 260, 40], seed=1)
    asked = [Sampling(temperature=0.9 if at % 2 else 0.0, seed=at) for at in range(len(texts))]

    async def turn_of(client: AsyncClient, turn: int) -> tuple[list[list[int]], int]:
        seen: list[list[int]] = [[] for _ in texts]
        attempts = [0] * len(texts)

        async def follow(at: int) -> None:
            options = {"temperature": asked[at].temperature, "seed": asked[at].seed, "ignore_eos": True}
            stream = client.stream(texts[at], max_tokens=400, request_id=f"text-{turn}-{at}", **options)
            async for piece in stream:
                seen[at].extend(piece.token_ids)
            attempts[at] = stream.completion.timings.attempts

        pids = {worker: cluster.pid_of(worker) for worker in ("d0", "d1")}
        streams = [asyncio.create_task(follow(at)) for at in range(len(texts))]
        await all_have(12, seen, streams)
        os.kill(pids[await decode_worker_of(client, f"text-{turn}-1")], signal.SIGKILL)
        await asyncio.gather(*streams)
        return seen, max(attempts)

    async def run() -> list[list[int]]:
        async with AsyncClient(cluster.target) as client:
            for turn in range(MOST_TURNS):
                seen, attempts = await turn_of(client, turn)
                if attempts > 1:
                    return seen
                await asyncio.to_thread(cluster.wait_until_idle, within_s=300)
        raise AssertionError(f"no text was on the killed worker, {MOST_TURNS} times")

    answers = asyncio.run(asyncio.wait_for(run(), 800))
    assert [len(tokens) for tokens in answers] == [400] * len(texts)
    oracle.assert_exact(texts, answers, sampling=[one if one.temperature else None for one in asked])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_transfer_their_own_heads_and_survive_kills(transport: str, tmp_path: Path) -> None:
    """Two tensor-parallel ranks in each worker. A rank of the prefill worker dies while it is needed, then one of the
    decode worker."""
    family, own = TINY["llama"]
    model = build(family, own | {"vocab_size": VOCAB}, tmp_path / "llama")
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / part, model / part)
    oracle, texts = FarOracle(model), prompts([2, 15, 33, 100, 257, 600])
    flags = ("--decode", "1", "--transport", transport, "--set", "router.policy=round-robin")  # transfers if it can
    with open_cluster(tmp_path, model, *flags, "--set", "worker.tensor_parallel=2") as cluster:

        def check(**options: Any) -> list[Completion]:
            done = generate_all(cluster, texts, **GREEDY, **options)
            oracle.assert_exact(texts, tokens_of(done, TOKENS))
            return done

        assert {one.timings.path for one in check()} == {"remote"}
        assert sum(one.usage.cached_prompt_tokens for one in check()) > 0
        if transport == "tcp":
            return
        before = [ranks_of(cluster, worker) for worker in ("p0", "d0")]
        check(meanwhile=lambda _: kill_rank(cluster, "p0"))
        cluster.wait_until_idle(within_s=300)
        kill_rank(cluster, "d0")
        deadline_s = time.monotonic() + 60
        while "d0" in cluster.workers():
            assert time.monotonic() < deadline_s, "d0 does not notice that its rank is dead"
            time.sleep(0.1)
        cluster.wait_until_idle(within_s=300)
        after = [ranks_of(cluster, worker) for worker in ("p0", "d0")]
        assert [len(each) for each in after] == [1, 1]
        assert not {*before[0], *before[1]} & {*after[0], *after[1]}
        assert {one.timings.path for one in check()} == {"remote"}
        cluster.wait_until_idle()

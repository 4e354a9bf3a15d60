"""A cluster restarts, and its workers still have the KV blocks that they had on disk; workers share a store; and what
leaves first."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pdserve import Client
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.testing import Cluster

LENGTH = 320  # tokens of a prompt: 20 blocks
NUM_PROMPTS = 4
NUM_BLOCKS = 100  # in each pool


def texts(seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(chr(draw.randrange(32, 127)) for _ in range(LENGTH)) for _ in range(NUM_PROMPTS)]


def cached_tokens(client: Client, prompts: list[str]) -> int:
    """Asks for an answer to each. Raises AssertionError if one is wrong."""
    total = 0
    for prompt in prompts:
        completion = client.generate(prompt, max_tokens=4, temperature=0.0)
        assert completion.token_ids == tuple(answer(list(prompt.encode()), 4))
        total += completion.usage.cached_prompt_tokens
    return total


def num_read(cluster: Cluster, tier: str = "disk") -> int:
    """Blocks that the workers have read from the tier."""
    programs: list[Any] = [cluster._hosts[name]._engine.program for name in cluster.worker_ids]  # type: ignore[attr-defined]
    return sum(program.fetches.num_filled[tier] for program in programs)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [0, 1])
def test_a_restart_keeps_the_hits_on_disk(tmp_path: Path, prefill: int) -> None:
    """Of the same prompts, when they have left the pools."""
    worker = {"kv_blocks": NUM_BLOCKS, "toy_token_s": 0.002, "kv_disk_path": str(tmp_path / "kv")}
    found = []
    for number in range(2):
        with Cluster(prefill=prefill, worker=worker) as cluster, Client(cluster.address) as client:
            if number == 0:
                assert cached_tokens(client, texts(1)) == 0
                cached_tokens(client, texts(2) + texts(3))  # evicts them
            before = num_read(cluster)
            cached = cached_tokens(client, texts(1))
            found.append((cached, num_read(cluster) - before))
            if number == 0:
                cached_tokens(client, texts(4) + texts(5))
    (cached, read), (cached_after, read_after) = found
    assert read > 0
    assert cached_after >= 0.9 * cached
    assert read_after >= 0.9 * read


@pytest.mark.slow
@pytest.mark.parametrize("is_redis", [False, True])
def test_new_workers_read_what_others_left_in_the_store(tmp_path: Path, is_redis: bool) -> None:
    """Everything that was cached, whether or not it had left memory, also by workers of other ids and roles."""
    with EmbeddedRedis.start() as server:
        url = server.url if is_redis else f"file://{tmp_path}"
        secret = {"cluster_secret": "the secret of both clusters"}
        worker = {"kv_blocks": NUM_BLOCKS, "toy_token_s": 0.004, "kv_store": url, **secret}
        with Cluster(prefill=0, decode=1, worker=worker, router=secret) as cluster, Client(cluster.address) as client:
            assert cached_tokens(client, texts(1)) == 0
        for prefill, decode in ((0, 2), (1, 1)):
            cluster = Cluster(prefill=prefill, decode=decode, worker=worker, router=secret)
            with cluster, Client(cluster.address) as client:
                cached = cached_tokens(client, texts(1))
                assert cached >= 0.9 * NUM_PROMPTS * (LENGTH - 1)
                assert num_read(cluster, "store") >= 0.9 * cached / 16


@pytest.mark.parametrize("prefill", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_blocks_of_an_ended_session_leave_before_those_of_another(prefill: int) -> None:
    """It was used last, so without its end it would stay, and the other one would leave."""
    found = []
    for is_ended in (True, False):
        cluster = Cluster(prefill=prefill, decode=1, worker={"kv_blocks": 64, "toy_token_s": 0.002})
        with cluster, Client(cluster.address) as client:
            [kept, ended, *others] = texts(1)
            for name, prompt in (("kept", kept), ("ended", ended)):
                client.generate(prompt, max_tokens=4, temperature=0.0, session_id=name)
            if is_ended:
                assert client.end_session("ended")
                assert not client.end_session("unknown")
            cached_tokens(client, others)
            found.append((cached_tokens(client, [kept]), cached_tokens(client, [ended])))
    (kept_tokens, ended_tokens), (kept_without, _) = found
    assert kept_tokens >= LENGTH - 16 > kept_without
    assert ended_tokens < LENGTH // 2

"""SIGKILL of workers and of Redis while requests run, against plain processes."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis

from pdserve import AsyncClient, Retries
from pdserve.client.results import ExplainedCandidate
from pdserve.core.errors import NotFound
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from tests.cluster.cluster import Cluster
from tests.cluster.faults import a_decode_worker_dies_in_mid_stream, a_prefill_worker_dies_while_it_prefills
from tests.cluster.redis_faults import FAULTS
from tests.cluster.redis_faults import run as run_redis_fault
from tests.cluster.suite import toy_prompt

pytestmark = pytest.mark.timeout(400)

SLOW = "[worker]\ntoy_step_s = 0.01\nmax_batch_tokens = 256\n"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "slow.toml"
    config.write_text(SLOW)
    with Cluster("--model", "toy", "--prefill", "2", "--decode", "2", "--config", str(config)) as cluster:
        yield cluster


def test_a_killed_decode_worker_loses_no_token(slow: Cluster) -> None:
    a_decode_worker_dies_in_mid_stream(slow)


def test_killing_all_decode_workers_loses_no_token(slow: Cluster) -> None:
    a_decode_worker_dies_in_mid_stream(slow, all_die=True)


def test_a_killed_prefill_worker_loses_no_token(slow: Cluster) -> None:
    a_prefill_worker_dies_while_it_prefills(slow)


def test_requests_succeed_without_redis_and_the_index_refills(tmp_path: Path) -> None:
    """No request fails while Redis is down. An empty Redis that comes back is filled with what the workers cache."""
    away_s = float(os.environ.get("PDSERVE_REDIS_AWAY_S", "1.5"))  # `make test-slow` keeps it away for a minute
    redis = EmbeddedRedis.start()
    flags = ("--model", "toy", "--set", "worker.toy_step_s=0.005")
    try:
        with Cluster(*flags, env={"PDSERVE_REDIS": redis.url}) as cluster:
            asyncio.run(_ask_until_back(cluster, redis, away_s))
            redis = EmbeddedRedis.start(redis.path)
            cached = max(worker.evictable_blocks for worker in cluster.client.topology().workers)
            assert cached > 20
            deadline = time.monotonic() + 60.0
            while _index_blocks(redis.url) < cached:
                assert time.monotonic() < deadline, "the index did not refill"
                time.sleep(0.1)
            cluster.wait_until_idle()
    finally:
        redis.stop()


async def _ask_until_back(cluster: Cluster, redis: EmbeddedRedis, away_s: float) -> None:
    """Two clients send requests continuously while Redis is down; each answer is exact."""
    done = 0
    stop = asyncio.Event()

    async def ask(client: AsyncClient, salt: int) -> None:
        nonlocal done
        while not stop.is_set():
            prompt = toy_prompt(30 + (done * 37 + salt * 11) % 300, salt=salt)
            one = await client.generate(prompt, max_tokens=8, temperature=0)
            assert list(one.token_ids) == answer(prompt, 8)
            done += 1

    async with AsyncClient(cluster.target, retries=Retries(limit=0)) as client:
        askers = [asyncio.create_task(ask(client, salt)) for salt in range(2)]
        while done < 20:
            await asyncio.sleep(0.02)
        redis.kill()
        before = done
        await asyncio.sleep(away_s)
        async with asyncio.timeout(60):  # a busy machine may answer few requests meanwhile
            while done < before + 20:
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*askers)


def _index_blocks(url: str) -> int:
    """Blocks of all workers; each worker's set also has an empty text."""
    with Redis.from_url(url) as client:
        return sum(client.scard(key) - 1 for key in client.scan_iter("*:r:*", count=1000))


def test_a_full_redis_loses_no_worker() -> None:
    """Redis rejects all writes until every registration has expired."""
    result = run_redis_fault("full", 2.5, lease_s=1.0, clients=2)
    assert (result.errors, result.wrong, result.least_workers) == ({}, 0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_redis_fails_a_request(fault: str) -> None:
    result = run_redis_fault(fault, 20.0)
    assert result.requests > 0
    assert (result.errors, result.wrong) == ({}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_prefix_is_pulled_from_a_full_worker(is_killed: bool) -> None:
    """Each worker decodes one answer at a time, so that a second request with the same prefix goes to the other one.
    The source may die while it is asked. Steps are so long that a pull is sooner than to compute on any machine."""
    flags = ("--model", "toy", "--prefill", "0", "--decode", "2")
    settings = ("worker.toy_step_s=0.3", "worker.max_batch=1", "worker.max_batch_tokens=64", "router.prefix_lookup_s=5")
    sets = (flag for one in settings for flag in ("--set", one))
    redis = EmbeddedRedis.start()
    try:
        with Cluster(*flags, *sets, env={"PDSERVE_REDIS": redis.url}) as cluster, ThreadPoolExecutor(1) as pool:
            _pull(cluster, redis, pool, is_killed=is_killed)
    finally:
        redis.stop()


def _pull(cluster: Cluster, redis: EmbeddedRedis, pool: ThreadPoolExecutor, *, is_killed: bool) -> None:
    prefix = toy_prompt(1_008)
    first = cluster.client.stream(prefix, max_tokens=60, temperature=0)
    tokens = [*next(first).token_ids]
    until_s = time.monotonic() + 60.0
    while _index_blocks(redis.url) < len(prefix) // 16:
        assert time.monotonic() < until_s, "the index has not the prefix"
        time.sleep(0.01)
    source = cluster.decode_worker_of(first.request_id)
    pid = cluster.pid_of(source)
    if is_killed:
        os.kill(pid, signal.SIGSTOP)  # it neither answers nor refuses
    prompt = [*prefix, 65]
    second = pool.submit(cluster.client.generate, prompt, request_id="second", max_tokens=4, temperature=0)
    chosen = placed(cluster, "second")
    assert chosen.decode_worker != source
    assert chosen.pull is not None
    assert (chosen.pull.source, chosen.pull.is_pulled) == (source, True)
    assert 0 < chosen.pull.num_tokens <= 1_008, "the index may lack the last blocks still"
    if is_killed:
        os.kill(pid, signal.SIGKILL)
    done = second.result(60.0)
    assert list(done.token_ids) == answer(prompt, 4)
    assert done.usage.cached_prompt_tokens == (0 if is_killed else chosen.pull.num_tokens)
    for piece in first:
        tokens += piece.token_ids
    assert tokens == answer(prefix, 60)
    cluster.wait_until_idle()


def placed(cluster: Cluster, request_id: str) -> ExplainedCandidate:
    """The placement of a request that was just sent."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        with contextlib.suppress(NotFound):
            chosen = cluster.client.explain(request_id).chosen
            if chosen is not None:
                return chosen
        time.sleep(0.005)
    raise AssertionError(f"{request_id} was not placed")

"""Requests against a cluster whose Redis answers wrongly, slowly or not at all.

A router and two workers of each role with the toy engine are processes of their own, as on Kubernetes, and find each
other through Redis. Clients send requests without retries, and each answer is compared with the exact one.
  full       Redis rejects every write, so that each registration expires
  read-only  Redis becomes a replica of a server that does not exist
  evicting   Redis holds almost nothing, and random keys are evicted
  slow       Redis answers only a third of the time
  replaced   Redis is killed every ten seconds, and an empty one takes its place
  absent     Redis is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pdserve import AsyncClient, Retries, Slo
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from tests.unit.router_io.processes import Start, programs

CLIENTS: Final = 8
MAX_TOKENS: Final = 24
NUM_WORKERS: Final = 4
WHOLE_S: Final = 60.0
PATIENT: Final = Slo(ttft_s=120.0, tpot_s=20.0)  # no request is rejected because it may be late


@dataclass(slots=True, kw_only=True)
class RedisFaultResult:
    requests: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    least_workers: int = NUM_WORKERS  # that the router was connected to during the fault


class Server:
    """The Redis of the cluster, which a fault may replace."""

    def __init__(self) -> None:
        self.redis = EmbeddedRedis.start()
        self.url = self.redis.url

    def replace(self) -> None:
        self.redis.kill()
        self.redis = EmbeddedRedis.start(self.redis.path)


Fault = Callable[[Server], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def configured(server: Server, **values: str) -> AsyncIterator[Any]:
    """Changes settings of Redis while the body runs. Gives a client."""
    async with Redis.from_url(server.url) as client:
        former = {name: (await client.config_get(name))[name] for name in values}
        for name, value in values.items():
            await client.config_set(name, value)
        try:
            yield client
        finally:
            for name, value in former.items():
                await client.config_set(name, value)


@asynccontextmanager
async def full(server: Server) -> AsyncIterator[None]:
    async with configured(server, **{"maxmemory-policy": "noeviction", "maxmemory": "1"}):
        yield


@asynccontextmanager
async def read_only(server: Server) -> AsyncIterator[None]:
    async with Redis.from_url(server.url) as client:
        await client.replicaof("127.0.0.1", 1)
        try:
            yield
        finally:
            await client.replicaof("NO", "ONE")


@asynccontextmanager
async def evicting(server: Server) -> AsyncIterator[None]:
    async with (
        configured(server, **{"maxmemory-policy": "allkeys-random", "maxmemory": "1mb"}) as client,
        repeating(lambda: client.set(f"filler:{random.random()}", b"x" * 20_000), 0.005),
    ):
        yield


@asynccontextmanager
async def slow(server: Server) -> AsyncIterator[None]:
    async with (
        Redis.from_url(server.url) as client,
        repeating(lambda: client.execute_command("CLIENT", "PAUSE", "1000", "ALL"), 0.5),
    ):
        yield


@asynccontextmanager
async def replaced(server: Server) -> AsyncIterator[None]:
    async def replace() -> None:
        await asyncio.to_thread(server.replace)

    async with repeating(replace, 10.0):
        yield


@asynccontextmanager
async def absent(server: Server) -> AsyncIterator[None]:
    server.redis.kill()
    try:
        yield
    finally:
        server.replace()


@asynccontextmanager
async def repeating(work: Callable[[], Any], pause_s: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            with contextlib.suppress(RedisError):
                await work()
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


FAULTS: Final[dict[str, Fault]] = {
    "full": full,
    "read-only": read_only,
    "evicting": evicting,
    "slow": slow,
    "replaced": replaced,
    "absent": absent,
}


def run(fault: str, seconds: float, *, lease_s: float = 5.0, clients: int = CLIENTS) -> RedisFaultResult:
    """Raises AssertionError if the cluster is not whole before and after the fault."""
    server = Server()
    try:
        with programs() as start:
            target = start_cluster(start, server.url, lease_s)
            return asyncio.run(observe(target, FAULTS[fault](server), seconds, clients))
    finally:
        server.redis.stop()


def start_cluster(start: Start, redis_url: str, lease_s: float) -> str:
    """HOST:PORT of the router."""
    env = {"PDSERVE_REDIS": redis_url}
    for program, name in (("prefill_worker", "p"), ("decode_worker", "d")):
        for number in range(NUM_WORKERS // 2):
            start(program, "--model=toy", f"--worker-id={name}{number}", f"--lease-s={lease_s}", env=env)
    return start("router", "--model=toy", "--port=0", env=env).address


async def observe(
    target: str, during: AbstractAsyncContextManager[None], seconds: float, clients: int
) -> RedisFaultResult:
    result = RedisFaultResult()
    async with AsyncClient(target, retries=Retries(limit=0)) as client:
        await until_whole(client)
        async with during:
            until_s = time.monotonic() + seconds
            await asyncio.gather(*(send(client, result, number, until_s) for number in range(clients)))
        await until_whole(client)
    return result


async def send(client: AsyncClient, result: RedisFaultResult, number: int, until_s: float) -> None:
    draw = random.Random(number)
    while time.monotonic() < until_s:
        prompt = [draw.randrange(1, 200) for _ in range(draw.randrange(8, 400))]
        try:
            done = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, slo=PATIENT)
            result.wrong += list(done.token_ids) != answer(prompt, MAX_TOKENS)
            if not number:
                result.least_workers = min(result.least_workers, await num_connected(client))
        except Exception as error:  # counted: each failure is one too many
            result.errors[f"{type(error).__name__}: {error}"[:100]] += 1
        result.requests += 1


async def num_connected(client: AsyncClient) -> int:
    return sum(one.is_connected for one in (await client.topology()).workers)


async def until_whole(client: AsyncClient) -> None:
    deadline_s = time.monotonic() + WHOLE_S
    while (count := await num_connected(client)) < NUM_WORKERS:
        assert time.monotonic() < deadline_s, f"only {count} of {NUM_WORKERS} workers are connected"
        await asyncio.sleep(0.1)

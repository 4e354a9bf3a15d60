"""What the tests of this room begin with: chains of blocks, registered workers, an index that follows them."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pdserve.core.types import Role
from pdserve.prefix.publisher import WorkerPublisher
from pdserve.prefix.redis_index import RedisIndex
from pdserve.prefix.registry import Registration

SEED = bytes(range(32))


def chain(length: int, name: str = "a") -> list[bytes]:
    return [hashlib.blake2b(f"{name}{at}".encode(), digest_size=16).digest() for at in range(length)]


def registration(worker_id: str, incarnation: str = "first", role: Role = Role.DECODE) -> Registration:
    return Registration(worker_id=worker_id, incarnation=incarnation, role=role, endpoint="127.0.0.1:4000")


def publisher(
    url: str, worker_id: str, incarnation: str = "first", heartbeat_s: float | None = None, **settings: Any
) -> WorkerPublisher:
    """Its lease does not end on a busy machine. `heartbeat_s`: for tests that wait for heartbeats."""
    settings = {"cluster": "test", "hash_seed": SEED, "lease_s": 600.0, **settings}
    one = WorkerPublisher(url, settings.pop("cluster"), registration(worker_id, incarnation), **settings)
    if heartbeat_s is not None:
        one._heartbeat_s = heartbeat_s
    return one


@asynccontextmanager
async def publishing(url: str, worker_id: str, incarnation: str = "first", **settings: Any) -> AsyncIterator[Any]:
    """A worker whose publisher has registered."""
    one = publisher(url, worker_id, incarnation, **settings)
    await one.start()
    try:
        await until(lambda: one.is_connected)
        yield one
    finally:
        await one.stop()


@asynccontextmanager
async def following(url: str, cluster: str = "test", seed: bytes = SEED, **settings: Any) -> AsyncIterator[RedisIndex]:
    """An index with a patience that a crowded machine does not exhaust."""
    index = RedisIndex(url, cluster, hash_seed=seed, **{"timeout_s": 60.0, "refresh_s": 0.02, **settings})
    await index.start()
    try:
        yield index
    finally:
        await index.close()


async def until(holds: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def until_found(index: Any, hashes: list[bytes], expected: dict[str, int], deadline_s: float = 60.0) -> None:
    """Waits until the index answers exactly so."""
    end_s = time.monotonic() + deadline_s
    while (found := dict(await index.lookup(hashes))) != expected:
        assert time.monotonic() < end_s, f"found {found}, expected {expected}"
        await asyncio.sleep(0.005)


async def crash(one: WorkerPublisher) -> None:
    """Ends a publisher as SIGKILL would: without a word to Redis."""
    one._is_connected = False
    await one.stop()

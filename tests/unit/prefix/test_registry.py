import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
import redis

from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.registry import Registration, Registry, living_holder
from tests.unit.prefix.given import crash, publisher, publishing, registration, until

Seen = list[tuple[Registration, ...]]


@asynccontextmanager
async def watching(url: str, **settings: float) -> AsyncIterator[tuple[Registry, Seen]]:
    registry, seen = Registry(url, "test", **{"poll_s": 0.02, "forget_s": 0.3, **settings}), []
    task = asyncio.create_task(registry.watch(seen.append))
    try:
        yield registry, seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def ids(registrations: tuple[Registration, ...]) -> list[str]:
    return [one.worker_id for one in registrations]


async def test_only_changes_of_workers_are_reported(url: str) -> None:
    async with watching(url) as (registry, seen):
        async with publishing(url, "b"), publishing(url, "a"):
            await until(lambda: ids(registry.workers) == ["a", "b"])
            assert registry.workers == (registration("a"), registration("b"))
        await until(lambda: registry.workers == ())
    assert all(before != after for before, after in pairwise(seen))


async def test_a_new_incarnation_replaces_the_old_one_at_once(url: str) -> None:
    async with watching(url, forget_s=60.0) as (registry, _), publishing(url, "w", "old"):
        await until(lambda: registry.workers == (registration("w", "old"),))
        async with publishing(url, "w", "new"):
            await until(lambda: registry.workers == (registration("w", "new"),))


async def test_a_crashed_worker_is_removed_after_its_lease(url: str) -> None:
    async with watching(url) as (registry, _):
        worker = publisher(url, "w", lease_s=0.4)
        await worker.start()
        await until(lambda: ids(registry.workers) == ["w"])
        await crash(worker)
        await until(lambda: registry.workers == ())


async def test_a_living_holder_of_an_id_is_found(url: str, mortal: EmbeddedRedis) -> None:
    elsewhere, lease_s = "127.0.0.1:4001", 2.0
    assert await living_holder(url, "test", "w", elsewhere, lease_s) == ""
    async with publishing(url, "w", lease_s=16.0):  # so long because renewals are late on a busy machine
        assert await living_holder(url, "test", "w", elsewhere, 16.0) == "127.0.0.1:4000"
        assert await living_holder(url, "test", "w", "127.0.0.1:4000", lease_s) == "", "it is the same worker"
        assert await living_holder(url, "test", "v", elsewhere, lease_s) == ""
    dead = publisher(url, "w")
    await dead.start()
    await until(lambda: dead.is_connected)
    await crash(dead)
    assert await living_holder(url, "test", "w", elsewhere, lease_s) == "", "it renews nothing"
    mortal.kill()
    assert await living_holder(mortal.url, "test", "w", elsewhere, lease_s) == "", "Redis does not answer"


async def test_known_workers_stay_without_redis(mortal: EmbeddedRedis) -> None:
    async with (
        watching(mortal.url, forget_s=600.0) as (registry, seen),
        publishing(mortal.url, "w", heartbeat_s=0.05) as worker,
    ):
        await until(lambda: ids(registry.workers) == ["w"])
        mortal.kill()
        await until(lambda: not registry._is_available and not worker.is_connected)
        assert ids(registry.workers) == ["w"]
        with EmbeddedRedis.start(mortal.path):
            await until(lambda: registry._is_available and worker.is_connected)
            assert ids(registry.workers) == ["w"]
    assert len(seen) == 1


async def test_invalid_registrations_are_skipped(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        for name, facts in {
            "bad": "{",
            "list": "[]",
            "role": '{"role": "king", "endpoint": "a:1"}',
            "a b": "{}",
        }.items():
            client.sadd("{pd:test}:workers", name)
            client.hset("{pd:test}:worker:" + name, mapping={"incarnation": "1", "facts": facts})
    async with publishing(url, "good"):
        registry = Registry(url, "test")
        assert ids(await registry.read()) == ["good"]
        await registry.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("worker_id", "a b"), ("worker_id", ""), ("incarnation", "x\n"), ("endpoint", "nowhere"), ("endpoint", ":1")],
)
def test_an_invalid_registration_names_its_field(field: str, value: str) -> None:
    facts = {"worker_id": "w", "incarnation": "1", "role": Role.DECODE, "endpoint": "h:1", field: value}
    with pytest.raises(ConfigError, match=field):
        Registration(**facts)

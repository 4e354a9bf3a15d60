"""A Redis that two clusters share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from pdserve.core.errors import ConfigError
from pdserve.launch import settings
from pdserve.launch.local import check_alone
from pdserve.launch.ports import is_free
from pdserve.launch.running import Running
from pdserve.launch.spec import ClusterSpec
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.registry import Registry
from tests.support.tcp_redis import PASSWORD, listen_on_tcp

from .conftest import is_alive, until


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@pytest.fixture(scope="module")
def first(redis: EmbeddedRedis) -> Iterator[Running]:
    with Running.start("--model", "toy", env={"PDSERVE_REDIS": redis.url}) as cluster:
        yield cluster


def asked(redis: str, **more: str) -> ClusterSpec:
    return dataclasses.replace(settings.read({"model": "toy", **more}, None, ()).spec, redis=redis)


async def test_a_second_cluster_of_one_name_is_rejected(first: Running, redis: EmbeddedRedis) -> None:
    spec = asked(redis.url)
    with pytest.raises(ConfigError, match="cluster: got default, expected a name that no other cluster has") as caught:
        await check_alone(spec)
    assert first.address("d0") in str(caught.value)
    assert "--set cluster=NAME" in str(caught.value)


async def test_clusters_with_different_names_share_a_redis(first: Running, redis: EmbeddedRedis) -> None:
    await check_alone(asked(redis.url, cluster="blue"))


async def test_a_wrong_password_is_rejected() -> None:
    with EmbeddedRedis.start() as redis:
        url = listen_on_tcp(redis)
        await check_alone(asked(url))
        with pytest.raises(ConfigError, match=r"redis: got redis://\*\*\*@127.0.0.1:\d+/0, expected .* password"):
            await check_alone(asked(url.replace(PASSWORD, "wrong")))


async def test_a_silent_redis_does_not_stop_the_start() -> None:
    await check_alone(asked("redis://127.0.0.1:1/0"))


async def test_registrations_of_a_dead_cluster_do_not_stop_the_start() -> None:
    """A killed launcher leaves registrations behind until their lease ends."""
    redis = EmbeddedRedis.start()
    try:
        with Running.start("--model", "toy", env={"PDSERVE_REDIS": redis.url}) as cluster:
            spec, pids = asked(redis.url), cluster.pids()
            ports = [int(cluster.address(name).rpartition(":")[2]) for name in ("p0", "d0")]
            with pytest.raises(ConfigError):
                await check_alone(spec)
            cluster.kill()
            until(lambda: not any(is_alive(pid) for pid in pids.values()))
            until(lambda: all(is_free("127.0.0.1", port) for port in ports))  # Threads may outlive the first.
        await check_alone(spec)
        registry = Registry(redis.url, spec.cluster)
        assert {worker.worker_id for worker in await registry.read()} == {"p0", "d0"}, "nothing was left behind"
        await registry.close()
    finally:
        redis.stop()

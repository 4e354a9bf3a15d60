"""Services that a cluster needs: those that are missing when it is ready, and a Redis that two clusters share."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.launch import settings
from pdserve.launch.ports import is_free
from pdserve.launch.running import Running
from pdserve.launch.serve import capacity_warnings, live_url, ready_line
from pdserve.launch.services import check_alone, degradations, endpoint_answers
from pdserve.launch.settings import bundled_model
from pdserve.launch.spec import ClusterSpec
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.registry import Registry
from tests.support.tcp_redis import PASSWORD, listen_on_tcp

from .conftest import is_alive, until

DEAD = "127.0.0.1:1"
SPEC = ClusterSpec(model="toy", redis=f"redis://:pa55@{DEAD}/0", settings={"router": {"otlp": DEAD}})


async def test_the_ready_line_names_what_is_missing() -> None:
    missing = await degradations(SPEC, has_own_redis=False)
    assert ready_line(SPEC, "127.0.0.1:50051", missing) == (
        "pdserve ready: grpc 127.0.0.1:50051 (1 prefill, 1 decode, redis 127.0.0.1:1, model toy); DEGRADED: "
        "redis does not answer, so prompts are placed without the prefix index; "
        "no collector answers at 127.0.0.1:1, so traces are lost"
    )


def test_the_ready_line_and_the_capacity_of_a_mock(tmp_path: Path) -> None:
    """No weights are needed, nor memory for them."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).symlink_to(bundled_model() / file)
    asked = settings.read({"model": str(tmp_path), "engine": "toy"}, None, ["worker.threads=1", "prefill=0"])
    assert capacity_warnings(asked.spec) == []
    model = f"model {tmp_path.name}, MOCK ENGINE: no model is computed, and texts mean nothing)"
    assert ready_line(asked.spec, "a:1", []) == f"pdserve ready: grpc a:1 (0 prefill, 1 decode, redis none, {model}"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/ui"),
        ("0.0.0.0", "http://localhost:8000/ui"),
        ("::", "http://localhost:8000/ui"),
        ("fd00::1", "http://[fd00::1]:8000/ui"),
    ],
)
def test_the_live_view_has_an_address_that_a_browser_opens(host: str, url: str) -> None:
    settings = {kind: {"token": "0123456789abcdef"} for kind in ("router",)}
    spec = dataclasses.replace(SPEC, host=host, http=8000, insecure=True, settings=settings)
    assert live_url(spec) == url


async def test_nothing_is_missing_if_all_services_answer() -> None:
    with EmbeddedRedis.start() as redis, socket.create_server(("127.0.0.1", 0)) as collector:
        otlp = f"http://127.0.0.1:{collector.getsockname()[1]}"
        spec = dataclasses.replace(SPEC, redis=redis.url, settings={"router": {"otlp": otlp}})
        missing = await degradations(spec, has_own_redis=False)
    assert missing == []
    assert "DEGRADED" not in ready_line(spec, "a:1", missing)


async def test_a_redis_that_is_reached_by_its_socket(tmp_path: Path) -> None:
    with EmbeddedRedis.start() as redis:
        spec = ClusterSpec(model="toy", redis=redis.url)
        assert await degradations(spec, has_own_redis=False) == []
        assert f"redis {redis.url.removeprefix('unix://')}," in ready_line(spec, "a:1", [])


async def test_a_wrong_password_is_an_error() -> None:
    with EmbeddedRedis.start() as redis:
        spec = dataclasses.replace(SPEC, redis=listen_on_tcp(redis).replace(PASSWORD, "pa55"))
        with pytest.raises(ConfigError, match="password") as caught:
            await degradations(spec, has_own_redis=False)
    assert "pa55" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["", "host", "host:port", "127.0.0.1:99999", "http://127.0.0.1:1/v1"])
async def test_endpoints_that_cannot_answer(endpoint: str) -> None:
    assert not await endpoint_answers(endpoint)


# --- a Redis of two clusters ----------------------------------------------------------------------------------


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


async def test_registrations_of_a_dead_cluster_do_not_stop_the_start(first: Running, redis: EmbeddedRedis) -> None:
    """A killed launcher leaves registrations behind until their lease ends. This is the last test of `first`."""
    spec, pids = asked(redis.url), first.pids()
    ports = [int(first.address(name).rpartition(":")[2]) for name in ("p0", "d0")]
    first.kill()
    until(lambda: not any(is_alive(pid) for pid in pids.values()))
    until(lambda: all(is_free("127.0.0.1", port) for port in ports))  # Threads may outlive the first.
    await check_alone(spec)
    registry = Registry(redis.url, spec.cluster)
    assert {worker.worker_id for worker in await registry.read()} == {"p0", "d0"}, "nothing was left behind"
    await registry.close()

"""Missing services that the ready line of a cluster names."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.launch.local import degradations, endpoint_answers
from pdserve.launch.serve import live_url, ready_line
from pdserve.launch.spec import ClusterSpec
from pdserve.prefix.embedded import EmbeddedRedis
from tests.support.tcp_redis import PASSWORD, listen_on_tcp

DEAD = "127.0.0.1:1"
SPEC = ClusterSpec(model="toy", redis=f"redis://:pa55@{DEAD}/0", settings={"router": {"otlp": DEAD}})


async def test_the_ready_line_names_what_is_missing() -> None:
    missing = await degradations(SPEC, has_own_redis=False)
    assert ready_line(SPEC, "127.0.0.1:50051", missing) == (
        "pdserve ready: grpc 127.0.0.1:50051 (1 prefill, 1 decode, redis 127.0.0.1:1, model toy); DEGRADED: "
        "redis does not answer, so prompts are placed without the prefix index; "
        "no collector answers at 127.0.0.1:1, so traces are lost"
    )


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

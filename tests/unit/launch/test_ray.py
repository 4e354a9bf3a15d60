"""The launcher passes settings to the driver of Ray in a file, not on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, Unavailable
from pdserve.launch.ports import free_ports
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec, Kind, Value
from pdserve.launch.with_ray import check_redis, spec_from_json, spec_to_json
from pdserve.prefix.embedded import EmbeddedRedis


def test_the_router_s_secret_is_not_on_the_driver_s_command_line() -> None:
    settings: dict[Kind, dict[str, Value]] = {"worker": {"kv_blocks": 3}, "router": {"token": "hidden"}}
    redis = "redis://:hidden@127.0.0.1:1/0"
    spec = ClusterSpec(model="toy", cluster_secret="hidden as well", redis=redis, settings=settings)
    assert "hidden" not in spec_to_json(spec)


def test_the_driver_reads_back_what_the_launcher_wrote() -> None:
    spec = ClusterSpec(
        model="toy", prefill=2, gpus=("0",), cluster_secret="s" * 16, redis="r", settings={"worker": {"kv_blocks": 3}}
    )
    assert spec_from_json(spec_to_json(spec), "s" * 16, "r") == spec


async def test_a_redis_that_does_not_answer_ends_the_start_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    spec = ClusterSpec(model="toy", redis=f"redis://:hidden@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.* does not answer .*failed.*--ray"):
        await check_redis(spec, LauncherReport(), 0.3)
    err = capsys.readouterr().err
    assert "does not answer" in err
    assert "hidden" not in err


async def test_a_database_that_redis_lacks_is_named(tmp_path: Path) -> None:
    with EmbeddedRedis.start(path=tmp_path / "socket") as redis, pytest.raises(ConfigError, match="DB index"):
        await check_redis(ClusterSpec(model="toy", redis=f"{redis.url}?db=99"), LauncherReport(), 0.3)

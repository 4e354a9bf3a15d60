"""The launcher passes settings to the driver of Ray in a file, not on a command line."""

from __future__ import annotations

from pdserve.launch.spec import ClusterSpec, Kind, Value
from pdserve.launch.with_ray import spec_from_json, spec_to_json


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

"""The list of targets for Prometheus, and the launcher's own metrics."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.launch.local import LauncherMetrics, targets
from pdserve.launch.ports import free_ports
from pdserve.launch.spec import ClusterSpec, ClusterTls


def spec(**changes: Any) -> ClusterSpec:
    return ClusterSpec(**{"model": "toy", "worker_ports": (20_001, 20_002), **changes})


def read(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_every_process_is_a_target() -> None:
    found = targets(spec(metrics=9500, http=8000))
    assert [(one["targets"], one["labels"]["instance"], one["labels"]["component"]) for one in found] == [  # type: ignore[index]
        (["127.0.0.1:9500"], "launcher", "launcher"),
        (["127.0.0.1:9501"], "router", "router"),
        (["127.0.0.1:9502"], "p0", "prefill"),
        (["127.0.0.1:9503"], "d0", "decode"),
        (["127.0.0.1:9504"], "gateway", "gateway"),
    ]
    assert {one["labels"]["model"] for one in found} == {"toy"}  # type: ignore[index]


def test_a_process_without_metrics_is_no_target() -> None:
    found = targets(spec(metrics=9500, settings={"prefill_worker": {"metrics_port": 0}, "router": {"metrics_port": 0}}))
    assert [one["targets"] for one in found] == [["127.0.0.1:9500"], ["127.0.0.1:9503"]]
    assert targets(spec()) == []


def test_targets_with_tls_are_https() -> None:
    found = targets(spec(metrics=9500, tls=ClusterTls.asked("/certificates", "")))
    assert {one["labels"]["__scheme__"] for one in found} == {"https"}  # type: ignore[index]


def test_the_launcher_serves_targets_and_starts() -> None:
    [port] = free_ports(1)
    metrics = LauncherMetrics(spec(metrics=port))
    metrics.start()
    try:
        metrics.process_started("d0")
        metrics.process_started("d0")
        assert json.loads(read(port, "/targets")) == targets(spec(metrics=port))
        assert 'pdserve_process_starts_total{process="d0"} 2.0' in read(port, "/metrics")
        metrics.wanted({Role.PREFILL: 1, Role.DECODE: 3})
        assert 'pdserve_desired_workers{role="decode"} 3.0' in read(port, "/metrics")
        assert f"router {port + 1}" in metrics.describe()
        with pytest.raises(ConfigError, match="port in use"):
            LauncherMetrics(spec(metrics=port)).start()
    finally:
        metrics.close()


def test_without_a_port_nothing_listens() -> None:
    metrics = LauncherMetrics(spec())
    metrics.start()
    metrics.process_started("d0")
    metrics.wanted({Role.PREFILL: 1, Role.DECODE: 2})
    assert metrics.describe() == ""
    metrics.close()

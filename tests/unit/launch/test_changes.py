"""What a changed cluster keeps of its settings and ports. No process is started."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.errors import ConfigError, NotFound
from pdserve.core.types import Role
from pdserve.launch.changes.cluster import LocalCluster
from pdserve.launch.changes.plans import index_of, vacate
from pdserve.launch.ports import free_ports, is_free
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec, processes


def free_range(count: int) -> int:
    """The first of so many free ports in a row."""
    return next(
        first
        for first in (free_ports(1)[0] for _ in range(100))
        if all(is_free("127.0.0.1", port) for port in range(first, first + count))
    )


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    monkeypatch.setenv("PDSERVE_LOG_LEVEL", "info")
    settings: Any = {"worker": {"drain_s": 3.0}}
    spec = ClusterSpec(model="toy", port=0, decode=2, cores=2, metrics=free_range(12), settings=settings)
    one = LocalCluster(spec, LauncherReport())
    yield one
    await one.stop(is_graceful=False)


def of_workers(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return {one.name: getattr(one.config, name) for one in cluster._processes()[:-1]}


def roll(cluster: LocalCluster, overlay: Mapping[Any, Any], *worker_ids: str) -> None:
    """The end of a roll-out of these workers."""
    cluster._overlays |= dict.fromkeys(worker_ids, overlay)


# --- settings -------------------------------------------------------------------------------------------------


def test_sighup_changes_what_roll_outs_have_not_set(cluster: LocalCluster) -> None:
    roll(cluster, {"worker": {"drain_s": 9.0, "max_batch": 8}}, "d0")
    cluster.reload({"worker": {"drain_s": 5.0, "stall_s": 50.0}, "router": {"slo_ttft_s": 7.0}}, "info")
    assert of_workers(cluster, "drain_s") == {"p0": 5.0, "d0": 9.0, "d1": 5.0}
    assert of_workers(cluster, "stall_s") == dict.fromkeys(("p0", "d0", "d1"), 50.0)
    assert of_workers(cluster, "max_batch") == {"p0": 0, "d0": 8, "d1": 0}
    roll(cluster, {}, "d0")
    assert of_workers(cluster, "drain_s") == dict.fromkeys(("p0", "d0", "d1"), 5.0), "after an undo"
    assert cluster._processes()[-1] == processes(cluster.spec)[-1]
    assert cluster._processes()[-1].config.slo_ttft_s == 7.0  # type: ignore[union-attr]


@pytest.mark.parametrize("table", ["worker", "decode_worker"])
async def test_settings_that_up_would_reject_start_no_roll_out(cluster: LocalCluster, table: str) -> None:
    with pytest.raises(ConfigError, match=r"heartbeat_s: got 5.0, expected less than router.worker_silence_s"):
        await cluster.roll([], 1, f"[{table}]\nheartbeat_s = 5.0", is_undo=False, say=print)
    with pytest.raises(NotFound):
        await cluster.roll(["d7"], 1, "", is_undo=False, say=print)


async def test_a_roll_out_cannot_divide_the_gpus_again(cluster: LocalCluster) -> None:
    slots = tuple(replace(one, gpus=(str(number),)) for number, one in enumerate(cluster.spec.slots))
    cluster.spec = replace(cluster.spec, gpus=("0", "1", "2"), slots=slots)
    with pytest.raises(ConfigError, match=r"worker\.device: got 0 GPUs, expected 1 for p0, as now"):
        await cluster.roll([], 1, "[prefill_worker]\ndevice = 'cpu'", is_undo=False, say=print)


# --- ports ----------------------------------------------------------------------------------------------------


def test_a_slot_whose_ports_are_in_use_keeps_none(cluster: LocalCluster) -> None:
    held, before = cluster._held.ports, cluster.spec
    assert before.metrics is not None
    with socket.create_server(("127.0.0.1", before.metrics + 6)), pytest.raises(ConfigError, match=r"metrics \+ 6"):
        cluster._take_slot("d2", Role.DECODE, {})
    assert (cluster._held.ports, cluster.spec) == (held, before)


def test_a_worker_that_did_not_start_leaves_no_port(cluster: LocalCluster) -> None:
    held = set(cluster._held.ports)
    cluster._take_slot("d2", Role.DECODE, {})
    port = cluster.spec.slots[-1].port
    assert set(cluster._held.ports) - held == {port, cluster.spec.metrics + 6}  # type: ignore[operator]
    cluster._forget("d2", keeps_ports=False)
    assert set(cluster._held.ports) == held
    assert is_free("127.0.0.1", port)
    cluster._take_slot("d2", Role.DECODE, {})
    assert cluster.spec.slots[index_of(cluster.spec, "d2")].port in cluster._held.ports
    assert len(cluster.spec.slots) == 4
    assert vacate(cluster.spec, "d2").slots[-1].port, "one that has served keeps it"

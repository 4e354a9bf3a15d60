"""A launcher leaves no folder, port or descriptor: after a failure before it starts a process, and after a stop that a
second signal interrupts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pdserve.launch import local, serve
from pdserve.launch.changes.local_cluster import LocalCluster
from pdserve.launch.ports import free_ports
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec
from tests.support.failed_starts import Injected, Open


@pytest.mark.parametrize("step", ["gateway", "make_certificates", "Supervisor"])
def test_a_cluster_that_cannot_be_made(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    free_ports(1)  # opens a lock that this process keeps
    before = Open()

    def fail(*arguments: Any) -> Any:
        raise Injected

    monkeypatch.setattr(local, step, fail)
    with pytest.raises(Injected):
        LocalCluster(ClusterSpec(model="toy", port=0), LauncherReport())
    before.until_nothing_is_left(step)
    assert list(tmp_path.iterdir()) == []


async def test_a_second_signal_removes_nothing_that_processes_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    free_ports(1)
    before = Open()
    cluster = LocalCluster(ClusterSpec(model="toy", port=0), LauncherReport())
    ports, force = cluster._held.ports, asyncio.Event()
    stops: list[tuple[bool, bool, tuple[int, ...], bool]] = []
    ended: list[bool] = []

    async def open_requests(spec: ClusterSpec) -> int:
        return 1

    async def stop(names: Iterable[str], *, is_graceful: bool) -> None:
        stops.append((is_graceful, cluster.folder.exists(), cluster._held.ports, bool(ended)))
        if len(stops) == 1:
            force.set()
            await asyncio.Event().wait()  # a drain without an end

    monkeypatch.setattr(local, "open_requests", open_requests)
    monkeypatch.setattr(cluster._supervisor, "stop", stop)
    close = cluster._supervisor.close
    monkeypatch.setattr(cluster._supervisor, "close", lambda: (ended.append(True), close()))
    await serve._stop(cluster, force, is_graceful=True)
    intact = (True, ports, False)
    assert stops == [(True, *intact), (False, *intact), (False, *intact), (True, *intact)], "routers, workers, Redis"
    assert ended == [True]
    before.until_nothing_is_left("stop")
    assert list(tmp_path.iterdir()) == []

"""A launcher that fails before it starts a process leaves no folder, port or descriptor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from pdserve.launch import local
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

"""The log of `pdserve up`: its level, its files, and SIGHUP."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from pdserve.launch.running import Running


def test_sighup_keeps_the_cluster_and_reopens_its_logs(tmp_path: Path) -> None:
    flags = ("--model", "toy", "--log-dir", str(tmp_path), "--log-format", "json", "--log-level", "debug")
    with Running.start(*flags) as cluster:
        assert cluster.target
        assert '"level": "DEBUG"' in "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.log"))
        (tmp_path / "router.log").rename(tmp_path / "router.old")
        cluster.process.send_signal(signal.SIGHUP)
        assert json.loads(cluster.wait_line("SIGHUP"))["source"] == "launcher"
        assert cluster.stop() == 0
    assert (tmp_path / "router.log").exists()


def test_a_level_hides_lower_records() -> None:
    with Running.start("--model", "toy", "--log-level", "error") as cluster:
        assert cluster.stop() == 0
    assert not [line for line in cluster.lines if " INFO " in line or " WARNING " in line]

"""The log of `pdserve up`: its level, its files, and SIGHUP. test_shutdown.py has the level that hides records."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from pdserve import Client
from pdserve.launch.running import Running

FILE = """
model = "toy"
log_level = "debug"
[router]
slo_ttft_s = 120.0
max_new_tokens = 4
"""


def text_of(folder: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.log"))


def test_sighup_reads_settings_and_reopens_logs(tmp_path: Path) -> None:
    file, logs = tmp_path / "cluster.toml", tmp_path / "logs"
    file.write_text(FILE)
    flags = ("--config", str(file), "--log-dir", str(logs), "--log-format", "json", "--http", "0")
    with Running.start(*flags) as cluster, Client(cluster.target) as client:
        assert '"level": "DEBUG"' in text_of(logs)
        assert client.model().max_new_tokens == 4
        (logs / "router.log").rename(logs / "router.old")
        file.write_text(FILE.replace("debug", "warning").replace("= 4", "= 6") + "max_queue = 9\n[gateway]\nbody_s = 2")
        cluster.process.send_signal(signal.SIGHUP)
        assert json.loads(cluster.wait_line("SIGHUP"))["source"] == "launcher"
        changed = json.loads(cluster.wait_line("SIGHUP: the settings were read again"))["message"]
        assert changed.endswith("; changed: log_level, router.max_new_tokens, gateway.body_s")
        warning = json.loads(cluster.wait_line("WARNING"))["message"]
        assert warning.endswith("these settings change at the next start only: router.max_queue")
        within_s = time.monotonic() + 60.0
        while client.model().max_new_tokens != 6 or text_of(logs).count("SIGHUP: the settings were read again") < 3:
            assert time.monotonic() < within_s, text_of(logs)
            time.sleep(0.05)
        told = {path.stem: path.read_text(encoding="utf-8") for path in logs.glob("*.log")}
        lines = {name: next(line for line in text.splitlines() if "SIGHUP" in line) for name, text in told.items()}
        assert {name: json.loads(line)["changed"] for name, line in lines.items()} == {
            "p0": "log_level",
            "d0": "log_level",
            "router": "gateway_body_s, max_new_tokens, log_level",
        }
        file.write_text("prefill = -1")
        cluster.process.send_signal(signal.SIGHUP)
        assert "prefill: got -1" in cluster.wait_line("settings are invalid")
        assert client.generate("hi", max_tokens=6).usage.completion_tokens == 6
        assert cluster.stop() == 0
    assert (logs / "router.log").exists()

"""The launcher's progress while a cluster starts and drains."""

from __future__ import annotations

import dataclasses
import os
import re
from types import SimpleNamespace

import pytest

import pdserve.launch.report
import pdserve.progress
from pdserve.core.progress import PhaseProgress, phase_line
from pdserve.launch.local import start_steps
from pdserve.launch.report import ClusterProgress, LauncherReport
from pdserve.launch.spec import ClusterSpec
from pdserve.launch.with_ray import ray_start_steps, show


def weights(done: float, seconds: float) -> PhaseProgress:
    return PhaseProgress(phase="weights", done=done, total=4e9, unit="bytes", seconds=seconds)


def test_finished_steps_are_counted_and_running_ones_named() -> None:
    progress = ClusterProgress("starting", ["redis", "p0", "d0", "router"], 0.0)
    assert (progress.share, progress.detail(0.0)) == (0.0, "0 of 4")
    for name in ("redis", "p0", "d0"):
        progress.begins(name)
    progress.ends("redis")
    progress.phase("d0", weights(1e9, 2.0), 10.0)
    assert progress.detail(10.0) == "1 of 4; p0; d0 weights 1.00 of 4.00 GB, 6 s left"
    assert (progress.share, progress.time_text(10.0)) == (0.25, "10 s so far")
    progress.phase("d0", weights(4e9, 8.0), 16.0)
    assert progress.detail(16.0) == "1 of 4; p0; d0", "its phase is over"
    for name in ("p0", "d0", "router", "unknown"):
        progress.ends(name)
    assert progress.is_over
    assert progress.share == 1.0


def test_many_processes_are_counted() -> None:
    progress = ClusterProgress("starting", [f"d{number}" for number in range(9)], 0.0)
    for number in range(9):
        progress.begins(f"d{number}")
    assert progress.detail(0.0) == "0 of 9; d0; d1; d2; d3; 5 more"


def test_a_drain_has_a_limit() -> None:
    progress = ClusterProgress("draining", ["router"], 5.0, limit_s=30.0)
    assert progress.time_text(15.0) == "at most 20 s left"
    assert progress.time_text(99.0) == "at most 0 s left"


def test_the_steps_of_a_start_end_with_the_gateway() -> None:
    spec = ClusterSpec(model="toy", prefill=1, decode=2, http=8000, http_process=True)
    workers = ["p0", "d0", "d1"]
    assert start_steps(spec, has_own_redis=True) == ["redis", *workers, "router", "first token", "gateway"]
    steps = ray_start_steps(spec, has_own_redis=False)
    assert steps[:6] == ["ray_init", "placement", *workers, "ray"]
    assert steps[-3:] == ["router", "first token", "gateway"]
    in_router = dataclasses.replace(spec, http_process=False)
    assert start_steps(in_router, has_own_redis=True)[-2:] == ["router", "first token"]


def test_the_table_has_the_phases_of_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    report = LauncherReport()
    take = report.relay("d0")
    for one in (
        weights(1e9, 0.5),
        weights(4e9, 2.0),
        PhaseProgress(phase="kernels", done=1, total=1, unit="", seconds=3),
    ):
        take(phase_line(one))
    take("a log line")
    report.phase("d0", 9.0)
    report.table()
    err = capsys.readouterr().err
    assert "d0         | a log line" in err
    assert "progress {" not in err
    assert [line.split()[:2] for line in err.splitlines()[2:5]] == [
        ["d0", "9.00"],
        ["weights", "2.00"],
        ["kernels", "3.00"],
    ]


def test_the_table_has_the_time_before_the_first_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(pdserve.launch.report, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    report = LauncherReport()
    report.begins("d0")
    take = report.relay("d0")
    for now_s[0], one in ((106.5, weights(1e9, 0.5)), (108.0, weights(4e9, 2.0))):
        take(phase_line(one))
    report.phase("d0", 9.0)
    report.table()
    rows = [line.split()[:2] for line in capsys.readouterr().err.splitlines()[1:]]
    assert rows == [["d0", "9.00"], ["imports", "6.00"], ["weights", "2.00"]]


def test_a_phase_of_one_step_has_no_count() -> None:
    progress = ClusterProgress("starting", ["d0"], 0.0)
    progress.begins("d0")
    progress.phase("d0", PhaseProgress(phase="kernels", done=0, total=1, unit="kernels", seconds=0.0), 1.0)
    assert progress.detail(1.0) == "0 of 1; d0 kernels"


def test_a_worker_cannot_fill_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = LauncherReport()
    take = report.relay("d0")
    for number in range(100):
        take(phase_line(PhaseProgress(phase=f"phase {number}", done=1, total=1, unit="", seconds=1.0)))
    report.phase("d0", 9.0)
    report.table()
    assert len(capsys.readouterr().err.splitlines()) == 2 + 16


def test_a_log_gets_a_line_and_no_control_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pdserve.progress, "LINE_EVERY_S", 0.0)  # Until the first line.
    report = LauncherReport()
    report.tick()
    report.expect("starting", ["p0", "d0"])
    report.begins("p0")
    report.tick()
    report.tick()  # Within five seconds.
    report.settled()
    report.tick()
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" +\d+\.\d+ s  launcher   starting: 0%, \d s so far, 0 of 2; p0", line)


def test_a_terminal_keeps_log_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(pdserve.progress, "PATIENCE_S", 0.0)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        report = LauncherReport()
        report.expect("starting", ["p0", "d0"])
        report.begins("p0")
        report.tick()
        report.relay("p0")("a log line")
        report.close()
        stream.write("<end>")
        stream.flush()
        shown = b""
        while not shown.endswith(b"<end>"):
            shown += os.read(master, 65536)
    os.close(master)
    first, line, again, last = re.split(r"\r\x1b\[K|\r(?!\n)", shown.decode())[1:]
    assert first.startswith("[........................]   0%  starting")
    assert line == "p0         | a log line\r\n"
    assert again == first
    assert last == "<end>", "the status line is gone"


def test_the_cause_of_a_wait_is_shown() -> None:
    progress = ClusterProgress("starting", ["workers", "first token"], 0.0)
    progress.begins("first token")
    progress.waits("first token", "the router is connected to 1 of 2 workers (d0)")
    assert progress.detail(0.0) == "0 of 2; first token: the router is connected to 1 of 2 workers (d0)"
    progress.ends("first token")
    assert progress.detail(0.0) == "1 of 2"


def test_workers_under_ray_show_their_phases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pdserve.progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr("pdserve.launch.report.LINE_EVERY_S", 0.0)
    report = LauncherReport()
    report.expect("starting", ["ray_init", "placement", "p0", "d0"])
    shown = []
    for line in (
        "@ray_init begins",
        "@ray_init took 1.00 s",
        "@placement begins",
        "@p0 begins",
        "@p0 now waits for a node",
        "@placement took 1.00 s",
        "@p0 now imports its modules",
        f"@p0 {phase_line(weights(1e7, 0.1))}",
        f"@p0 {phase_line(weights(4e9, 0.5))}",
        "@p0 now warms up",
        "@p0 took 9.00 s",
    ):
        show(report, line)
        report.tick()
        shown.append(capsys.readouterr().err.partition("s so far, ")[2].strip())
    assert shown == [
        "0 of 4; ray_init",
        "1 of 4",
        "1 of 4; placement",
        "1 of 4; placement; p0",
        "1 of 4; placement; p0: waits for a node",
        "2 of 4; p0: waits for a node",
        "2 of 4; p0: imports its modules",
        "2 of 4; p0 weights 0.01 of 4.00 GB",
        "2 of 4; p0: imports its modules",
        "2 of 4; p0: warms up",
        "3 of 4",
    ]

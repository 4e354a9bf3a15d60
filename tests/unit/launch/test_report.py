"""Failed writes of the launcher do not affect the processes whose output it relays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import final

import pytest

from pdserve.core.errors import ConfigError, NoWorkers
from pdserve.engine.memory.plan import MemoryPlan
from pdserve.launch import serve
from pdserve.launch.report import LauncherReport, LogFile, LogLimits, memory_table
from pdserve.launch.settings import read
from pdserve.launch.spec import ClusterSpec


def test_each_process_has_its_file(tmp_path: Path) -> None:
    report = LauncherReport(tmp_path / "logs")
    for name in ("p0", "d0"):
        report.relay(name)(f"a line of {name}: é")
    report.close()
    assert (tmp_path / "logs" / "p0.log").read_text(encoding="utf-8") == "a line of p0: é\n"
    assert (tmp_path / "logs" / "d0.log").read_text(encoding="utf-8") == "a line of d0: é\n"


def test_a_restarted_process_appends_to_its_log(tmp_path: Path) -> None:
    report = LauncherReport(tmp_path)
    report.relay("p0")("before")
    report.relay("p0")("after")
    report.close()
    assert (tmp_path / "p0.log").read_text() == "before\nafter\n"


@pytest.mark.parametrize("ends", [LauncherReport.failed, lambda report: report.ready("pdserve ready")])
def test_details_of_the_start_are_held_until_it_fails(
    ends: Callable[[LauncherReport], None], capsys: pytest.CaptureFixture[str]
) -> None:
    detail, warning = (f"2026-11-27 14:22:04,758 {level} d0 pdserve.worker: text" for level in ("INFO", "WARNING"))
    report = LauncherReport(holds_details=True)
    take = report.relay("d0")
    for line in (detail, warning, "Traceback:", f"said {detail}", detail):
        take(line)
    shown = [f"d0         | {line}" for line in (warning, "Traceback:", f"said {detail}")]
    assert capsys.readouterr().err.splitlines() == shown
    ends(report)
    later = capsys.readouterr().err.splitlines()
    if ends is LauncherReport.failed:
        assert later == [f"d0         | {detail}"] * 2
    else:
        [words] = later
        assert words.endswith("launcher   2 log lines of the start are not shown; --log-level info shows them")
    take(detail)
    assert capsys.readouterr().err.splitlines() == [f"d0         | {detail}"], "only the start is quiet"


@final
class Starting:
    """A cluster whose process has said a line before its start ends in some way."""

    def __init__(self, report: LauncherReport, start: Callable[[], Awaitable[str]]) -> None:
        self.spec = ClusterSpec(model="toy")
        self._report, self._start = report, start

    async def start(self) -> str:
        self._report.relay("d0")("2026-11-27 14:22:04,758 INFO d0 pdserve.worker: text")
        return await self._start()

    async def run(self, stop: asyncio.Event) -> None:
        raise AssertionError("it does not start")

    async def stop(self, *, is_graceful: bool) -> None:
        sys.stderr.write("stopped\n")

    def reload(self, settings: object, log_level: str) -> None: ...


async def is_interrupted() -> str:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def fails() -> str:
    raise NoWorkers("decode")


async def has_a_defect() -> str:
    raise ZeroDivisionError


@pytest.mark.parametrize("start", [is_interrupted, fails, has_a_defect])
def test_details_are_shown_however_the_start_ends(
    start: Callable[[], Awaitable[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = read({"model": "toy"}, None, [])
    monkeypatch.setattr(serve, "_cluster", lambda asked, report: Starting(report, start))
    with contextlib.suppress(NoWorkers, ZeroDivisionError):
        assert asyncio.run(serve.serve(asked, lambda: asked)) == serve.INTERRUPTED
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["d0         | 2026-11-27 14:22:04,758 INFO d0 pdserve.worker: text", "stopped"]


@pytest.mark.parametrize(("is_json", "is_in_files"), [(True, False), (False, True)])
def test_details_in_files_and_in_json_are_complete(
    is_json: bool, is_in_files: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = "2026-11-27 14:22:04,758 INFO d0 pdserve.worker: text"
    report = LauncherReport(tmp_path if is_in_files else None, is_json=is_json, holds_details=True)
    report.relay("d0")(detail)
    report.close()
    assert detail in ((tmp_path / "d0.log").read_text() if is_in_files else capsys.readouterr().err)


def test_details_of_a_planned_stop_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for holds_details in (True, False):
        report = LauncherReport(holds_details=holds_details)
        report.ready("ready")
        take = report.relay("d0")
        take("2026-11-27 10:00:00,000 INFO decode_worker: attached")
        report.stops()
        take("2026-11-27 10:00:01,000 INFO decode_worker: router gone")
        take("2026-11-27 10:00:02,000 WARNING decode_worker: a request was cut")
        report.close()
        shown = [line.split(": ")[-1] for line in capsys.readouterr().err.splitlines()]
        assert shown == ["attached", *([] if holds_details else ["router gone"]), "a request was cut"]


def test_a_full_disk_is_reported_once() -> None:
    told: list[str] = []
    file = LogFile(Path("/dev/full"), told.append, LogLimits(), open_file=lambda path: path.open("ab", buffering=0))
    for number in range(3):
        file.write(f"line {number}")
    file.close()
    file.write("a line after the end")
    assert told == ["No space left on device"]


class Disk:
    """A file whose disk is sometimes full."""

    def __init__(self) -> None:
        self.is_full, self.closed, self.kept = False, False, b""

    closed = False

    def tell(self) -> int:
        return 0

    def write(self, data: bytes) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.kept += data
        return len(data)


def test_a_log_reports_lost_lines_after_a_full_disk() -> None:
    disk, told = Disk(), list[str]()
    file = LogFile(Path("p0.log"), told.append, LogLimits(), open_file=lambda path: disk)  # type: ignore[arg-type, return-value]
    file.write("first")
    disk.is_full = True
    file.write("lost")
    file.write("lost too")
    disk.is_full = False
    file.write("last")
    assert disk.kept == b"first\n(2 lines could not be written)\nlast\n"
    assert told == ["No space left on device"]


class Left:
    """A stderr whose reader has closed the pipe."""

    def __init__(self) -> None:
        self.tries = 0

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        self.tries += 1
        raise BrokenPipeError


def test_an_unread_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Left()
    monkeypatch.setattr("sys.stderr", left)
    report = LauncherReport()
    report.say("p0", "starting")
    report.relay("p0")("a line")
    report.table()
    assert left.tries == 3


@pytest.mark.parametrize("folder", ["/dev/full", "/proc/nowhere"])
def test_an_unusable_log_folder_is_named(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"log_dir: got {folder}, expected a folder that can be written to"):
        LauncherReport(Path(folder))


def test_the_table_of_the_start_divides_memory(capsys: pytest.CaptureFixture[str]) -> None:
    report = LauncherReport()
    gpu = MemoryPlan(
        device="cuda:0",
        total=80 * 10**9,
        usable=72 * 10**9,
        weights=16 * 10**9,
        activations=2 * 10**9,
        graphs=10**9,
        runtime=5 * 10**8,
        kv_pool=52 * 10**9,
        kv_tokens=425_984,
    )
    host = MemoryPlan(device="cpu", total=8 * 10**9, usable=8 * 10**9, weights=2 * 10**7, kv_pool=10**9, kv_tokens=99)
    report.relay("p0")(f"prefill_worker p0 memory {gpu.to_json()}")
    report.relay("d0")(f"decode_worker d0 memory {host.to_json()}")
    report.relay("d0")("its memory {is no plan}")
    report.table()
    relayed, _, *rows = capsys.readouterr().err.splitlines()
    assert relayed == "d0         | its memory {is no plan}"
    assert [" ".join(row.split()) for row in rows] == [
        "memory total usable weights activations graphs runtime kv pool kv tokens",
        "d0 cpu 8.00 GB 8.00 GB 20.0 MB 1.00 GB 99",
        "p0 cuda:0 80.00 GB 72.00 GB 16.00 GB 2.00 GB 1.00 GB 500.0 MB 52.00 GB 425,984",
    ]
    assert len({len(row) for row in rows}) == 1, "columns stand below each other"
    assert [" ".join(row.split()) for row in memory_table({"d0": host})] == [
        "memory total usable weights kv pool kv tokens",
        "d0 cpu 8.00 GB 8.00 GB 20.0 MB 1.00 GB 99",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (3_400_000, "3.4 MB"),
        (999_900_000, "999.9 MB"),
        (999_999_999, "1.00 GB"),
        (10**9, "1.00 GB"),
        (141 * 10**9, "141.00 GB"),
    ],
)
def test_a_size_is_shown_in_a_unit_that_fits_it(num_bytes: int, expected: str) -> None:
    plan = MemoryPlan(device="cpu", total=num_bytes, usable=0, weights=num_bytes, kv_pool=0, kv_tokens=0)
    _, row = memory_table({"d0": plan})
    assert " ".join(row.split()) == f"d0 cpu {expected} {expected} 0"


LINE = "x" * 1019  # 1024 bytes with a number and a line end


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (0, {"p0.log": ["0016", "0017"]}),
        (1, {"p0.log": ["0016", "0017"], "p0.log.1": ["0012", "0013", "0014", "0015"]}),
        (
            2,
            {
                "p0.log": ["0016", "0017"],
                "p0.log.1": ["0012", "0013", "0014", "0015"],
                "p0.log.2": ["0008", "0009", "0010", "0011"],
            },
        ),
    ],
)
def test_log_files_are_renamed_at_their_size(tmp_path: Path, kept: int, expected: dict[str, list[str]]) -> None:
    for number in (kept + 1, kept + 2):  # of an earlier run, which kept more
        (tmp_path / f"p0.log.{number}").write_text("old")
    report = LauncherReport(tmp_path, LogLimits(log_max_bytes=4096, log_files=kept))
    write = report.relay("p0")
    for number in range(18):
        write(f"{number:04}{LINE}")
    report.close()
    assert {path.name: [line[:4] for line in path.read_text().splitlines()] for path in tmp_path.iterdir()} == expected


def test_a_log_file_that_was_renamed_is_opened_again(tmp_path: Path) -> None:
    report = LauncherReport(tmp_path)
    write = report.relay("p0")
    write("before")
    (tmp_path / "p0.log").rename(tmp_path / "p0.old")
    write("between")
    report.reopen()
    write("after")
    report.close()
    assert (tmp_path / "p0.old").read_text(encoding="utf-8") == "before\nbetween\n"
    assert (tmp_path / "p0.log").read_text(encoding="utf-8") == "after\n"


def test_the_ready_line_is_json_as_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    LauncherReport(is_json=True).ready("pdserve ready: grpc 127.0.0.1:1 (1 prefill)")
    found = json.loads(capsys.readouterr().out)
    assert (found["source"], found["message"]) == ("launcher", "pdserve ready: grpc 127.0.0.1:1 (1 prefill)")


def test_a_log_that_cannot_be_renamed_loses_no_line(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "p0.log.1").mkdir()
    (tmp_path / "p0.log.1" / "file").touch()
    file = LogFile(tmp_path / "p0.log", told.append, LogLimits(log_max_bytes=4096, log_files=1))
    lines = [f"{number:04}{LINE}" for number in range(9)]
    for line in lines:
        file.write(line)
    file.close()
    assert (tmp_path / "p0.log").read_text().splitlines() == lines
    assert told
    assert all("cannot be renamed" in one for one in told)

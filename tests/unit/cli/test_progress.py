"""Progress on a terminal (a pty) and in a log."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import re
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

import pdserve.progress
from pdserve.cli.main import main
from pdserve.core.progress import PROGRESS_ENV, PhaseProgress, phase_of
from pdserve.progress import LINE_EVERY_S, PhaseReport, ProgressLine
from simulator.commands.planning import EXPECTED_RUNS, NEARLY, tasks_done

CLEARED = "\r\x1b[K"


@dataclass
class Now:
    """A clock that a test sets."""

    at_s: float = 0.0

    def __call__(self) -> float:
        return self.at_s


@dataclass
class Terminal:
    """A pty of 80 columns. `read` returns the text that programs write to `stream`."""

    stream: TextIO
    master: int
    held: bytes = field(default=b"")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """Closes the stream and returns everything written to it."""
        self.stream.write("<end>")
        self.stream.flush()
        while not self.held.endswith(b"<end>"):
            self.held += os.read(self.master, 65536)
        return self.held.removesuffix(b"<end>").decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        found = Terminal(stream, master)
        found.resize(80)
        yield found
    os.close(master)


def test_a_terminal_gets_a_temporary_bar(terminal: Terminal) -> None:
    now = Now()
    with ProgressLine("d0 weights", 100.0, stream=terminal.stream, clock=now) as progress:
        for second in range(5):
            now.at_s = float(second)
            progress.update(25.0 * second, f"{second} of 4")
    drawn = terminal.read().split("\r")
    assert drawn[1] == "[######..................]  25%  d0 weights  3 s left  1 of 4\x1b[K"
    assert drawn[-2].startswith("[########################] 100%  d0 weights  0 s left")
    assert drawn[-1] == "\x1b[K"
    assert all("\n" not in one for one in drawn)


def test_bars_use_no_colours(terminal: Terminal) -> None:
    now = Now(0.0)
    with ProgressLine("a", 2.0, stream=terminal.stream, clock=now) as progress:
        now.at_s = 2.0
        progress.update(1.0)
    assert set(re.findall(r"\x1b\[[0-9;]*[A-Za-z]", terminal.read())) == {"\x1b[K"}


def test_a_narrow_terminal_gets_a_short_line(terminal: Terminal) -> None:
    terminal.resize(20)
    now = Now()
    with ProgressLine("a long label of a task", 2.0, stream=terminal.stream, clock=now) as progress:
        now.at_s = 2.0
        progress.update(1.0, "detail")
    first = terminal.read().split("\r")[1].removesuffix("\x1b[K")
    assert first == " 50%  2 s left  a ~"
    assert len(first) < 20


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_a_clean_line_and_no_thread(
    new_threads: Callable[[], list[threading.Thread]], terminal: Terminal, error: type[BaseException]
) -> None:
    now = Now()
    with (  # noqa: PT012
        pytest.raises(error),
        ProgressLine("a", 2.0, stream=terminal.stream, clock=now) as progress,
    ):
        now.at_s = 2.0
        progress.update(1.0)
        raise error
    assert terminal.read().endswith(CLEARED)
    assert not new_threads()


def test_a_short_task_shows_nothing(terminal: Terminal) -> None:
    now = Now()
    with ProgressLine("a", 2.0, stream=terminal.stream, clock=now) as progress:
        now.at_s = 0.9
        progress.update(1.0)
    assert terminal.read() == ""


def test_a_log_gets_a_line_every_few_seconds() -> None:
    stream, now = io.StringIO(), Now()
    with ProgressLine("d0 weights", 300.0, stream=stream, clock=now) as progress:
        for tenth in range(1, 151):
            now.at_s = tenth / 10
            progress.update(float(tenth), "GB")
    lines = stream.getvalue().splitlines()
    assert lines == [f"d0 weights: {share}%, {left} s left, GB" for share, left in ((17, 25), (33, 20), (50, 15))]
    assert LINE_EVERY_S == 5.0
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_many_short_tasks_share_the_lines_of_a_log() -> None:
    stream, now = io.StringIO(), Now()
    progress = ProgressLine("planning", stream=stream, clock=now)
    for second in range(12):
        now.at_s = float(second)
        progress.begin(f"split {second}", 2)
        progress.update(1)
    progress.close()
    assert [line.partition(":")[0] for line in stream.getvalue().splitlines()] == ["split 5", "split 10"]


def test_a_terminal_without_control_codes_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    now = Now()
    progress = ProgressLine("a", 2.0, stream=terminal.stream, clock=now)
    now.at_s = 5.0
    progress.update(1.0)
    assert terminal.read() == "a: 50%, 5 s left\r\n"  # The pty's own line end.


def test_a_closed_terminal_does_not_end_the_task(terminal: Terminal) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    now = Now()
    with ProgressLine("a", 2.0, stream=Closed(), clock=now) as progress:
        now.at_s = 6.0
        progress.update(1.0)


def test_a_worker_reports_to_its_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(PROGRESS_ENV, "1")
    now = Now()
    report = PhaseReport("d0", "weights", "bytes", clock=now)
    for tenth in range(11):
        now.at_s = tenth / 10
        report(tenth, 10)
    found = [phase_of(line) for line in capsys.readouterr().err.splitlines()]
    assert [one.done for one in found if one is not None] == [0, 3, 6, 9, 10]
    assert found[-1] == PhaseProgress(phase="weights", done=10, total=10, unit="bytes", seconds=1.0)


def test_a_worker_on_its_own_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    now = Now()
    report = PhaseReport("d0", "weights", "bytes", clock=now)
    for second in range(1, 9):
        now.at_s = float(second)
        report(second * 10**9, 8 * 10**9)
    assert capsys.readouterr().err == "d0 weights: 62%, 3 s left, 5.00 of 8.00 GB\n"


def test_simulate_shows_progress_on_stderr_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pdserve.progress, "LINE_EVERY_S", 0.0)
    assert main(["simulate", "--limit", "40", "--policy", "goodput,colocated", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 40
    labels = {line.partition(":")[0] for line in err.splitlines()}
    assert labels == {"upper bound", "goodput x1, run 1 of 2", "colocated x1, run 2 of 2"}


def test_plan_shows_progress_with_and_without_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pdserve.progress, "LINE_EVERY_S", 0.0)
    answers = []
    for jobs in ("1", "2"):
        assert main(["plan", "--workers", "2", "--requests", "40", "--jobs", jobs, "--json"]) == 3
        out, err = capsys.readouterr()
        answers.append(out)
        assert "layouts 1 to 2 of 2 (0:2, 1:1): 100%" in err
    assert answers[0] == answers[1]


def test_an_interrupted_simulation_leaves_the_terminal_clean(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdserve.progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr("sys.stderr", terminal.stream)

    def interrupted(trace: object, config: object, on_ended: object, **more: object) -> None:
        from tests.unit.simulator.test_figures import row

        on_ended(row(0, 1.0))  # type: ignore[operator]
        raise KeyboardInterrupt

    monkeypatch.setattr("simulator.commands.simulation.simulate", interrupted)
    assert main(["simulate", "--limit", "40", "--policy", "goodput"]) == 130
    shown = terminal.read()
    assert "goodput x1" in shown
    assert shown.endswith(CLEARED)


@pytest.mark.parametrize(
    ("command", "says", "task"),
    [("play", "frames of", "reading"), ("replay", r"the router decided the same in all \d+ events\n\Z", "replaying")],
)
def test_a_recording_is_read_with_progress(
    command: str,
    says: str,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    recording = tmp_path / "run.jsonl"
    assert main(["simulate", "--limit", "40", "--policy", "goodput", "--record", str(recording)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(pdserve.progress, "LINE_EVERY_S", 0.0)
    assert main([command, str(recording)]) == 0
    out, err = capsys.readouterr()
    assert re.search(says, out)
    assert err.splitlines()[-1].startswith(f"{task} run.jsonl: 100%")


def test_simulate_shows_each_of_its_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It reads the trace to check it and for the bound, and a recording also for its cluster. Each task comes to its
    end, and a run shows only its own progress although it reads the file too."""
    recording = tmp_path / "run.jsonl"
    assert main(["simulate", "--limit", "40", "--policy", "goodput", "--record", str(recording)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(pdserve.progress, "LINE_EVERY_S", 0.0)
    assert main(["simulate", "--trace", str(recording), "--rates", "1,2"]) == 0
    shares = [(line.partition(":")[0], line) for line in capsys.readouterr().err.splitlines()]
    tasks = [(name, [line for _, line in lines]) for name, lines in itertools.groupby(shares, key=lambda one: one[0])]
    of_a_rate = ["reading run.jsonl", "upper bound"]
    names = [name for name, _ in tasks]
    assert names[:3] == [*of_a_rate, "goodput x1, run 1 of 2"]
    assert names[3:] == [*of_a_rate, "goodput x2, run 2 of 2"]
    for name, lines in tasks:
        assert name != "reading run.jsonl" or lines[-1].startswith(f"{name}: 100%")


def test_a_plan_counts_the_simulations_of_unfinished_splits() -> None:
    assert tasks_done(0, 4, 0, 0) == 0.0
    assert tasks_done(0, 4, 1, 0) == 1 / EXPECTED_RUNS
    assert tasks_done(0, 4, 10_000, 0) == NEARLY * 4
    assert tasks_done(2, 4, 25, 20) == 2.5  # those that ended took 10 each
    assert tasks_done(4, 4, 40, 40) == 4.0


def test_a_plan_has_a_remaining_time_before_its_first_split_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(ProgressLine, "update", lambda self, done, detail="": told.append((done, detail)))
    monkeypatch.setattr("simulator.commands.planning._TICK_S", 0.01)
    flags = ["--workers", "2", "--requests", "100", "--lengths", "50,5", "--jobs", "1"]
    main(["plan", *flags])
    assert any(0.0 < done < 1.0 and detail.startswith("0 of 2, ") for done, detail in told)
    assert told[-1][1].startswith("2 of 2, ")

"""The output and exit status of `pdserve replay`."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from pdserve.cli.main import main
from router.recording.replay_command import RecordedLines
from tests.unit.router.test_random_runs import run
from tests.unit.router.test_replay import recording


def recorded(folder: Path) -> Path:
    path = folder / "recording.jsonl"
    path.write_text("".join(recording(run(4, faults=0.0, policy="dynamo", requests=5, stirs=300))))
    return path


def test_an_equal_replay_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path)
    assert main(["replay", str(path)]) == 0
    events = len(path.read_text().splitlines()) - 1
    assert capsys.readouterr().out == f"the router decided the same in all {events} events\n"


def test_a_difference_is_shown_and_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path)
    lines = path.read_text().splitlines()
    number = next(index for index, line in enumerate(lines) if '"is":"Reserve"' in line)
    lines[number] = lines[number].replace('"is":"Reserve","key":["d', '"is":"Reserve","key":["x')
    path.write_text("\n".join(lines) + "\n")
    assert main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"event {number} at" in out
    assert out.endswith(f"the router decided otherwise in 1 of {len(lines) - 1} events\n")
    assert main(["replay", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_differing"] == [number]


@pytest.mark.parametrize("line", [b"a", "\u00e9\u8a9e".encode(), b"\xff\xfe", b"\r"])
def test_progress_counts_bytes(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_bytes((line * 100 + b"\n") * 300)
    lines = RecordedLines(path)
    with lines.with_progress("reading") as read:
        seen = [lines.bytes_read for _ in read]
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


def test_a_recording_may_come_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As from `pdserve replay <(zcat recording.gz)`."""
    text = recorded(tmp_path).read_bytes()
    read, write = os.pipe()
    writer = threading.Thread(target=lambda: os.fdopen(write, "wb").write(text))
    writer.start()
    try:
        assert main(["replay", f"/dev/fd/{read}"]) == 0, capsys.readouterr().err
    finally:
        os.close(read)
        writer.join()
    assert "the router decided the same" in capsys.readouterr().out


def test_a_damaged_line_is_one_line_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path)
    lines = path.read_bytes().splitlines()
    lines[6] = b"\xff\xfe"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert main(["replay", str(path)]) == 1
    assert "line 7" in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "file: got" in capsys.readouterr().err

"""Files that are written in folders where others may write too: logs and recordings."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.bounded_file import open_private
from pdserve.core.errors import ConfigError
from pdserve.launch.report import LauncherReport
from router.recording.recording import RecordFile
from router.state.interface import RouterSettings

STRANGER = 54_321  # a user id that owns nothing


def write_log(file: Path) -> None:
    report = LauncherReport(file.parent)
    try:
        report.relay("p0")("a line")
    finally:
        report.close()


def write_recording(file: Path) -> None:
    RecordFile(str(file), RouterSettings(), 2**20).close()


WRITERS = pytest.mark.parametrize("write", [write_log, write_recording])
Write = Callable[[Path], None]


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


@WRITERS
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_their_user_can_read_them(tmp_path: Path, write: Write, umask: int) -> None:
    file = tmp_path / "p0.log"
    before = os.umask(umask)
    try:
        write(file)
    finally:
        os.umask(before)
    assert mode_of(file) == 0o600


def test_an_older_log_is_closed_to_others(tmp_path: Path) -> None:
    file = tmp_path / "p0.log"
    file.write_text("before\n")
    file.chmod(0o644)
    write_log(file)
    assert file.read_text() == "before\na line\n"
    assert mode_of(file) == 0o600


@WRITERS
@pytest.mark.parametrize("target", ["a file", "no file"])
def test_a_link_is_not_followed(tmp_path: Path, write: Write, target: str) -> None:
    victim, file = tmp_path / "victim", tmp_path / "p0.log"
    if target == "a file":
        victim.write_text("precious")
    file.symlink_to(victim)
    with pytest.raises(ConfigError, match="it is a link"):
        write(file)
    assert victim.exists() is (target == "a file")
    assert not victim.exists() or victim.read_text() == "precious"


def test_a_log_with_a_second_name_is_refused(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "p0.log"
    victim.write_text("precious")
    os.link(victim, file)
    with pytest.raises(ConfigError, match="hard link"):
        write_log(file)
    assert victim.read_text() == "precious"


@WRITERS
def test_a_named_pipe_is_refused_without_a_wait(tmp_path: Path, write: Write) -> None:
    os.mkfifo(tmp_path / "p0.log")
    with pytest.raises(ConfigError, match="not a regular file"):
        write(tmp_path / "p0.log")


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user, which only root can")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p0.log"
    file.write_text("")
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(OSError, match="belongs to user 54321"):
        open_private(file, is_appended=True)

"""The recording of a live router: its size is bounded, and its errors never affect requests."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from router.recording.recording import RecordFile
from router.recording.replay import read, read_settings, replay
from router.state.interface import RouterSettings, TimePassed
from tests.unit.router.test_random_runs import run

SETTINGS = RouterSettings(policy="dynamo")


def test_a_recording_replays(tmp_path: Path) -> None:
    world = run(4, faults=0.0, policy="dynamo", requests=5, stirs=300)
    file = RecordFile(str(tmp_path / "a"), world.state.settings, max_bytes=2**20)
    for now_s, event, commands in world.log:
        file.step(now_s, event, list(commands))
    file.close()
    with (tmp_path / "a").open() as lines:
        assert list(replay(lines)) == []


def test_a_recording_stops_at_its_limit_and_replays_up_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    file = RecordFile(str(path), SETTINGS, max_bytes=2000)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            file.step(float(number), TimePassed(), [])
    assert path.stat().st_size <= 2000
    assert len(caplog.records) == 1
    file.close()
    with path.open() as lines:
        assert read_settings(next(lines)) == SETTINGS
        assert [step.now_s for step in read(lines)] == [
            float(number) for number in range(len(path.open().readlines()) - 1)
        ]


def test_other_users_cannot_read_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = os.umask(0)
    try:
        RecordFile(str(path), SETTINGS, max_bytes=2000).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_older_recording_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    first = RecordFile(str(path), RouterSettings(policy="lmetric"), max_bytes=2000)
    first.close()
    RecordFile(str(path), SETTINGS, max_bytes=2000).close()
    assert read_settings(path.read_text()) == SETTINGS
    assert read_settings((tmp_path / "a.old").read_text()).policy == "lmetric"


def test_a_full_disk_ends_the_recording_and_not_the_router(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    file = RecordFile("/dev/full", SETTINGS, max_bytes=2**20)
    with caplog.at_level(logging.WARNING):
        for number in range(2000):
            file.step(float(number), TimePassed(), [])
    file.close()
    assert [one.message for one in caplog.records] == ["the recording ends here"]

"""A server that fails often does not fill the log."""

from __future__ import annotations

import logging

import pytest

from pdserve.prefix import connection
from pdserve.prefix.connection import OutageLog
from pdserve.prefix.redis_index import RedisIndex

log = logging.getLogger(__name__)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(connection.time, "monotonic", lambda: now_s[0])
    return now_s


def test_an_outage_is_logged_once_a_minute_with_a_count(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outages = OutageLog(log, "down", "up")
    for _ in range(100):
        outages.failed(redis="r", why="late")
        outages.recovered(redis="r")
    assert [one.message for one in caplog.records] == ["down", "up"]
    clock[0] += 60.0
    outages.failed(redis="r", why="late")
    assert (caplog.records[-1].message, caplog.records[-1].__dict__["failures"]) == ("down", 100)


def test_late_answers_of_the_index_are_logged_once(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    index = RedisIndex("redis://127.0.0.1:1/0", "c")
    for _ in range(50):
        index._recover()
        index._trip("answers are late")
    assert sum("cannot be reached" in one.message for one in caplog.records) == 1

"""The last lines of a log are kept, in bounded memory."""

from __future__ import annotations

import logging

from pdserve.core.live import MAX_CHARS, MAX_LINES
from pdserve.telemetry.logs import RecentLog


def record(message: str, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", level, "f", 1, message, (), None, extra=extra)


def test_a_line_has_the_time_level_and_fields_of_its_record() -> None:
    log, one = RecentLog(), record("worker is ready", logging.WARNING, worker_id="d0")
    log.handle(one)
    [line] = log.lines()
    assert (line.at_unix_s, line.level, line.text) == (one.created, "WARNING", "x: worker is ready worker_id=d0")


def test_the_last_lines_are_kept_and_long_ones_are_cut() -> None:
    log = RecentLog()
    for number in range(MAX_LINES + 5):
        log.handle(record(f"{number} " + "long" * MAX_CHARS))
    lines = log.lines()
    assert len(lines) == MAX_LINES
    assert lines[0].text.startswith("x: 5 ")
    assert {len(one.text) for one in lines} == {MAX_CHARS}


def test_a_record_that_cannot_be_formatted_is_left_out() -> None:
    log, bad = RecentLog(), record("%d steps")
    bad.args = ("many",)
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        log.handle(bad)
    finally:
        logging.raiseExceptions = before
    log.handle(record("next"))
    assert [one.text for one in log.lines()] == ["x: next"]

"""Log lines carry their fields, on one line each."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pdserve.config import LOG_LEVEL_ENV
from pdserve.core.errors import ConfigError
from pdserve.core.live import MAX_CHARS, MAX_LINES
from pdserve.telemetry.logs import (
    FORMAT_ENV,
    FieldFormatter,
    JsonFormatter,
    RecentLog,
    json_line,
    log_format,
    log_level,
)

FORMATTER = FieldFormatter("%(levelname)s router %(name)s: %(message)s")


def line(message: str, **extra: object) -> str:
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, message, (), None, extra=extra)
    return FORMATTER.format(record)


def test_fields_follow_the_message_in_order() -> None:
    assert line("request finished", request_id="a", ttft_s=0.25, attempts=1) == (
        "INFO router x: request finished request_id=a ttft_s=0.25 attempts=1"
    )


def test_a_message_without_fields_is_itself() -> None:
    assert line("router is up") == "INFO router x: router is up"


def test_a_field_cannot_forge_another_line_or_field() -> None:
    assert line("refused", why="gone\nERROR all=lost") == "INFO router x: refused why='gone\\nERROR all=lost'"


def test_fields_of_libraries_are_ignored() -> None:
    assert line("request finished", _library_stamp=1, ttft_s=0.5) == "INFO router x: request finished ttft_s=0.5"


def as_json(message: str, exc_info: Any = None, **extra: object) -> dict[str, Any]:
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, message, (), exc_info, extra=extra)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    text = JsonFormatter("router").format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_record_is_one_json_object() -> None:
    assert as_json("request ended", request_id="a", ttft_s=0.25, is_late=True, trace_id=None) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "process": "router",
        "logger": "x",
        "message": "request ended",
        "request_id": "a",
        "ttft_s": 0.25,
        "is_late": True,
        "trace_id": None,
    }


def test_json_fields_replace_no_standard_field() -> None:
    found = as_json("a\nb", level="low", rate=float("nan"), what=ValueError("x"))
    assert (found["message"], found["level"], found["level_"]) == ("a\nb", "INFO", "low")
    assert (found["rate"], found["what"]) == ("nan", "x")


def test_a_json_record_has_its_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        found = as_json("failed", exc_info=sys.exc_info())
    assert found["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"message": "a", "level": "INFO"}', {"source": "d0", "message": "a", "level": "INFO"}),
        ("Traceback (most recent call last):", {"source": "d0", "message": "Traceback (most recent call last):"}),
        ("[1, 2]", {"source": "d0", "message": "[1, 2]"}),
    ],
)
def test_lines_of_a_process_become_objects(line: str, expected: dict[str, str]) -> None:
    assert json.loads(json_line("d0", line)) == expected


def test_an_unknown_format_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_format() == "text"
    monkeypatch.setenv(FORMAT_ENV, "json")
    assert log_format() == "json"
    monkeypatch.setenv(FORMAT_ENV, "xml")
    with pytest.raises(ConfigError, match="text or json"):
        log_format()


def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_LEVEL_ENV, raising=False)
    assert log_level() == logging.INFO
    monkeypatch.setenv(LOG_LEVEL_ENV, "warning")
    assert log_level() == logging.WARNING
    monkeypatch.setenv(LOG_LEVEL_ENV, "loud")
    with pytest.raises(ConfigError, match="one of debug, info, warning, error"):
        log_level()


# --- last lines -----------------------------------------------------------------------------------------------
# The last lines of a log are kept, in bounded memory.


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

"""Checks of a trace's rows that several formats share. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from simulator.model import TraceError

MAX_TOKENS: Final = 10_000_000  # limit for a prompt or an answer; more means a damaged row
MAX_SPAN_S: Final = 366 * 86_400.0 * 10


def json_object(text: str) -> dict[str, Any] | None:
    """None if the text is anything else."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def json_row(text: str, name: str, line: int, columns: Sequence[str] = ()) -> dict[str, Any]:
    """An object that has all of `columns`. Raises TraceError."""
    row = json_object(text)
    if row is None:
        raise TraceError(name, line, "row", text, "one JSON object")
    for column in columns:
        if column not in row:
            raise TraceError(name, line, column, "nothing", "a value: every row has " + ", ".join(columns))
    return row


def check_tokens(value: Any, name: str, line: int, column: str, seen: object = None, *, least: int = 1) -> int:
    """`seen`: what the row has in place of the value. Raises TraceError."""
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        expected = f"a whole number of tokens between {least} and {MAX_TOKENS}"
        raise TraceError(name, line, column, value if seen is None else seen, expected)
    return value


def date_s(text: str) -> float | None:
    """Seconds since 1970; None if the text is no date and time. Without a zone it counts as UTC, because only
    differences matter. Digits beyond microseconds are dropped, which keeps the order."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

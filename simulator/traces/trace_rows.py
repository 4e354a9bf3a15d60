"""Rows of published trace files as TraceRequests. Pure: reads lines, opens nothing.

Mooncake JSONL: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 prompt tokens).

Azure CSV: `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`; columns in any order, others ignored.

An invalid row is an error and is never skipped, because a trace with gaps is a different trace.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from pdserve.core.errors import ConfigError, shortened
from simulator.model import TraceRequest

MOONCAKE_BLOCK_TOKENS: Final = 512
MOONCAKE_QUANTUM_S: Final = 3.0  # step between its rounded timestamps
MAX_TOKENS: Final = 10_000_000  # limit for a prompt or an answer; more means a damaged row
MAX_SPAN_S: Final = 366 * 86_400.0 * 10
_MAX_STAMP_MS: Final = 10**15
_MOONCAKE_COLUMNS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

NumberedLine = tuple[int, str]  # lines count from 1, as editors do


class TraceError(ConfigError):
    """A trace file has an invalid value: names the line, the column, and the allowed values."""

    reason = "TRACE"

    def __init__(self, trace: str, line: int, column: str, seen: object, expected: str) -> None:
        super().__init__(f"{trace}, line {line}, {column}", shortened(seen, 60), expected)
        self.trace, self.line, self.column = trace, line, column


def is_mooncake(first_line: str) -> bool:
    row = _object(first_line)
    return row is not None and any(column in row for column in _MOONCAKE_COLUMNS)


def is_azure(first_line: str) -> bool:
    return any(column in _cells(first_line) for column in _AZURE_COLUMNS)


def read_mooncake(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """Raises TraceError at the first invalid row."""
    clock = _Clock(name)
    for line, text in lines:
        row = _object(text)
        if row is None:
            raise TraceError(name, line, "row", text, "one JSON object")
        for column in _MOONCAKE_COLUMNS:
            if column not in row:
                raise TraceError(
                    name, line, column, "nothing", "a value: every row has " + ", ".join(_MOONCAKE_COLUMNS)
                )
        stamp_ms, prompt, output = row["timestamp"], row["input_length"], row["output_length"]
        is_number = isinstance(stamp_ms, int | float) and not isinstance(stamp_ms, bool)
        if not is_number or not 0 <= stamp_ms <= _MAX_STAMP_MS:
            raise TraceError(name, line, "timestamp", stamp_ms, "a number of milliseconds, at least 0")
        arrival_s = clock.since_first(stamp_ms / 1000.0, line, "timestamp", stamp_ms)
        _check_tokens(prompt, name, line, "input_length")
        _check_tokens(output, name, line, "output_length")
        yield TraceRequest(
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            block_ids=_block_ids(row["hash_ids"], prompt, name, line),
        )


def read_azure(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """The first line is the header. Raises TraceError at the first invalid row."""
    clock = _Clock(name)
    at: tuple[int, ...] = ()
    for line, text in lines:
        cells = _cells(text)
        if not at:
            for column in _AZURE_COLUMNS:
                if column not in cells:
                    raise TraceError(name, line, column, text, "a header with " + ", ".join(_AZURE_COLUMNS))
            at = tuple(cells.index(column) for column in _AZURE_COLUMNS)
            continue
        for column, index in zip(_AZURE_COLUMNS, at, strict=True):
            if index >= len(cells) or not cells[index]:
                raise TraceError(name, line, column, "nothing", f"a value in cell {index + 1}")
        stamp, prompt, output = (cells[index] for index in at)
        seconds = _date_s(stamp)
        if seconds is None:
            raise TraceError(name, line, "TIMESTAMP", stamp, "a date and time such as 2023-11-16 18:15:46.6805900")
        yield TraceRequest(
            arrival_s=clock.since_first(seconds, line, "TIMESTAMP", stamp),
            prompt_tokens=_check_tokens(_integer(prompt), name, line, "ContextTokens", prompt),
            output_tokens=_check_tokens(_integer(output), name, line, "GeneratedTokens", output),
        )


class _Clock:
    """Seconds since the first row; times must not decrease."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first_s: float | None = None
        self._last_s = -math.inf

    def since_first(self, stamp_s: float, line: int, column: str, seen: object) -> float:
        if self._first_s is None:
            self._first_s = stamp_s
        if stamp_s < self._last_s:
            raise TraceError(self._name, line, column, seen, "no earlier than the row before: rows in order of arrival")
        if stamp_s - self._first_s > MAX_SPAN_S:
            raise TraceError(self._name, line, column, seen, "within ten years of the first row")
        self._last_s = stamp_s
        return stamp_s - self._first_s


def _check_tokens(value: Any, name: str, line: int, column: str, seen: object = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        expected = f"a whole number of tokens between 1 and {MAX_TOKENS}"
        raise TraceError(name, line, column, value if seen is None else seen, expected)
    return value


def _block_ids(value: Any, prompt_tokens: int, name: str, line: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise TraceError(name, line, "hash_ids", value, "a list of whole numbers, at least 0")
    wanted = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(value) != wanted:
        expected = (
            f"{wanted}: one per {MOONCAKE_BLOCK_TOKENS} of {prompt_tokens} prompt tokens, the last may be partial"
        )
        raise TraceError(name, line, "hash_ids", f"{len(value)} ids", expected)
    return tuple(value)


def _object(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _cells(text: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([text]), [])]
    except csv.Error:
        return []


def _integer(text: str) -> int | None:
    try:
        return int(text) if len(text) < 20 else None
    except ValueError:
        return None


def _date_s(text: str) -> float | None:
    """Seconds since 1970. Without a zone it counts as UTC, because only differences matter. Digits beyond microseconds
    are dropped, which keeps the order."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

"""Opens a trace file of any known format, recognised by its first line. Reads it as a stream, once per run.

A recording of a live router (pdserve up --record) is also a trace, and contains its cluster.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from pdserve.bounded_file import opened
from pdserve.core.errors import ConfigError
from simulator.model import NumberedLine, TraceError, TraceRequest
from simulator.traces.recorded import RecordedCluster, block_tokens, is_recording, read_cluster, read_recording
from simulator.traces.rows import MAX_SPAN_S, check_tokens, date_s, json_object, json_row
from simulator.traces.sessions import (
    SESSION_BLOCK_TOKENS,
    is_claude_code,
    is_sessions,
    read_claude_code,
    read_sessions,
)

# --- rows of published traces ---------------------------------------------------------------------------------
# Mooncake JSONL: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 prompt tokens).
#
# Azure CSV: `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`; columns in any order, others ignored.
#
# An invalid row is an error and is never skipped, because a trace with gaps is a different trace.

MOONCAKE_BLOCK_TOKENS: Final = 512
MOONCAKE_QUANTUM_S: Final = 3.0  # step between its rounded timestamps
_MAX_STAMP_MS: Final = 10**15
_MOONCAKE_COLUMNS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_mooncake(first_line: str) -> bool:
    row = json_object(first_line)
    return row is not None and any(column in row for column in _MOONCAKE_COLUMNS)


def is_azure(first_line: str) -> bool:
    return any(column in _cells(first_line) for column in _AZURE_COLUMNS)


def read_mooncake(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """Raises TraceError at the first invalid row."""
    clock = _Clock(name)
    for line, text in lines:
        row = json_row(text, name, line, _MOONCAKE_COLUMNS)
        stamp_ms, prompt, output = row["timestamp"], row["input_length"], row["output_length"]
        is_number = isinstance(stamp_ms, int | float) and not isinstance(stamp_ms, bool)
        if not is_number or not 0 <= stamp_ms <= _MAX_STAMP_MS:
            raise TraceError(name, line, "timestamp", stamp_ms, "a number of milliseconds, at least 0")
        arrival_s = clock.since_first(stamp_ms / 1000.0, line, "timestamp", stamp_ms)
        check_tokens(prompt, name, line, "input_length")
        check_tokens(output, name, line, "output_length")
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
        seconds = date_s(stamp)
        if seconds is None:
            raise TraceError(name, line, "TIMESTAMP", stamp, "a date and time such as 2023-11-16 18:15:46.6805900")
        yield TraceRequest(
            arrival_s=clock.since_first(seconds, line, "TIMESTAMP", stamp),
            prompt_tokens=check_tokens(_integer(prompt), name, line, "ContextTokens", prompt),
            output_tokens=check_tokens(_integer(output), name, line, "GeneratedTokens", output),
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


# --- formats and files ----------------------------------------------------------------------------------------

MAX_LINE_CHARS: Final = 16 * 2**20  # limit of a line, so that a file without line ends does not fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    name: str
    recognises: Callable[[str], bool]  # its first line
    read: Callable[[Iterable[NumberedLine], str], Iterator[TraceRequest]]
    block_tokens: int = 0
    find_block_tokens: Callable[[Iterable[NumberedLine], str], int] | None = None  # if each file has its own
    read_cluster: Callable[[Iterable[NumberedLine], str], RecordedCluster] | None = None
    quantum_s: float = 0.0  # step to which arrivals are rounded; 0: not rounded
    has_sessions: bool = False  # turns follow each other


#: Mooncake's `timestamp` is a name of Claude Code's rows too, so those are recognised first.
FORMATS: Final = (
    Format(
        name="sessions JSONL",
        recognises=is_sessions,
        read=read_sessions,
        block_tokens=SESSION_BLOCK_TOKENS,
        has_sessions=True,
    ),
    Format(
        name="Claude Code JSONL",
        recognises=is_claude_code,
        read=read_claude_code,
        block_tokens=SESSION_BLOCK_TOKENS,
        has_sessions=True,
    ),
    Format(
        name="Mooncake JSONL",
        recognises=is_mooncake,
        read=read_mooncake,
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        quantum_s=MOONCAKE_QUANTUM_S,
    ),
    Format(name="Azure CSV", recognises=is_azure, read=read_azure),
    Format(
        name="pdserve recording",
        recognises=is_recording,
        read=read_recording,
        find_block_tokens=block_tokens,
        read_cluster=read_cluster,
    ),
)


@final
class FileTrace:
    """A trace in a file. Each iteration reads the file again. Rows are checked as they are read."""

    def __init__(self, path: str | Path, on_read: Callable[[int, int], None] = lambda done, size: None) -> None:
        """`on_read` receives the bytes that an iteration has read, first 0, and the file's bytes.

        Raises ConfigError if the file cannot be read, TraceError if its first line has no known format.
        """
        self._path, self._on_read = Path(path), on_read
        self.name = self._path.name
        first = next(self._lines(), None)
        if first is None:
            raise ConfigError("trace", f"{self.name}, an empty file", "a file with at least one request")
        found = [one for one in FORMATS if one.recognises(first[1])]
        if not found:
            raise TraceError(self.name, first[0], "row", first[1], "one of " + ", ".join(one.name for one in FORMATS))
        self.format = found[0]
        find = self.format.find_block_tokens
        self.block_tokens = self.format.block_tokens if find is None else find(self._lines(), self.name)
        self.quantum_s = self.format.quantum_s

    def __iter__(self) -> Iterator[TraceRequest]:
        empty = True
        for request in self.format.read(self._lines(), self.name):
            empty = False
            yield request
        if empty:
            raise ConfigError("trace", f"{self.name}, a header and no rows", "a file with at least one request")

    def cluster(self) -> RecordedCluster | None:
        """The cluster of a recording; None for other traces."""
        read = self.format.read_cluster
        return None if read is None else read(self._lines(), self.name)

    def _lines(self) -> Iterator[NumberedLine]:
        """Blank lines are skipped, but counted."""
        line = 0
        try:
            # A byte order mark is not part of the first row.
            with opened(self._path, "trace") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
                if not raw.seekable():
                    raise ConfigError("trace", f"{self.name}, a pipe", "a file, because it is read more than once")
                size = os.fstat(raw.fileno()).st_size
                self._on_read(0, size)
                for text in iter(lambda: file.readline(MAX_LINE_CHARS), ""):
                    line += 1
                    self._on_read(raw.tell(), size)
                    if len(text) == MAX_LINE_CHARS:
                        raise TraceError(self.name, line, "row", text, f"fewer than {MAX_LINE_CHARS} characters")
                    if stripped := text.strip():
                        yield line, stripped
        except UnicodeDecodeError:
            raise TraceError(self.name, line + 1, "row", "bytes that are not UTF-8", "a text file") from None

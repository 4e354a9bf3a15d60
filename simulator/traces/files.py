"""Opens a trace file of any known format, recognised by its first line. Reads it as a stream, once per run.

A recording of a live router (pdserve up --record) is also a trace, and contains its cluster.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from pdserve.bounded_file import opened
from pdserve.core.errors import ConfigError
from simulator.model import TraceRequest
from simulator.traces.recorded import RecordedCluster, block_tokens, is_recording, read_cluster, read_recording
from simulator.traces.trace_rows import (
    MOONCAKE_BLOCK_TOKENS,
    MOONCAKE_QUANTUM_S,
    NumberedLine,
    TraceError,
    is_azure,
    is_mooncake,
    read_azure,
    read_mooncake,
)

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


FORMATS: Final = (
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

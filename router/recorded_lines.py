"""Reads the lines of a recording."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from pdserve.bounded_file import opened
from pdserve.core.errors import ConfigError
from pdserve.progress import ProgressLine

MAX_LINE_CHARS: Final = 64 * 2**20  # so that a file without line ends does not fill the memory


@final
class RecordedLines:
    """The lines of a file, counted while they are read. Invalid UTF-8 is reported as invalid JSON, with its line
    number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        with (
            opened(self._path, "file") as raw,
            io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as file,
        ):
            for line in iter(lambda: file.readline(MAX_LINE_CHARS), ""):
                if len(line) == MAX_LINE_CHARS:
                    raise ConfigError(
                        "file", f"line {self.count + 1} of {self._path}", f"at most {MAX_LINE_CHARS} characters"
                    )
                self.count += 1
                yield line

    @contextmanager
    def with_progress(self, verb: str) -> Iterator[Iterator[str]]:
        """The lines, with a bar of the bytes read."""
        size = self._path.stat().st_size if self._path.is_file() else None
        with ProgressLine(f"{verb} {self._path.name}", size) as progress:
            yield self._counted(progress)

    def _counted(self, progress: ProgressLine) -> Iterator[str]:
        done = 0
        for line in self:
            yield line
            done += len(line)
            progress.update_bytes(done)

"""Reads the lines of a recording."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import final

from pdserve.core.errors import ConfigError


@final
class RecordedLines:
    """The lines of a file, counted while they are read. Invalid UTF-8 is reported as invalid JSON, with its line
    number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    self.count += 1
                    yield line
        except OSError as error:
            raise ConfigError("file", self._path, f"a file that can be read ({error.strerror})") from None

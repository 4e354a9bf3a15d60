"""One line of a process's log, as the live view shows it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_LINES: Final = 200  # kept by a process, and sent in one answer
MAX_CHARS: Final = 2000  # in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    at_unix_s: float
    level: str  # a level name of Python's logging, for example WARNING
    text: str  # logger, message and fields; several lines if there is a traceback

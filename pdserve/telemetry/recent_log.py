"""The last records of this process's log, in bounded memory, for the live view."""

from __future__ import annotations

import logging
from collections import deque
from typing import final

from pdserve.core.log_line import MAX_CHARS, MAX_LINES, LogLine
from pdserve.telemetry.logs import FieldFormatter


@final
class RecentLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(FieldFormatter("%(name)s: %(message)s"))
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:MAX_CHARS]
            self._lines.append(LogLine(at_unix_s=record.created, level=record.levelname, text=text))
        except Exception:  # as in logging's own handlers, a record that cannot be formatted must not raise
            self.handleError(record)

    def lines(self) -> tuple[LogLine, ...]:
        """The oldest first. Called from any thread."""
        return tuple(self._lines.copy())

"""Log format of all processes, on stderr: a line of text per record, with its fields behind, or a JSON object. Also the
last records, for the live view.

2026-11-21 01:11:12,219 INFO router router.service.workers: a worker is attached worker_id=d0 role=decode

{"time": "2026-11-21T01:11:12.219Z", "level": "INFO", "process": "router", "logger": "router.service.workers",
 "message": "a worker is attached", "worker_id": "d0", "role": "decode"}
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import deque
from typing import Any, Final, final

from pdserve.config import LOG_LEVEL_ENV, LOG_LEVELS
from pdserve.core.errors import ConfigError
from pdserve.core.live import MAX_CHARS, MAX_LINES, LogLine

FORMAT_ENV: Final = "PDSERVE_LOG_FORMAT"
TEXT: Final = "text"
JSON: Final = "json"
FORMATS: Final = (TEXT, JSON)
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


@final
class FieldFormatter(logging.Formatter):
    """Appends the fields of `extra`, in order; text with blanks is quoted."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_shown(value)}" for name, value in _fields(record)]
        return " ".join([super().formatMessage(record), *fields])


@final
class JsonFormatter(logging.Formatter):
    """One JSON object, whose fields of `extra` come after those of every record. An own field of a standard name gets
    an underscore behind it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record):
            found[f"{name}_" if name in found else name] = _plain(value)
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def log_format() -> str:
    """Raises ConfigError if the environment names another format."""
    found = os.environ.get(FORMAT_ENV) or TEXT
    if found not in FORMATS:
        raise ConfigError(FORMAT_ENV, found, " or ".join(FORMATS))
    return found


def log_level() -> int:
    """Raises ConfigError if the environment names another level."""
    found = os.environ.get(LOG_LEVEL_ENV) or "info"
    if found not in LOG_LEVELS:
        raise ConfigError(LOG_LEVEL_ENV, found, "one of " + ", ".join(LOG_LEVELS))
    return logging.getLevelNamesMapping()[found.upper()]


def log_to_stderr(process: str) -> None:
    """Raises ConfigError as `log_format` and `log_level`."""
    level = log_level()
    handler = logging.StreamHandler(sys.stderr)
    if log_format() == JSON:
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(FieldFormatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def json_line(process: str, line: str) -> str:
    """A line of a process's output as one JSON object. An object, which the process has logged itself, gets the name of
    the process; other text becomes the message."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    return json.dumps(
        {"source": process, **(found if isinstance(found, dict) else {"message": line})}, ensure_ascii=False
    )


def _fields(record: logging.LogRecord) -> list[tuple[str, object]]:
    """Those of `extra`. Names that begin with an underscore belong to libraries: Ray adds one to every record."""
    return [(name, value) for name, value in vars(record).items() if name not in _STANDARD and name[0] != "_"]


def _plain(value: object) -> bool | int | float | str | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if not text or " " in text or not text.isprintable() else text  # no other space is printable


# --- last records ---------------------------------------------------------------------------------------------
# Kept in bounded memory, for the live view.


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

"""Log format of all processes: one line per record on stderr, with its fields after the message.

2026-11-21 01:11:12,219 INFO router router.workers: a worker is attached worker_id=d0 role=decode
"""

from __future__ import annotations

import logging
import sys
from typing import Final, final

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


@final
class FieldFormatter(logging.Formatter):
    """Appends the fields of `extra`, in order; text with blanks is quoted.

    Names that begin with an underscore belong to libraries: Ray adds one to every record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        own = ((name, value) for name, value in vars(record).items() if name not in _STANDARD and name[0] != "_")
        fields = [f"{name}={_shown(value)}" for name, value in own]
        return " ".join([super().formatMessage(record), *fields])


def log_to_stderr(process: str, level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if not text or any(one.isspace() or not one.isprintable() for one in text) else text

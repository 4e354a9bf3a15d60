"""A progress bar on stderr for long operations; none without a terminal."""

from __future__ import annotations

import sys
import time
from typing import Final, final

_WIDTH: Final = 30
_EVERY_S: Final = 0.2
_PATIENCE_S: Final = 1.0  # shorter operations show no bar


@final
class ProgressLine:
    def __init__(self, label: str, total_s: float) -> None:
        self._label, self._total_s = label, total_s
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + _PATIENCE_S
        self._is_seen = sys.stderr.isatty()
        self._is_sampled = False
        self._done_s = 0.0

    def at(self, done_s: float) -> None:
        """`done_s` of the trace's time is done; the maximum counts, because requests end out of order."""
        self._done_s = max(self._done_s, done_s)
        if self._is_seen and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            self._is_sampled = True
            print("\r" + bar(self._label, self._done_s, self._total_s), end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_sampled:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def bar(label: str, done_s: float, total_s: float) -> str:
    share = min(max(done_s / total_s, 0.0), 1.0) if total_s > 0.0 else 1.0
    full = round(share * _WIDTH)
    return f"{label}  [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}  {done_s:.0f} of {total_s:.0f} s of trace"

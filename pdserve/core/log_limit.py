"""Limits log lines about events that foreign processes can cause. Pure."""

from __future__ import annotations

from typing import Final, final

LOG_EVERY_S: Final = 10.0


@final
class LogLimit:
    def __init__(self, every_s: float = LOG_EVERY_S) -> None:
        self._every_s = every_s
        self._count = 0
        self._next_s = -float("inf")

    def due(self, now_s: float) -> int:
        """Counts one event. Returns the number of events since the last line if a line is due now; otherwise 0."""
        self._count += 1
        if now_s < self._next_s:
            return 0
        count, self._count = self._count, 0
        self._next_s = now_s + self._every_s
        return count

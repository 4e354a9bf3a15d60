"""Typical recent latency of messages between router and workers. Pure.

On every machine about one message in ten takes far longer than the others. Such outliers would dominate a mean.
Predictions are made for single requests, and most requests are not outliers, so the median is used.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final, final

REMEMBERED: Final = 31


@final
class MessageLatency:
    """The median of the last messages; `typical_s` is cached, because it is read more often than it changes."""

    __slots__ = ("_seen", "typical_s")

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.typical_s = 0.0

    def observe(self, seconds: float) -> None:
        """Adds a latency. It is negative if the worker's preceding work was predicted too long."""
        self._seen.append(seconds)
        self.typical_s = max(median(self._seen), 0.0)

"""The event queue and the simulated clock. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, final


@final
class Agenda:
    """Entries of the same time happen in the order in which they were added, so equal delays keep a stream's order."""

    __slots__ = ("_entries", "now_s", "num_entries")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_entries = 0

    def at(self, time_s: float, action: Callable[..., None], *details: Any) -> None:
        """A time in the past counts as now."""
        self.num_entries += 1
        heapq.heappush(self._entries, (max(time_s, self.now_s), self.num_entries, action, details))

    def after(self, delay_s: float, action: Callable[..., None], *details: Any) -> None:
        self.num_entries += 1
        heapq.heappush(self._entries, (self.now_s + delay_s, self.num_entries, action, details))

    def step(self) -> bool:
        """Runs the next entry. False: there is none."""
        if not self._entries:
            return False
        self.now_s, _, action, details = heapq.heappop(self._entries)
        action(*details)
        return True

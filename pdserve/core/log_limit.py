"""Limits log lines about events that foreign processes can cause. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, final

LOG_EVERY_S: Final = 10.0
MAX_PEERS: Final = 1024


@final
class LogLimit:
    def __init__(self, every_s: float = LOG_EVERY_S) -> None:
        self._every_s = every_s
        self._count = 0
        self._next_s = -float("inf")

    def due(self, now_s: float) -> int:
        """Counts one event. Returns the number of events since the last line if a line is due now; otherwise 0."""
        self._count += 1
        if not self.is_over(now_s):
            return 0
        count, self._count = self._count, 0
        self._next_s = now_s + self._every_s
        return count

    def is_over(self, now_s: float) -> bool:
        """Whether the next event gets a line."""
        return now_s >= self._next_s


@final
class LogLimits:
    """A LogLimit for each peer. If MAX_PEERS had a line within its time, all further ones share one limit, because a
    foreign process can have a new name each time."""

    def __init__(self, every_s: float = LOG_EVERY_S) -> None:
        self._every_s = every_s
        self._of: OrderedDict[str, LogLimit] = OrderedDict()  # by peer, in the order of their last lines
        self._others = LogLimit(every_s)

    def due(self, peer: str, now_s: float) -> int:
        """As LogLimit.due, for one peer."""
        if peer not in self._of:
            if len(self._of) >= MAX_PEERS:
                if not next(iter(self._of.values())).is_over(now_s):
                    return self._others.due(now_s)
                self._of.popitem(last=False)
            self._of[peer] = LogLimit(self._every_s)
        count = self._of[peer].due(now_s)
        if count:
            self._of.move_to_end(peer)
        return count

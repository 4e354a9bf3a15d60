"""Log lines about peers that fail: at most one a minute for each message and peer, with a count of all.

A peer may fail as often as it likes: a worker that registers and disappears ten times a second, a Redis that is full.
Peers can also have new names each time, so there is a limit on all of them together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, final

# --- limit of lines -------------------------------------------------------------------------------------------
# Of lines about events that foreign processes can cause. It has no clock.

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


# --- lines about peers ----------------------------------------------------------------------------------------

EVERY_S: Final = 60.0


@final
class PeerLog:
    """Lines of one logger. Used from any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._limits: dict[str, LogLimits] = {}  # by message, of which the code has few
        self._lock = threading.Lock()

    def line(
        self, level: int, message: str, peer: str = "", *, exc_info: BaseException | None = None, **extra: object
    ) -> bool:
        """Logs it with `times`, the number of such lines since the last one, if one is due. Returns whether it is."""
        return self.write(level, message, peer, extra, exc_info)

    def warning(self, message: str, peer: str = "", **extra: object) -> bool:
        return self.write(logging.WARNING, message, peer, extra)

    def write(
        self,
        level: int,
        message: str,
        peer: str,
        extra: Mapping[str, object],
        exc_info: BaseException | None = None,
        *,
        is_needed: bool = False,
    ) -> bool:
        """As line(). `is_needed`: also if none is due."""
        with self._lock:
            limits = self._limits.setdefault(message, LogLimits(EVERY_S))
            times = limits.due(peer, time.monotonic())
        if not (times or is_needed):
            return False
        self._log.log(level, message, exc_info=exc_info, extra=extra if times <= 1 else {**extra, "times": times})
        return True


@final
class OutageLog:
    """Logs that a peer fails, at most once a minute however often it fails, and that it is back: also at most once a
    minute, unless its outage was logged. Used from any thread."""

    def __init__(self, log: logging.Logger, failure: str, recovery: str, *, level: int = logging.WARNING) -> None:
        """`level` is that of a failure."""
        self._lines, self._failure, self._recovery, self._level = PeerLog(log), failure, recovery, level
        self._logged: OrderedDict[str, None] = OrderedDict()  # peers with a failure that was logged, without recovery
        self._lock = threading.Lock()

    def failed(self, peer: str = "", **extra: object) -> None:
        """For each failure, also while the peer is known to fail: a long outage is then logged every minute."""
        if not self._lines.write(self._level, self._failure, peer, extra):
            return
        with self._lock:
            self._logged[peer] = None
            if len(self._logged) > MAX_PEERS:
                self._logged.popitem(last=False)

    def recovered(self, peer: str = "", **extra: object) -> None:
        """Also for the first answer of a peer. After a failure that was logged, the line has that failure's level:
        whoever saw the one must see the other."""
        with self._lock:
            is_needed = peer in self._logged
            self._logged.pop(peer, None)
        self._lines.write(self._level if is_needed else logging.INFO, self._recovery, peer, extra, is_needed=is_needed)

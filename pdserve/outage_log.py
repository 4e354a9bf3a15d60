"""Log lines about peers that fail: at most one a minute for each message and peer, with a count of all.

A peer may fail as often as it likes: a worker that registers and disappears ten times a second, a Redis that is full.
Peers can also have new names each time, so there is a limit on all of them together (pdserve/core/log_limit.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import Final, final

from pdserve.core.log_limit import MAX_PEERS, LogLimits

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
        with self._lock:
            limits = self._limits.setdefault(message, LogLimits(EVERY_S))
            times = limits.due(peer, time.monotonic())
        if times:
            extra = extra if times == 1 else {**extra, "times": times}
            self._log.log(level, message, exc_info=exc_info, extra=extra)
        return bool(times)

    def warning(self, message: str, peer: str = "", **extra: object) -> bool:
        return self.line(logging.WARNING, message, peer, exc_info=None, **extra)


@final
class OutageLog:
    """Logs that a peer fails, at most once a minute however often it fails, and that it is back: also at most once a
    minute, unless its outage was logged. Used from any thread."""

    def __init__(self, log: logging.Logger, failure: str, recovery: str, *, level: int = logging.WARNING) -> None:
        """`level` is that of a failure."""
        self._log, self._failure, self._recovery, self._level = log, failure, recovery, level
        self._failures, self._arrivals = LogLimits(EVERY_S), LogLimits(EVERY_S)
        self._logged: OrderedDict[str, None] = OrderedDict()  # peers with a failure that was logged, without recovery
        self._lock = threading.Lock()

    def failed(self, peer: str = "", **extra: object) -> None:
        """For each failure, also while the peer is known to fail: a long outage is then logged every minute."""
        with self._lock:
            failures = self._failures.due(peer, time.monotonic())
            if failures:
                self._logged[peer] = None
                if len(self._logged) > MAX_PEERS:
                    self._logged.popitem(last=False)
        if failures:
            self._log.log(self._level, self._failure, extra={**extra, "failures": failures})

    def recovered(self, peer: str = "", **extra: object) -> None:
        """Also for the first answer of a peer."""
        with self._lock:
            is_due = self._arrivals.due(peer, time.monotonic()) > 0
            is_due |= peer in self._logged
            self._logged.pop(peer, None)
        if is_due:
            self._log.info(self._recovery, extra=extra)

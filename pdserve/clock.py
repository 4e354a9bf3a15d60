"""A clock that never goes back, so that no duration is negative."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def steady(clock: Callable[[], float]) -> Callable[[], float]:
    """`clock`, made monotonic: if it goes back, the result continues from its last time. Any thread may call it.
    `time.monotonic` is returned unchanged, because the system guarantees this."""
    if clock is time.monotonic or isinstance(clock, _Steady):
        return clock
    return _Steady(clock)


class _Steady:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lag_s = 0.0  # all that the clock has gone back
        self._last_s = clock()

    def __call__(self) -> float:
        with self._lock:
            now_s = self._clock() + self._lag_s
            if now_s < self._last_s:
                self._lag_s += self._last_s - now_s
                now_s = self._last_s
            self._last_s = now_s
            return now_s

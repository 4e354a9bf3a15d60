"""A clock that never goes back, so that no duration is negative and no wait lasts for as long as the clock has gone
back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def steady(clock: Callable[[], float]) -> Callable[[], float]:
    """Of a clock that may go back: then it continues from its last time. Any thread may call it. The system promises
    this of `time.monotonic`, which is returned as it is."""
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

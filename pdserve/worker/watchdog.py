"""Ends a process whose engine thread is busy but makes no progress: a hung worker is worse than a restarted one."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, final

from pdserve.core.durations import clamped_s

log = logging.getLogger(__name__)

STALL_EXIT_CODE: Final = 70
SHORTEST_LOOK_S: Final = 0.001
LONGEST_LOOK_S: Final = 1.0


class EngineProgress(Protocol):
    @property
    def is_busy(self) -> bool:
        """Whether the thread should make progress; False while it waits for work."""
        ...

    @property
    def beats(self) -> int:
        """Grows with each piece of work."""
        ...


@final
@dataclass(slots=True, kw_only=True)
class StallRule:
    """Decides from samples of a thread's progress whether it hangs. Pure."""

    stall_s: float
    _beats: int = -1
    _moved_at_s: float = 0.0

    def look(self, *, is_busy: bool, beats: int, now_s: float) -> bool:
        """True if the thread was busy with the same beat for `stall_s`."""
        if not is_busy or beats != self._beats:
            self._beats, self._moved_at_s = beats, now_s
            return False
        return now_s - self._moved_at_s >= self.stall_s


def dump_and_exit() -> None:
    """Writes the stacks of all threads to stderr, then ends the process: a hung thread cannot be stopped."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(STALL_EXIT_CODE)


@final
class Watchdog:
    """A thread that observes the engine thread; `on_stall` is called once."""

    def __init__(self, progress: EngineProgress, stall_s: float, on_stall: Callable[[], None] = dump_and_exit) -> None:
        self._progress = progress
        self._rule = StallRule(stall_s=stall_s)
        self.stall_s = stall_s
        self._on_stall = on_stall
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def stall_s(self) -> float:
        return self._rule.stall_s

    @stall_s.setter
    def stall_s(self, stall_s: float) -> None:
        self._rule.stall_s = stall_s
        self._interval_s = clamped_s(stall_s / 10, SHORTEST_LOOK_S, LONGEST_LOOK_S)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            progress = self._progress
            if self._rule.look(is_busy=progress.is_busy, beats=progress.beats, now_s=time.monotonic()):
                log.critical("the engine thread hangs", extra={"stall_s": self._rule.stall_s})
                self._on_stall()
                return

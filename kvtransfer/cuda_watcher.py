"""Copies in progress on a CUDA device, and the thread that wakes their waiters."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, final

from kvtransfer.device import Wake
from pdserve.core.errors import TransferFailed

log = logging.getLogger(__name__)

_SHORTEST_POLL_S: Final = 50e-6
_LONGEST_POLL_S: Final = 1e-3
_POLL_SHARE: Final = 0.1  # of the time for which the newest copy has waited


@final
class CudaCopying:
    def __init__(self, event: Any, sums: Any | None, limit_s: float, stream: int | None = None) -> None:
        """`stream`: the number of the device's copy stream that it is queued on."""
        self._event, self._sums, self.stream = event, sums, stream
        self.began_s = time.monotonic()
        self._limit_s, self._ends_s = limit_s, self.began_s + limit_s

    @property
    def is_done(self) -> bool:
        try:
            if self._event.query():
                return True
        except RuntimeError as error:
            raise TransferFailed(f"the device failed: {error}") from error
        if time.monotonic() > self._ends_s:
            raise TransferFailed(f"work on the device has not ended in {self._limit_s:.0f} s")
        return False

    def digest(self) -> bytes:
        assert self._sums is not None
        return hashlib.blake2b(self._sums.numpy().tobytes(), digest_size=8).digest()


def poll_s(waited_s: float) -> float:
    """The time until the events are polled again, if the newest one has waited for `waited_s`.

    Each poll takes the GIL from the engine's thread. A wait takes some 20 polls in its first 0.5 ms, 30 more up to 10
    ms, and 1,000 per second after that. Its end is detected late by at most a tenth of its length.
    """
    return min(max(_POLL_SHARE * waited_s, _SHORTEST_POLL_S), _LONGEST_POLL_S)


@final
class Watcher:
    """A thread that wakes the waiters of copies when these end. It sleeps while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[CudaCopying, Wake]] = []
        threading.Thread(target=self._run, name="cuda-watch", daemon=True).start()

    def add(self, copying: CudaCopying, wake: Wake) -> None:
        with self._changed:
            self._waiting.append((copying, wake))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                waiting = list(self._waiting)
            ended = [one for one in waiting if _has_ended(one[0])]
            with self._changed:
                self._waiting = [one for one in self._waiting if one not in ended]
            for _, wake in ended:
                wake()
            if not ended:
                self._pause(waiting)

    def _pause(self, waiting: Sequence[tuple[CudaCopying, Wake]]) -> None:
        """Waits until the next poll, or until another copy is added."""
        newest_s = max(one.began_s for one, _ in waiting)
        with self._changed:
            if len(self._waiting) == len(waiting):
                self._changed.wait(poll_s(time.monotonic() - newest_s))


def _has_ended(copying: CudaCopying) -> bool:
    try:
        return copying.is_done
    except TransferFailed:  # the woken waiter polls again, and gets the error
        return True


def has_passed(event: Any, limit_s: float) -> bool:
    """Waits until the event has passed. False: timed out."""
    ends_s = time.monotonic() + limit_s
    while True:
        try:
            if event.query():
                return True
        except RuntimeError as error:  # a failed device runs no more work
            log.error("the device failed", extra={"error": str(error)})
            return True
        if time.monotonic() > ends_s:
            return False
        time.sleep(_LONGEST_POLL_S)

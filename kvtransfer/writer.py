"""Writes one thread's frames to its connection: small frames first, then at most one long frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import final

from kvtransfer.channel import Channel
from kvtransfer.memory import advance


class WriteProgress(Enum):
    IDLE = "idle"  # nothing to write
    BLOCKED = "blocked"  # the socket is full
    BUSY = "busy"  # more can be written immediately


@final
class Writer:
    def __init__(self) -> None:
        self._small: deque[bytes] = deque()
        self._long: list[memoryview] = []  # the long frame; it waits for the frame that is being written
        self._current: list[memoryview] = []
        self._on_written: Callable[[], None] | None = None  # of the long frame, until it is written

    @property
    def is_idle(self) -> bool:
        return not self._small and not self._current and not self._long

    @property
    def is_streaming(self) -> bool:
        """Whether the long frame's memory is still being read."""
        return self._on_written is not None

    def write(self, frame: bytes) -> None:
        self._small.append(frame)

    def stream(self, frame: Sequence[memoryview], on_written: Callable[[], None]) -> None:
        """Writes a long frame directly from memory, which must not change until `on_written` is called."""
        assert self._on_written is None, "a long frame is being written already"
        self._long, self._on_written = list(frame), on_written

    def detach(self) -> None:
        """Writes the rest of the long frame from a copy, so that its memory is free immediately."""
        if self._long:
            self._long = [memoryview(b"".join(self._long))]
        else:
            self._current = [memoryview(b"".join(self._current))]
        self._finish()

    def clear(self) -> None:
        """Stops writing, without any callback."""
        self._small.clear()
        self._long, self._current, self._on_written = [], [], None

    def advance(self, channel: Channel) -> WriteProgress:
        """Makes one system call."""
        if not self._current:
            if self._small:
                self._current = [memoryview(b"".join(self._small))]
                self._small.clear()
            elif self._long:
                self._current, self._long = self._long, []
            else:
                return WriteProgress.IDLE
        is_long = self._on_written is not None and not self._long
        sent = channel.send(self._current)
        if sent == 0:
            return WriteProgress.BLOCKED
        advance(self._current, sent)
        if is_long and not self._current:
            self._finish()
        return WriteProgress.BUSY

    def _finish(self) -> None:
        on_written, self._on_written = self._on_written, None
        assert on_written is not None
        on_written()

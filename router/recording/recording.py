"""Writes a live router's events and commands, or the decisions about the number of workers, to a file that
router.recording.replay reads.

A recording contains counts, hashes, settings, worker messages and output tokens, but no prompts. It stops at its size
limit, or if the disk is full. The router continues to serve, and the recording can be replayed up to that point.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO, final

from pdserve.bounded_file import open_private
from pdserve.core.errors import ConfigError
from router.recording import replay
from router.scaling.interface import Decision, Observed, ScalingSettings
from router.state.interface import Command, Event, RouterSettings

log = logging.getLogger(__name__)

FLUSH_EVERY: Final = 256  # steps
OLD_SUFFIX: Final = ".old"


class LineFile:
    """Lines of a recording, up to `max_bytes`."""

    flush_every = FLUSH_EVERY

    def __init__(self, path: str, first: str, max_bytes: int) -> None:
        """Raises ConfigError if the file cannot be written. An older recording of that name is kept with OLD_SUFFIX,
        because it may be the recording of a crash."""
        self._path = Path(path)
        try:
            if self._path.is_file() and not self._path.is_symlink():
                self._path.replace(self._path.with_name(self._path.name + OLD_SUFFIX))
            # The file contains callers' answers as tokens, so other users of this host may not read it.
            self._file: TextIO = os.fdopen(open_private(self._path), "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("record", path, f"a file that can be written ({error.strerror})") from error
        self._bytes_left = max_bytes
        self.is_over = False
        self._unflushed = 0
        self._write(first)

    def add(self, line: str) -> None:
        self._write(line)
        self._unflushed += 1
        if self._unflushed >= self.flush_every:
            self._unflushed = 0
            self._attempt(self._file.flush)

    def close(self) -> None:
        """Later steps are not recorded: a router that has ended may be told again to end. Idempotent."""
        self.is_over = True
        with contextlib.suppress(OSError):  # the failed write was reported
            self._file.close()

    def _write(self, line: str) -> None:
        """Writes ASCII only (JSON escapes all other characters), so the number of characters is the number of bytes."""
        self._bytes_left -= len(line) + 1
        if self._bytes_left < 0:
            self._stop("its size limit is reached")
        else:
            self._attempt(lambda: self._file.write(line + "\n"))

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._stop(error.strerror or "the disk failed")

    def _stop(self, why: str) -> None:
        log.warning("the recording ends here", extra={"file": str(self._path), "why": why})
        self.close()


@final
class RecordFile(LineFile):
    """Of a router."""

    def __init__(self, path: str, settings: RouterSettings, max_bytes: int) -> None:
        super().__init__(path, replay.encode_settings(settings), max_bytes)

    def step(self, now_s: float, event: Event, commands: list[Command]) -> None:
        if not self.is_over:
            self.add(replay.encode_step(replay.make_step(now_s, event, commands)))


@final
class ScalingRecord(LineFile):
    """Of the controller of the number of workers."""

    flush_every = 1  # a few lines a minute

    def __init__(self, path: str, settings: ScalingSettings, max_bytes: int) -> None:
        super().__init__(path, replay.encode_scaling_settings(settings), max_bytes)

    def step(self, now_s: float, observed: Observed, decision: Decision) -> None:
        if not self.is_over:
            step = replay.ScalingStep(now_s=now_s, observed=observed, decision=decision)
            self.add(replay.encode_scaling_step(step))

"""Draws progress on stderr: a bar on a terminal, and a line every few seconds in a log.

It draws when progress is reported, so it needs no thread, which an error could leave running. It moves the cursor only
to the start of its own line, and uses no colours. Nothing is drawn in the first second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Final, Self, TextIO, final

from pdserve.core.errors import ConfigError
from pdserve.core.progress import PROGRESS_ENV, PhaseProgress, Progress, bar_line, log_text, phase_line

PATIENCE_S: Final = 1.0  # shorter tasks show nothing on a terminal
BAR_EVERY_S: Final = 0.1
LINE_EVERY_S: Final = 5.0
WORDS_EVERY_S: Final = 0.25  # between two reports to the launcher
_COLUMNS: Final = 80  # of a terminal that does not report its width

Clock = Callable[[], float]


def is_on_terminal() -> bool:
    """Whether the end of a terminal, which sends SIGHUP, must end this process."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def require_terminal(otherwise: str) -> None:
    """Raises ConfigError if standard output is not a terminal. `otherwise` names what a program would call instead."""
    if not sys.stdout.isatty():
        raise ConfigError("stdout", "no terminal", f"a terminal; {otherwise}")


def first_s(*, is_terminal: bool) -> float:
    """Seconds until a task shows anything."""
    return PATIENCE_S if is_terminal else LINE_EVERY_S


@final
class StatusLine:
    """One line at the end of a terminal's output, which other output must clear first."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._is_drawn = False

    @property
    def columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS

    def draw(self, text: str) -> None:
        self._write(f"\r{text}\x1b[K")
        self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            self._write("\r\x1b[K")
            self._is_drawn = False

    def line(self, text: str) -> None:
        self.clear()
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not end the task
            self._stream.write(text)
            self._stream.flush()


@final
class ProgressLine:
    """The progress of one task after the other. Ends with its `with` block, or with `close`."""

    def __init__(
        self, label: str, total: float | None = None, *, stream: TextIO | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._line, self._clock = StatusLine(stream), clock
        self._patient_s = self._next_s = clock() + first_s(is_terminal=self._line.is_terminal)
        self.begin(label, total)

    def begin(self, label: str, total: float | None = None) -> None:
        """Goes on with another task. A terminal shows it at once; in a log, many short ones share a line."""
        self._label = label
        self._progress = Progress(total, self._clock())
        if self._line.is_terminal:
            self._next_s = self._patient_s

    def expect(self, total: float) -> None:
        """The total of the present task, which became known after it began."""
        self._progress.total = total

    def update(self, done: float, detail: str = "") -> None:
        now_s = self._clock()
        self._progress.update(done, now_s)
        if now_s < self._next_s:
            return
        share, time_text = self._progress.share, self._progress.time_text(now_s)
        if self._line.is_terminal:
            self._next_s = now_s + BAR_EVERY_S
            self._line.draw(bar_line(self._label, share, time_text, detail, self._line.columns))
        else:
            self._next_s = now_s + LINE_EVERY_S
            self._line.line(log_text(self._label, share, time_text, detail))

    def update_bytes(self, num_bytes: float) -> None:
        """Of a task whose total is in bytes."""
        self.update(num_bytes, f"{num_bytes / 1e6:.1f} MB")

    def close(self) -> None:
        self._line.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@final
class PhaseReport:
    """Tells of one phase of a worker's start: to the listener, to the launcher in lines of stderr, otherwise to whoever
    reads stderr."""

    listener: ClassVar[Callable[[PhaseProgress], None] | None] = None  # of this process, where stderr is not read

    def __init__(self, worker_id: str, phase: str, unit: str, *, clock: Clock = time.monotonic) -> None:
        self._phase, self._unit, self._clock = phase, unit, clock
        self._began_s, self._told_s = clock(), -WORDS_EVERY_S
        is_for_launcher = os.environ.get(PROGRESS_ENV) == "1"
        self._line = None if is_for_launcher else ProgressLine(f"{worker_id} {phase}", clock=clock)

    def __call__(self, done: int, total: int) -> None:
        now_s = self._clock()
        one = PhaseProgress(
            phase=self._phase, done=done, total=total, unit=self._unit, seconds=max(now_s - self._began_s, 0.0)
        )
        if PhaseReport.listener is not None:
            PhaseReport.listener(one)
        elif self._line is not None:
            self._line.expect(total)
            self._line.update(done, one.detail)
            if one.is_over:
                self._line.close()
        elif one.is_over or now_s - self._told_s >= WORDS_EVERY_S:
            self._told_s = now_s
            with contextlib.suppress(OSError):
                sys.stderr.write(phase_line(one) + "\n")
                sys.stderr.flush()

"""A progress line on a terminal for long loads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO, final

_PATIENCE_S: Final = 1.0  # shorter loads show no line
_BETWEEN_S: Final = 0.1
_WIDTH: Final = 24


Describe = Callable[[int, int, float], str]  # done, in all, seconds


def _gigabytes(done: int, total: int, seconds: float) -> str:
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / max(seconds, 1e-9) / 1e9:.2f} GB/s"


@final
class LoadingLine:
    """Called with the amount done and the total; in bytes unless `describe` is given."""

    def __init__(
        self, label: str, stream: TextIO, clock: Callable[[], float] = time.monotonic, describe: Describe | None = None
    ) -> None:
        self._label = label
        self._describe = describe or _gigabytes
        self._stream = stream
        self._clock = clock
        self._began_s = clock()
        self._shown_s = self._began_s + _PATIENCE_S - _BETWEEN_S
        self._is_shown = False

    def __call__(self, done: int, total: int) -> None:
        now_s = self._clock()
        is_last = done >= total
        if not (is_last and self._is_shown) and now_s - self._shown_s < _BETWEEN_S:
            return
        self._shown_s, self._is_shown = now_s, True
        bar = "#" * (_WIDTH * done // max(total, 1))
        text = f"\r{self._label} [{bar:<{_WIDTH}}] {self._describe(done, total, now_s - self._began_s)}"
        self._stream.write(text + ("\n" if is_last else ""))
        self._stream.flush()


def loading_line(label: str) -> LoadingLine | None:
    """None if there is no terminal."""
    return LoadingLine(label, sys.stderr) if sys.stderr.isatty() else None


def counting_line(label: str, what: str) -> Callable[[int, int], None]:
    """For counts; shows nothing if there is no terminal."""
    if not sys.stderr.isatty():
        return lambda done, total: None
    return LoadingLine(f"{label} {what}", sys.stderr, describe=lambda done, total, _: f"{done} of {total}")

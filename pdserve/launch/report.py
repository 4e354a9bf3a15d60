"""What `up` tells: progress and the processes' own lines on stderr, one `ready` line on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO, final

_WIDTH: Final = 10


@final
class Report:
    """Writes whole lines, so that those of several processes do not mix. Used from one thread."""

    def __init__(self, log_dir: Path | None = None, *, is_quiet: bool = False) -> None:
        self._began_s = time.monotonic()
        self._log_dir = log_dir
        self._is_quiet = is_quiet
        self._files: dict[str, TextIO] = {}
        self._phases: list[tuple[str, float]] = []
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)

    def say(self, name: str, text: str) -> None:
        """The launcher's own word about `name`."""
        if not self._is_quiet:
            _err(f"{self.elapsed_s:7.2f} s  {name:<{_WIDTH}} {text}")

    def relay(self, name: str) -> Callable[[str], None]:
        """Takes the lines of process `name`: into its file where there is a folder for them, else to stderr."""
        if self._log_dir is None:
            return lambda line: _err(f"{name:<{_WIDTH}} | {line}")
        if name not in self._files:
            self._files[name] = (self._log_dir / f"{name}.log").open("a", buffering=1, encoding="utf-8")
        file = self._files[name]

        def write(line: str) -> None:
            if not file.closed:
                file.write(line + "\n")

        return write

    def phase(self, name: str, took_s: float) -> None:
        self._phases.append((name, took_s))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def table(self) -> None:
        """Where the start's time went; workers load side by side, so the rows may sum to more than the total."""
        if self._is_quiet:
            return
        longest_s = max((took_s for _, took_s in self._phases), default=0.0) or 1.0
        lines = [f"start took {self.elapsed_s:.1f} s:"]
        for name, took_s in self._phases:
            lines.append(f"  {name:<14} {took_s:6.2f} s  {'█' * max(1, round(24 * took_s / longest_s))}")
        _err("\n".join(lines))

    def ready(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _err(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()

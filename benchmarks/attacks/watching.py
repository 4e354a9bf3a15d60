"""Watches the attacked cluster's memory and the lines of its log during a row."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self, final

from benchmarks.attacks.row import AttackTarget

SAMPLE_S: Final = 0.05


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


@final
class MemoryPeak:
    """Measures the memory of one process within the `with` block; `rise` is in bytes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self.before = self.peak = resident_bytes(pid)

    @property
    def rise(self) -> int:
        return self.peak - self.before

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.peak = max(self.peak, resident_bytes(self._pid))


@final
class LogWatch:
    """Counts tracebacks that the cluster has logged since this was made."""

    def __init__(self, target: AttackTarget) -> None:
        self._lines = target.cluster.lines
        self._start = len(self._lines)

    def num_tracebacks(self) -> int:
        return sum("Traceback (most recent call last)" in line for line in self._lines[self._start :])

    def complaints(self) -> tuple[str, ...]:
        count = self.num_tracebacks()
        return (f"{count} tracebacks were logged",) if count else ()

"""Shows the progress of `pdserve bench` on stderr."""

from __future__ import annotations

import time
from typing import final

from pdserve.progress import ProgressLine
from simulator.bench.answer import BenchAnswer, BenchOutcome
from simulator.bench.load import LoadLevel
from simulator.bench.session import BenchObserver


@final
class BenchProgress(BenchObserver):
    """`total`: requests of a turn; None if only `duration_s` bounds it."""

    def __init__(self, line: ProgressLine, *, total: int | None, duration_s: float | None) -> None:
        self._line, self._total, self._duration_s = line, total, duration_s
        self._begin_s = 0.0
        self._ended = self._failed = self._rejected = 0

    def turn_begins(self, server: str, level: LoadLevel, turn: int, turns: int) -> None:
        label = f"{server} {level.label}" + (f", turn {turn + 1} of {turns}" if turns > 1 else "")
        self._line.begin(label, 1.0 if self._total or self._duration_s else None)
        self._begin_s = time.monotonic()
        self._ended = self._failed = self._rejected = 0

    def answered(self, answer: BenchAnswer) -> None:
        self._ended += 1
        self._failed += answer.outcome is BenchOutcome.FAILED
        self._rejected += answer.outcome is BenchOutcome.REJECTED
        by_count = self._ended / self._total if self._total else 0.0
        by_time = (time.monotonic() - self._begin_s) / self._duration_s if self._duration_s else 0.0
        self._line.update(min(max(by_count, by_time), 1.0), self._detail())

    def turn_ends(self) -> None:
        self._line.close()

    def _detail(self) -> str:
        of = f" of {self._total}" if self._total else ""
        counts = ((self._rejected, "rejected"), (self._failed, "failed"))
        return ", ".join([f"{self._ended}{of} ended", *(f"{number} {name}" for number, name in counts if number)])

"""The progress of `pdserve bench` on stderr: a bar on a terminal, and lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Final, final

from simulator.bench.answer import BenchAnswer, BenchOutcome
from simulator.bench.load import LoadLevel
from simulator.bench.session import BenchObserver

_BAR: Final = 30
_BAR_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 10.0


@final
class BenchProgress(BenchObserver):
    """`total`: requests of a turn; None if only `duration_s` bounds it."""

    def __init__(self, *, total: int | None, duration_s: float | None) -> None:
        self._total, self._duration_s = total, duration_s
        self._is_terminal = sys.stderr.isatty()
        self._label = ""
        self._begin_s = self._next_s = 0.0
        self._ended = self._failed = self._rejected = 0

    def turn_begins(self, server: str, level: LoadLevel, turn: int, turns: int) -> None:
        self._label = f"{server} {level.label}" + (f", turn {turn + 1} of {turns}" if turns > 1 else "")
        self._ended = self._failed = self._rejected = 0
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + (_BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S)

    def answered(self, answer: BenchAnswer) -> None:
        self._ended += 1
        self._failed += answer.outcome is BenchOutcome.FAILED
        self._rejected += answer.outcome is BenchOutcome.REJECTED
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S)
        text = self._text(now_s - self._begin_s)
        if self._is_terminal:
            full = round(_BAR * self._share(now_s - self._begin_s))
            print(f"\r\x1b[K[{'#' * full}{'.' * (_BAR - full)}] {text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def turn_ends(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _share(self, spent_s: float) -> float:
        by_count = self._ended / self._total if self._total else 0.0
        by_time = spent_s / self._duration_s if self._duration_s else 0.0
        return min(max(by_count, by_time), 1.0)

    def _text(self, spent_s: float) -> str:
        of = f" of {self._total}" if self._total else ""
        bad = [
            f"{number} {name}" for number, name in ((self._rejected, "rejected"), (self._failed, "failed")) if number
        ]
        return ", ".join([f"{self._label}: {self._ended}{of} ended", *bad, f"{spent_s:.0f} s"])

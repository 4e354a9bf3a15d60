"""The progress of a long task, its remaining time, and both as one line of text. Pure.

A worker reports its progress to the launcher in lines of a separate format, which this module also writes and parses.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Final, final

PROGRESS_ENV: Final = "PDSERVE_PROGRESS"  # set by the launcher: report progress as lines for it
MIN_COLUMNS: Final = 48  # for a bar; narrower lines show only the share
BAR: Final = 24
_EARLY: Final = 0.02  # share of the work below which the remaining time is not estimated
_EARLY_S: Final = 0.5
_MOST_NAME: Final = 40
_LEAST_GB: Final = 1e8  # bytes; less is shown in MB
_ROUNDING_S: Final = 1e-6
_LINE: Final = re.compile(r"progress (\{.{1,400}\})\Z")


@final
class Progress:
    """`total` is None if unknown. All times are by one clock. The amount done never decreases."""

    def __init__(self, total: float | None, began_s: float) -> None:
        self.total, self.began_s = total, began_s
        self.done = 0.0
        self._changed_s = began_s

    def update(self, done: float, now_s: float) -> None:
        if done > self.done:
            self.done, self._changed_s = done, now_s

    def spent_s(self, now_s: float) -> float:
        return now_s - self.began_s

    @property
    def share(self) -> float | None:
        if self.total is None or not self.total > 0.0:
            return None
        return min(self.done / self.total, 1.0)

    def remaining_s(self, now_s: float) -> float | None:
        """The remaining time at the mean rate so far; None if too little is done for an estimate."""
        share, spent_s = self.share, self._changed_s - self.began_s
        if share is None or share < _EARLY or spent_s < _EARLY_S:
            return None
        return max(spent_s * (1.0 / share - 1.0) - (now_s - self._changed_s), 0.0)

    def time_text(self, now_s: float) -> str:
        """The remaining time, or the time so far if the remaining time is unknown."""
        remaining_s = self.remaining_s(now_s)
        if remaining_s is not None:
            return f"{duration_text(remaining_s)} left"
        return f"{duration_text(self.spent_s(now_s))} so far"


def bar_line(label: str, share: float | None, time_text: str, detail: str, columns: int) -> str:
    """A line of at most `columns` - 1 characters, because a full line would wrap."""
    if share is None:
        words = [label, time_text, detail]
    elif columns < MIN_COLUMNS:
        words = [f"{share:4.0%}", time_text, label]
    else:
        full = round(BAR * share)
        words = [f"[{'#' * full}{'.' * (BAR - full)}]{share:5.0%}", label, time_text, detail]
    return _cut("  ".join(one for one in words if one), columns - 1)


def log_text(label: str, share: float | None, time_text: str, detail: str) -> str:
    """A line for a log, without a limit of its width."""
    known = "" if share is None else f"{share:.0%}"
    return f"{label}: " + ", ".join(one for one in (known, time_text, detail) if one)


def duration_text(seconds: float) -> str:
    whole = math.ceil(seconds - _ROUNDING_S)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _cut(text: str, columns: int) -> str:
    """Cuts a text to a width, without control characters, which would move the cursor."""
    plain = "".join(one if one.isprintable() else "?" for one in text)
    return plain if len(plain) <= columns else plain[: max(columns - 1, 0)] + "~"


# -- from a worker to the launcher -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProgress:
    """One phase of a worker's start, such as `weights`. `unit`: bytes, or what is counted. `seconds`: since the phase
    began, by the worker's clock."""

    phase: str
    done: float
    total: float
    unit: str
    seconds: float

    @property
    def is_over(self) -> bool:
        return self.done >= self.total

    @property
    def detail(self) -> str:
        if self.unit == "bytes" and self.total < _LEAST_GB:
            return f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB"
        if self.unit == "bytes":
            return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        if self.total == 1:  # the phase's name says enough
            return ""
        return f"{self.done:.0f} of {self.total:.0f}" + (f" {self.unit}" if self.unit != self.phase else "")


def phase_line(one: PhaseProgress) -> str:
    fields = {"phase": one.phase, "done": one.done, "total": one.total, "unit": one.unit}
    return "progress " + json.dumps({**fields, "seconds": round(one.seconds, 3)})


def phase_of(line: str) -> PhaseProgress | None:
    """The phase that the line reports; None for any other line."""
    found = _LINE.match(line)
    if found is None:
        return None
    try:
        fields = json.loads(found.group(1))
        one = PhaseProgress(**fields)
        numbers = [float(value) for value in (one.done, one.total, one.seconds)]
        is_valid = all(math.isfinite(value) and value >= 0.0 for value in numbers)
        is_named = all(isinstance(name, str) and len(name) <= _MOST_NAME for name in (one.phase, one.unit))
    except (ValueError, TypeError):
        return None
    return one if is_valid and is_named else None

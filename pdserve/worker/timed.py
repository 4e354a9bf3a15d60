"""Chooses the step times that a worker reports to routers for their cost models. Pure.

A step that prefills is reported individually. Decode steps are short and noisy, so steps with the same number of rows
are reported as their mean, which the linear cost model predicts like a single step. TPOT is a mean over steps, so each
step must have equal weight, and every mean is over the same number of steps. Means over equal times would give slow
steps too much weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from pdserve.core.effects import StepAccount

STEPS: Final = 8  # number of decode steps in one mean;
LONGEST_SPANS: Final = 4.0  # fewer if they take this many times `every_s`, because long steps vary little


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    context_tokens: int = 0
    seconds: float = 0.0


@final
class TimedSteps:
    """Reports at most one step time in `every_s`."""

    __slots__ = ("_every_s", "_reported_s", "_sums")

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._reported_s = float("-inf")
        self._sums: dict[int, _Sum] = {}  # rows -> their decode steps since the last mean

    def observe(self, account: StepAccount, step_s: float, now_s: float) -> tuple[StepAccount, float] | None:
        """The step, or the mean of similar ones, to be reported now."""
        every_s, is_due = self._every_s, now_s - self._reported_s >= self._every_s
        if account.prefill_tokens:
            if is_due:
                self._reported_s = now_s
            return (account, step_s) if is_due else None
        rows = account.decode_rows
        like = self._sums.setdefault(rows, _Sum())
        like.steps += 1
        like.context_tokens += account.context_tokens
        like.seconds += step_s
        if not is_due or (like.steps < STEPS and like.seconds < LONGEST_SPANS * every_s):
            return None
        self._reported_s = now_s
        del self._sums[rows]
        return replace(account, context_tokens=round(like.context_tokens / like.steps)), like.seconds / like.steps

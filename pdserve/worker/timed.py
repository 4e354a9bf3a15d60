"""Which of a worker's step times routers are told, for their cost models. Pure.

A step that reads a prompt is told as it is. Decode steps are short, many, and each is off by what else the machine did:
those of as many rows that follow each other are told as their mean, which the closed form, linear in them, foretells
as it does each of them. An answer takes the mean of its steps, not any one of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from pdserve.core.effects import StepAccount


@final
class TimedSteps:
    """One at most in `every_s`."""

    __slots__ = ("_context_tokens", "_every_s", "_rows", "_seconds", "_steps", "_told_s")

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_s = float("-inf")
        self._start(0)

    def took(self, account: StepAccount, step_s: float, now_s: float) -> tuple[StepAccount, float] | None:
        """The step, or the mean of those of late, to be told now."""
        rows = 0 if account.prefill_tokens else account.decode_rows
        if rows != self._rows:
            self._start(rows)
        self._steps += 1
        self._context_tokens += account.context_tokens
        self._seconds += step_s
        if now_s - self._told_s < self._every_s:
            return None
        self._told_s = now_s
        if not rows:
            self._start(0)
            return account, step_s
        steps, seconds, context_tokens = self._steps, self._seconds, self._context_tokens
        self._start(rows)
        return replace(account, context_tokens=round(context_tokens / steps)), seconds / steps

    def _start(self, rows: int) -> None:
        self._rows, self._steps = rows, 0
        self._context_tokens, self._seconds = 0, 0.0

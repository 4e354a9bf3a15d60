"""The time of many decode steps in a row, in closed form. Pure.

With rows r and context C at the first step, each step makes the context r longer, so step i (from 0) takes
    first + growth * i,    first = base + per_row * r + per_context_token * C,    growth = per_context_token * r
and k steps take  first * k + growth * k * (k - 1) / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    first_s: float
    growth_s: float

    def after(self, steps: int) -> float:
        """Seconds of the first `steps` steps."""
        return steps * (self.first_s + 0.5 * self.growth_s * (steps - 1))

    def steps_until(self, seconds: float) -> int:
        """The fewest steps, at least one, that last no less than `seconds`."""
        if seconds <= self.first_s:
            return 1
        if self.growth_s <= 0.0:
            steps = int(seconds / self.first_s)
        else:
            half = 0.5 * self.growth_s
            linear = self.first_s - half
            steps = int((math.sqrt(linear * linear + 4.0 * half * seconds) - linear) / self.growth_s)
        steps = max(steps, 1)
        while self.after(steps) < seconds:  # the root is exact to rounding: one turn, or two
            steps += 1
        while steps > 1 and self.after(steps - 1) >= seconds:
            steps -= 1
        return steps

"""The true duration of a worker's steps, one by one or in a row: its cost model, its slowness, and its noise. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.cost.latency import CostModel
from pdserve.core.effects import StepAccount
from simulator.model import WorkerShape

# --- many steps in a row --------------------------------------------------------------------------------------
# Decode steps in closed form.
#
# With rows r and context C at the first step, each step makes the context r longer, so step i (from 0) takes
#
#     first + growth * i,    first = base + per_row * r + per_context_token * C,    growth = per_context_token * r
#
# and k steps take  first * k + growth * k * (k - 1) / 2.


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


# --- speed of a worker ----------------------------------------------------------------------------------------

LEAST_FACTOR: Final = 0.1  # minimum share of a step's time after noise


@final
class Speed:
    """Belongs to the machine, not to the process: a successor has the same."""

    def __init__(self, shape: WorkerShape, noise: float, rng: random.Random) -> None:
        self._truth = CostModel(shape.cost)  # never corrected
        self._slowness = shape.slowness
        self._noise = noise
        self._rng = rng
        self.factors: list[float] = []  # of active faults

    @property
    def slowness(self) -> float:
        return self._slowness * math.prod(self.factors)

    def step_s(self, account: StepAccount) -> float:
        return account.predicted_s(self._truth) * self.slowness

    def times(self, account: StepAccount) -> StepTimes:
        """For steps that only decode."""
        first_s = self._truth.decode_s(account.decode_rows, account.context_tokens)
        _, _, per_context_token = self._truth.decode_coefficients
        slowness = self.slowness
        return StepTimes(first_s * slowness, per_context_token * account.decode_rows * slowness)

    def jitter(self, steps: int = 1) -> float:
        """The factor for the time of this many steps, whose errors are independent."""
        if self._noise == 0.0:
            return 1.0
        return max(LEAST_FACTOR, 1.0 + self._noise * self._rng.gauss(0.0, 1.0) / math.sqrt(steps))

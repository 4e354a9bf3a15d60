"""The true duration of a worker's steps: its cost model, its slowness, and its noise. Pure."""

from __future__ import annotations

import math
import random
from typing import Final, final

from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel
from simulator.model import WorkerShape
from simulator.runs import StepTimes

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

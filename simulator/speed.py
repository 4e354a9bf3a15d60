"""How long a worker's steps truly take: its cost model, how slow it is, and noise of its own. Pure."""

from __future__ import annotations

import math
import random
from typing import Final, final

from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel
from simulator.model import WorkerShape
from simulator.runs import Pace

LEAST_FACTOR: Final = 0.1  # of a step's time that noise leaves at least


@final
class Speed:
    """Belongs to the machine, not to the process: a successor finds the same."""

    def __init__(self, shape: WorkerShape, noise: float, rng: random.Random) -> None:
        self._truth = CostModel(shape.cost)  # never corrected
        self._slowness = shape.slowness
        self._noise = noise
        self._rng = rng
        self.factors: list[float] = []  # of the disturbances that last

    @property
    def slowness(self) -> float:
        return self._slowness * math.prod(self.factors)

    def step_s(self, account: StepAccount) -> float:
        seconds = self._truth.step_s(
            account.decode_rows, account.context_tokens, account.prefill_tokens, account.prefill_token_context
        )
        return seconds * self.slowness

    def pace(self, account: StepAccount) -> Pace:
        """Of steps that only decode."""
        first_s = self._truth.decode_s(account.decode_rows, account.context_tokens)
        _, _, per_context_token = self._truth.decode_coefficients
        slowness = self.slowness
        return Pace(first_s * slowness, per_context_token * account.decode_rows * slowness)

    def jitter(self, steps: int = 1) -> float:
        """By which the time of so many steps is to be multiplied: their errors are independent."""
        if self._noise == 0.0:
            return 1.0
        return max(LEAST_FACTOR, 1.0 + self._noise * self._rng.gauss(0.0, 1.0) / math.sqrt(steps))

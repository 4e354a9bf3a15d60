"""Estimates the remaining time of a decode worker's current step from the end of the last reported one. Pure.

A worker reads messages between steps, so a message waits for the end of the running step. Live workers report tokens
after each step, and the ends of later steps are extrapolated from these reports. Times are by the router's clock: a
step ends when its report arrives.
"""

from __future__ import annotations

import math
from typing import Final, final

MAX_STEPS: Final = 2.0  # extrapolated steps; beyond that errors add up, and half a step is assumed


@final
class StepClock:
    __slots__ = ("_ended_s",)

    def __init__(self) -> None:
        self._ended_s = -math.inf

    def ended(self, now_s: float) -> None:
        """A step has ended, and the next one has begun."""
        self._ended_s = now_s

    def remaining_s(self, at_s: float, step_s: float) -> float:
        """Seconds from `at_s` to the end of the step that runs then, if each takes `step_s`."""
        since_s = at_s - self._ended_s
        return step_s - since_s % step_s if since_s < MAX_STEPS * step_s else 0.5 * step_s

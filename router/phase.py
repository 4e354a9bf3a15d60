"""Where in its step a decode worker is, by the end of the last one that it told of. Pure.

It reads its messages between steps: a message waits from when it is there until the step that runs ends. A live worker
tells tokens after each step, so ends can be counted on from there. Times are the router's: an end is when it
hears of it.
"""

from __future__ import annotations

import math
from typing import Final, final

MOST_STEPS: Final = (
    2.0  # since an end was told; later ones are off by a step's own error each, and half of one is foretold
)


@final
class Phase:
    __slots__ = ("_ended_s",)

    def __init__(self) -> None:
        self._ended_s = -math.inf

    def ended(self, now_s: float) -> None:
        """A step has, and the next one begins."""
        self._ended_s = now_s

    def rest_s(self, at_s: float, step_s: float) -> float:
        """From `at_s` to the end of the step that runs by then, where each takes `step_s`."""
        since_s = at_s - self._ended_s
        return step_s - since_s % step_s if since_s < MOST_STEPS * step_s else 0.5 * step_s

"""What messages take between router and workers, as is typical of late. Pure.

One message in ten is held up by far more than it takes, whatever the machine. A mean lets that one speak for the nine
others; predictions are made for each request, and most requests are among the nine.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final, final

REMEMBERED: Final = 31


@final
class Leg:
    """The median of the last ones; `typical_s` is kept, as it is asked for more often than it changes."""

    __slots__ = ("_seen", "typical_s")

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.typical_s = 0.0

    def took(self, seconds: float) -> None:
        """Negative where the prediction of what goes before it was too long."""
        self._seen.append(seconds)
        self.typical_s = max(median(self._seen), 0.0)

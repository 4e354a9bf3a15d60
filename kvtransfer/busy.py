"""How long a transfer kept its link busy, pauses apart. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class Busy:
    """Time in which at least one chunk was on its way.

    A pause no longer than the chunk before it is the sender's own work between two chunks; a longer one is a sender
    that waits for more KV to be computed, and does not count.
    """

    total_s: float = 0.0
    _num_open: int = 0
    _began_s: float = 0.0
    _ended_s: float | None = None
    _took_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if self._num_open == 0:
            if self._ended_s is not None and now_s - self._ended_s <= self._took_s:
                self.total_s += now_s - self._ended_s
            self._began_s = now_s
        self._num_open += 1

    def end(self, now_s: float) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._took_s = now_s - self._began_s
            self.total_s += self._took_s
            self._ended_s = now_s

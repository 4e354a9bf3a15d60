"""How long a transfer kept its link busy, without pauses. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class LinkBusyTime:
    """Time during which at least one chunk was being transferred.

    A pause that is no longer than the chunk before it counts: it is the sender's own work between two chunks. A longer
    pause does not count: the sender waits for more KV to be computed.
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

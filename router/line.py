"""Requests that are bound to one prefill worker and wait until it can start them. Pure.

The published baselines choose the prefill worker at arrival: what waits in its line is load of that worker long
before it is booked there. The sums are those of the moment of binding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Waiting(NamedTuple):
    uncached_tokens: int  # to be computed by the worker
    prefill_s: float  # predicted time of that


class Line:
    """First come, first served: iterates in the order in which requests joined."""

    __slots__ = ("_waiting", "prefill_s", "uncached_tokens")

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self.uncached_tokens = 0
        self.prefill_s = 0.0

    def join(self, request_id: str, uncached_tokens: int, prefill_s: float) -> None:
        assert request_id not in self._waiting, request_id
        self._waiting[request_id] = Waiting(uncached_tokens, prefill_s)
        self.uncached_tokens += uncached_tokens
        self.prefill_s += prefill_s

    def leave(self, request_id: str) -> bool:
        """False: it does not wait here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        self.uncached_tokens -= waiting.uncached_tokens
        # Rounding does not add up over a long life.
        self.prefill_s = max(self.prefill_s - waiting.prefill_s, 0.0) if self._waiting else 0.0
        return True

    def clear(self) -> list[str]:
        """The worker is gone. Returns who waited, in order."""
        waited = list(self._waiting)
        self._waiting.clear()
        self.uncached_tokens, self.prefill_s = 0, 0.0
        return waited

    def first(self) -> str | None:
        return next(iter(self._waiting), None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def check(self) -> None:
        """The sums add up."""
        assert self.uncached_tokens == sum(one.uncached_tokens for one in self._waiting.values()), "tokens in line"
        assert abs(self.prefill_s - sum(one.prefill_s for one in self._waiting.values())) < 1e-6, "seconds in line"

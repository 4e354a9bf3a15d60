"""Requests that are bound to one prefill worker and wait until it can start them. Pure.

The published baselines choose the prefill worker at arrival, so a request in a worker's queue counts as its load before
it is booked there. The sums are updated when a request is bound. These requests are not in the router's common queue,
so requests for a busy worker do not block others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

#: (0 if the client already has tokens, less priority, order of arrival)
Rank = tuple[int, int, int]


class Waiting(NamedTuple):
    rank: Rank
    uncached_tokens: int  # tokens that the worker must compute
    prefill_s: float  # predicted time for them


class WorkerQueue:
    """First come, first served within a priority class. Iteration has that order."""

    __slots__ = ("_order", "_waiting", "prefill_s", "uncached_tokens")

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._order: list[tuple[Rank, str]] = []  # sorted
        self.uncached_tokens = 0
        self.prefill_s = 0.0

    def join(self, request_id: str, uncached_tokens: int, prefill_s: float, rank: Rank) -> None:
        assert request_id not in self._waiting, request_id
        self._waiting[request_id] = Waiting(rank, uncached_tokens, prefill_s)
        insort(self._order, (rank, request_id))
        self.uncached_tokens += uncached_tokens
        self.prefill_s += prefill_s

    def leave(self, request_id: str) -> bool:
        """False: the request does not wait here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        del self._order[bisect_left(self._order, (waiting.rank, request_id))]
        self.uncached_tokens -= waiting.uncached_tokens
        # An empty queue has exact sums, so rounding errors do not accumulate.
        self.prefill_s = max(self.prefill_s - waiting.prefill_s, 0.0) if self._waiting else 0.0
        return True

    def first(self) -> tuple[Rank, str]:
        """The first request. The queue must not be empty."""
        return self._order[0]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return (request_id for _, request_id in self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def check(self) -> None:
        """Checks the sums."""
        waiting = self._waiting
        assert self._order == sorted((one.rank, name) for name, one in waiting.items()), "the queue is not in order"
        assert self.uncached_tokens == sum(one.uncached_tokens for one in waiting.values()), "queued tokens"
        assert abs(self.prefill_s - sum(one.prefill_s for one in waiting.values())) < 1e-6, "queued seconds"

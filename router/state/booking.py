"""The memory and work that attempts need on one worker, and the requests that wait for that worker alone. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, kw_only=True)
class Booking:
    """The memory and work of one attempt of one request on one worker.

    It begins with the decision, so that the next decision takes it into account. It ends when the worker reports
    Released or Refused, or is lost. If the attempt was never sent to the worker (`is_sent`), the booking ends with the
    attempt.
    """

    request_id: str
    attempt: int
    tokens: int  # tokens whose KV is, or will be, on this worker
    blocks: int
    prefill_tokens: int = 0  # still to be computed on this worker
    prefill_s: float = 0.0  # predicted time to compute them
    tpot_s: float | None = None  # TPOT target; None if the attempt has no row in a decode batch here
    itl_s: float | None = None  # ITL target, as in Slo
    prompt_tokens: int = 0  # the part of `tokens` that is prompt
    due_at_s: float = math.inf  # when its first token is due; infinite for an answer that was interrupted
    first_token_s: float | None = None  # when the client got the first token; None until the sequence decodes here
    is_sent: bool = False
    is_arriving: bool = True  # the worker has not begun to compute the request (decode: it is not in the batch yet)
    is_landing: bool = False  # the KV comes from a prefill worker and has not arrived yet
    is_cancelled: bool = False


@dataclass(slots=True)
class Totals:
    """Sums over a worker's bookings."""

    blocks: int = 0
    tokens: int = 0  # tokens of the bookings with a row
    rows: int = 0  # in the decode batch, now or later
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    prefills: int = 0
    arriving: int = 0
    landing_tokens: int = 0  # tokens of the bookings with `is_landing`

    def copy(self) -> Totals:
        """Like copy.copy, which takes ten times as long. Every report of a worker needs a copy."""
        return Totals(
            self.blocks,
            self.tokens,
            self.rows,
            self.prefill_tokens,
            self.prefill_s,
            self.prefills,
            self.arriving,
            self.landing_tokens,
        )

    def check(self, bookings: Collection[Booking]) -> None:
        rows = [one for one in bookings if one.tpot_s is not None]
        assert self.blocks == sum(one.blocks for one in bookings), "blocks"
        assert self.rows == len(rows), "rows"
        assert self.tokens == sum(one.tokens for one in rows), "tokens"
        assert self.prefill_tokens == sum(one.prefill_tokens for one in bookings), "prefill tokens"
        assert self.prefills == sum(one.prefill_tokens > 0 for one in bookings), "prefills"
        assert abs(self.prefill_s - sum(one.prefill_s for one in bookings)) < 1e-6, "prefill seconds"
        assert self.arriving == sum(one.is_arriving for one in bookings), "arriving"
        assert self.landing_tokens == sum(one.tokens for one in bookings if one.is_landing), "landing tokens"


# --- queue of one prefill worker ------------------------------------------------------------------------------
# Requests that are bound to the worker, and wait until it can start them.
#
# The published baselines choose the prefill worker at arrival, so a request in a worker's queue counts as its load
# before it is booked there. The sums are updated when a request is bound. These requests are not in the router's common
# queue, so requests for a busy worker do not block others.

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

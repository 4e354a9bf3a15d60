"""When work that waits will start: the workers' free time as a fluid. Pure.

Work is in prefill seconds of the fastest worker. A prefill worker is a source from when it is free, at its speed; so
is a decode worker, with what its residents' promises leave. The fluid is optimistic: whoever is late by it is late.
How much of it the router has come to use of late is measured (Pace), and so contains what no model here knows: decode
workers that are full, other routers, paths that the policy does not take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from router.view import WorkerView

PRIOR_REQUESTS: Final = 8.0  # mean requests' worth of full pace that a fresh measure starts with
MEMORY: Final = 0.98  # of what was measured, per request
REMEMBERED: Final = 256  # requests whose work tells what is asked for
SLOWEST: Final = 0.05  # pace below this is no pace


@final
class Capacity:
    """Of a moment; times count from it."""

    __slots__ = ("_openings", "_whole", "rate")

    def __init__(self, openings: Sequence[tuple[float, float]]) -> None:
        """`openings`: (seconds until it is free, prefill seconds per second from then on)."""
        self._openings = sorted(one for one in openings if one[1] > 0.0)
        self.rate = sum(rate for _, rate in self._openings)
        self._whole = sum(free_in_s * rate for free_in_s, rate in self._openings)

    def done_by(self, in_s: float) -> float:
        """Work that can be done within `in_s`."""
        openings = self._openings
        if openings and in_s >= openings[-1][0]:
            return self.rate * in_s - self._whole
        return sum(rate * (in_s - free_in_s) for free_in_s, rate in openings if in_s > free_in_s)

    def start_in_s(self, work_s: float) -> float:
        """When whatever waits behind `work_s` starts; infinite where nobody works."""
        rate = done_s = at_s = 0.0
        for free_in_s, more in self._openings:
            if rate > 0.0 and done_s + rate * (free_in_s - at_s) >= work_s:
                break
            done_s += rate * (free_in_s - at_s)
            at_s, rate = free_in_s, rate + more
        return at_s + (work_s - done_s) / rate if rate > 0.0 else math.inf


def capacity(
    prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float, pace: float, *, with_local: bool
) -> Capacity:
    """Of these workers, at `pace`. `with_local`: decode workers read prompts even where there are prefill workers."""
    rated = [(view.batch_s / view.hello.max_batch_tokens, view) for view in prefills]
    if with_local or not prefills:
        rated += [(view.load.batch_s / view.hello.max_batch_tokens, view) for view in decodes]
    if not rated:
        return Capacity(())
    fastest_s = min(seconds for seconds, _ in rated)
    return Capacity(
        [
            (max(view.free_at_s - now_s, view.closed_until_s - now_s, 0.0), pace * fastest_s / seconds)
            for seconds, view in rated
        ]
    )


@final
class Pace:
    """The share of the fluid that the router has come to use while requests waited; at most 1."""

    __slots__ = ("_is_contended", "_mean_s", "_offered_s", "_rate", "_since_s", "_used_s")

    def __init__(self) -> None:
        self._offered_s = self._used_s = self._mean_s = 0.0
        self._rate = 0.0
        self._since_s = 0.0
        self._is_contended = False

    @property
    def share(self) -> float:
        prior_s = PRIOR_REQUESTS * self._mean_s
        offered_s = self._offered_s + prior_s
        return min(max((self._used_s + prior_s) / offered_s, SLOWEST), 1.0) if offered_s > 0.0 else 1.0

    def offers(self, rate: float, now_s: float) -> None:
        """So much work per second could be done at the full pace, from now on."""
        self._pass(now_s)
        self._rate = rate

    def placed(self, prefill_s: float, now_s: float) -> None:
        self._pass(now_s)
        self._mean_s += 0.05 * (prefill_s - self._mean_s) if self._mean_s else prefill_s
        if self._is_contended:
            self._used_s = MEMORY * self._used_s + prefill_s
            self._offered_s *= MEMORY

    def contended(self, is_contended: bool, now_s: float) -> None:
        """Whether somebody waits, from now on."""
        self._pass(now_s)
        self._is_contended = is_contended

    def _pass(self, now_s: float) -> None:
        if self._is_contended:
            self._offered_s += self._rate * (now_s - self._since_s)
        self._since_s = now_s


@final
class Demand:
    """Work that comes and could be on time, of the last REMEMBERED requests."""

    __slots__ = ("_came", "_work_s")

    def __init__(self) -> None:
        self._came: deque[tuple[float, float]] = deque()  # (when, prefill seconds), in order
        self._work_s = 0.0  # sum of all but the first, which opens the span

    def arrived(self, prefill_s: float, now_s: float) -> None:
        came = self._came
        if came:
            self._work_s += prefill_s
        came.append((now_s, prefill_s))
        if len(came) > REMEMBERED:
            came.popleft()
            self._work_s = max(self._work_s - came[0][1], 0.0)

    def span_s(self, now_s: float) -> float:
        """What has not come since the last one counts."""
        return now_s - self._came[0][0] if self._came else 0.0

    def rate(self, now_s: float) -> float:
        """Prefill seconds per second."""
        span_s = self.span_s(now_s)
        return self._work_s / span_s if span_s > 0.0 else 0.0

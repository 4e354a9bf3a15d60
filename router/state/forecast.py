"""Predicts when waiting work will start, treating the workers' free time as divisible. Pure.

Work is measured in prefill seconds of the fastest worker. A prefill worker supplies capacity at its own speed, from the
time when it is free. A decode worker supplies the time that its requests' targets leave. This prediction is optimistic:
a request that it shows as late will be late in any case. Utilization measures which share of the predicted capacity the
router has used lately. That share includes effects outside the model: full decode workers, other routers, and paths
that the policy does not take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from router.state.view import WorkerView

PRIOR_REQUESTS: Final = 8.0  # prior at full utilization, in mean requests
MEMORY: Final = 0.99  # forgetting factor per request
SLOWEST: Final = 0.05  # lower limit of the utilization
FASTEST: Final = 4.0  # upper limit: short prompts share batches, so the weights are read once for all
HORIZON: Final = 2.0  # TTFT targets over which demand is measured; shorter peaks can wait
MIN_REQUESTS: Final = 256  # over which demand is measured
BINS: Final = 128  # time bins of the horizon; requests within one bin are aggregated
GAIN: Final = 0.05  # weight of each new target in the mean


@final
class Capacity:
    """The capacity at one moment; all times are relative to that moment."""

    __slots__ = ("_openings", "rate")

    def __init__(self, openings: Sequence[tuple[float, float]]) -> None:
        """`openings`: (seconds until it is free, prefill seconds per second from then on)."""
        self._openings = sorted(one for one in openings if one[1] > 0.0)
        self.rate = sum(rate for _, rate in self._openings)

    def start_in_s(self, work_s: float) -> float:
        """Seconds until a request behind `work_s` of other work starts; infinite without workers."""
        rate = done_s = at_s = 0.0
        for free_in_s, more in self._openings:
            if rate > 0.0 and done_s + rate * (free_in_s - at_s) >= work_s:
                break
            done_s += rate * (free_in_s - at_s)
            at_s, rate = free_in_s, rate + more
        return at_s + (work_s - done_s) / rate if rate > 0.0 else math.inf

    def done_in_s(self, start_s: float, own_s: float) -> float:
        """Seconds until a request ends that can start at `start_s` and takes `own_s` on the fastest worker.

        The work ahead is divisible, but a request runs on one worker: a slow free worker may finish it later than a
        fast busy one.
        """
        fastest = max((rate for _, rate in self._openings), default=0.0)
        best_s = math.inf
        for free_in_s, rate in self._openings:
            begin_s = max(start_s, free_in_s)
            if begin_s + own_s >= best_s:
                break
            best_s = min(best_s, begin_s + own_s * fastest / rate)
        return best_s


def capacity(
    prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float, share: float, *, with_local: bool
) -> Capacity:
    """The capacity of these workers, times `share`. With `with_local`, decode workers count even if there are prefill
    workers."""
    rated = [(view.batch_s / view.hello.max_batch_tokens, view) for view in prefills]
    if with_local or not prefills:
        rated += [(view.load.batch_s / view.hello.max_batch_tokens, view) for view in decodes]
    if not rated:
        return Capacity(())
    fastest_s = min(seconds for seconds, _ in rated)
    return Capacity(
        [
            (max(view.free_at_s - now_s, view.closed_until_s - now_s, 0.0), share * fastest_s / seconds)
            for seconds, view in rated
        ]
    )


@final
class Utilization:
    """The share of the predicted capacity that the router has used lately while requests waited.

    This is the observed drain rate of the queue over the predicted one. It is above 1 if a batch of several prompts
    takes less time than the prompts one by one.

    The error of single steps says little about this ratio: it is a mean over many requests, and its standard error
    follows from their variation.
    """

    __slots__ = (
        "_is_contended",
        "_mean_s",
        "_offered_s",
        "_open_s",
        "_prior",
        "_products",
        "_rate",
        "_since_s",
        "_used_s",
        "standstill_s",
    )

    def __init__(self) -> None:
        self.standstill_s = 0.0  # time since the last placement, while requests waited
        self._offered_s = self._used_s = self._mean_s = 0.0
        self._open_s = 0.0  # work offered since the last placement
        self._products = (0.0, 0.0, 0.0)  # sums of used^2, used * offered and offered^2, per request
        self._prior = PRIOR_REQUESTS  # prior at full utilization in mean requests, forgotten as requests are measured
        self._rate = 0.0
        self._since_s = 0.0
        self._is_contended = False

    @property
    def share(self) -> float:
        prior_s = self._prior * self._mean_s
        offered_s = self._offered_s + self._open_s + prior_s
        return min(max((self._used_s + prior_s) / offered_s, SLOWEST), FASTEST) if offered_s > 0.0 else 1.0

    @property
    def error(self) -> float:
        """Relative standard error of `share`; 1 before the first measurement."""
        prior_s = self._prior * self._mean_s
        used_s = self._used_s + prior_s
        if used_s <= 0.0:
            return 1.0
        share = self.share
        squared_used, mixed, squared_offered = self._products
        offered_s = self._open_s
        squares = squared_used - 2.0 * share * mixed + share * share * (squared_offered + offered_s * offered_s)
        return min(math.sqrt(max(squares, 0.0) + prior_s * prior_s) / used_s, 1.0)

    def offers(self, rate: float, now_s: float) -> None:
        """Sets the work per second at full utilization, from now on."""
        self._pass(now_s)
        self._rate = rate

    def placed(self, prefill_s: float, now_s: float) -> None:
        self._pass(now_s)
        self.standstill_s = 0.0
        self._mean_s += 0.05 * (prefill_s - self._mean_s) if self._mean_s else prefill_s
        if self._is_contended:
            offered_s, self._open_s = self._open_s, 0.0
            self._used_s = MEMORY * self._used_s + prefill_s
            self._offered_s = MEMORY * self._offered_s + offered_s
            self._prior *= MEMORY
            own = (prefill_s * prefill_s, prefill_s * offered_s, offered_s * offered_s)
            decay = MEMORY * MEMORY
            self._products = tuple(decay * old + new for old, new in zip(self._products, own, strict=True))  # type: ignore[assignment]

    def contended(self, is_contended: bool, now_s: float) -> None:
        """Sets whether requests wait, from now on."""
        self._pass(now_s)
        self._is_contended = is_contended

    def _pass(self, now_s: float) -> None:
        if self._is_contended:
            waited_s = now_s - self._since_s
            self.standstill_s += waited_s
            self._open_s += self._rate * waited_s
        self._since_s = now_s


@dataclass(slots=True)
class ArrivalBin:
    """Requests that arrived within one time bin."""

    at_s: float
    requests: int = 0
    work_s: float = 0.0
    squares: float = 0.0  # sum of the squares of their work


@final
class RecentDemand:
    """The arriving work that an unloaded cluster would serve on time.

    It is measured over the last HORIZON TTFT targets, and at least MIN_REQUESTS requests."""

    __slots__ = ("_bins", "_count", "_horizon_s", "_squares", "_work_s")

    def __init__(self) -> None:
        self._bins: deque[ArrivalBin] = deque()
        self._count, self._work_s, self._squares = 0, 0.0, 0.0
        self._horizon_s = 0.0  # HORIZON mean TTFT targets

    def arrived(self, prefill_s: float, target_s: float, now_s: float) -> None:
        horizon_s = HORIZON * target_s
        self._horizon_s += GAIN * (horizon_s - self._horizon_s) if self._bins else horizon_s
        self._add(1, prefill_s, prefill_s * prefill_s)
        bins = self._bins
        if not bins or now_s - bins[-1].at_s >= self._horizon_s / BINS:
            bins.append(ArrivalBin(now_s))
        last = bins[-1]
        last.requests += 1
        last.work_s += prefill_s
        last.squares += prefill_s * prefill_s
        while self._count - bins[0].requests >= MIN_REQUESTS and now_s - bins[0].at_s > self._horizon_s:
            gone = bins.popleft()
            self._add(-gone.requests, -gone.work_s, -gone.squares)

    def rate(self, now_s: float) -> float:
        """Prefill seconds per second. The first bin marks the start of the span, and its work is not included."""
        if not self._bins:
            return 0.0
        first = self._bins[0]
        span_s = now_s - first.at_s
        if span_s < self._horizon_s:  # a burst is not lasting demand
            return self._work_s / self._horizon_s if self._horizon_s > 0.0 else 0.0
        return max(self._work_s - first.work_s, 0.0) / span_s

    @property
    def mean_s(self) -> float:
        """Mean prefill seconds of a request."""
        return self._work_s / self._count if self._count else 0.0

    @property
    def error(self) -> float:
        """Relative standard error of the rate, for independent arrivals; 1 for a single request."""
        return min(math.sqrt(max(self._squares, 0.0)) / self._work_s, 1.0) if self._work_s > 0.0 else 1.0

    def _add(self, count: int, work_s: float, squares: float) -> None:
        self._count += count
        self._work_s = max(self._work_s + work_s, 0.0)
        self._squares = max(self._squares + squares, 0.0)

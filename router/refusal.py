"""Admission control: decides whether a waiting request may continue to wait. Pure.

A request is rejected only if serving it would cost others: if demand is over BUSY_SHARE of the capacity, and over what
the other workers can do while one serves it. Otherwise a hopeless request is served late, behind those that can meet
their target. What it leaves in the prefix caches serves the next turn of its session.

forecast.py predicts when a request starts, from what is ahead of it in the order of queue.py:

    start(r) = when the capacity has done what is ahead of r, at the observed drain rate
    ttft(r)  = waited + its prefill on the worker that ends it first, which begins at start(r) or when it is free

While decode workers are full, nothing starts. This standstill is expected to last as long again as it has lasted so
far.

Errors of the prediction: the errors of single prefills are independent, so the relative error of their sum falls with
the number of requests ahead. The error of the drain rate is common to all. It is the standard error of the observed
drain rate or, before a queue was observed, the relative error of the cost model, if it has enough samples. The drain
also varies around its mean, especially if decode workers are full and nothing starts until answers end
(forecast.DrainError).

    error(start) = start * hypot(error of the drain rate, variation of the drain over one target TTFT,
                                 error of one prefill / sqrt(requests ahead + 1))
    error(ttft)  = hypot(error(start), error of one prefill * own prefill)

If demand is certainly above capacity, some requests must be rejected, as early as possible. A request is rejected if
its predicted TTFT plus one standard error misses the target or, while others wait, if ROOM times its prefill plus one
standard error does not fit. A met target counts the same for every prompt, so the longest requests are given up. The
longest admitted request becomes shorter as the queue grows, so the queue settles below the target, and prediction
errors make no request late. If demand is certainly below capacity, the queue will shrink again, and a request is
rejected only if it misses its target even if the prediction is SIGMAS standard errors too long. In between, the margin
decreases as overload becomes more likely, and a long request must leave a standard error to spare.

A new request is also rejected if others wait and it is expected to displace more than one of them (_displaced): serving
it would meet one target and miss several.

A rejection is most useful at arrival. A request that was admitted and has become late is rejected only if demand is
certainly above capacity, if it is long, or if the late requests before it take longer than its TTFT target. Otherwise
it is served late.

A request that makes an earlier one miss its target is rejected too: r harms q, which is behind it in its level, if q
starts in time without r and not with it. Only requests of its own level count: a higher class is not rejected because
of a lower one. This takes one pass over the waiting requests. Before a new request of a less served tenant, other
tenants count only with the work that they may have before they yield (shares.py); a request that must yield to it is
not harmed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from pdserve.core.durations import clamped_s
from router.cluster_state import ClusterState
from router.commands import FailKind
from router.ending import turn_away
from router.forecast import HORIZON, Capacity, capacity
from router.policy.interface import Decision, Obstacle, UnloadedEstimate
from router.policy.outlook import SIGMAS
from router.queue import Entry, Queue
from router.request import Request

BUSY_SHARE: Final = 0.5  # of the capacity: with less demand, a late request delays others only briefly
# times its own prefill that must fit; results are the same from 2.5 to 3 (docs/benchmarks/scheduling.md)
ROOM: Final = 2.5
LONG: Final = 1.05  # times the mean prefill; if all requests are alike, none is long
QUARTERS: Final = (-1.15, -0.32, 0.32, 1.15)  # medians of a normal distribution's four quarters
UNSEEN_ERROR: Final = 0.1  # of the predicted drain rate, for effects outside the model: paths, memory, other routers
SHORTEST_RETRY_S: Final = 0.05
LONGEST_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The work ahead of a waiting request."""

    work_s: float  # prefill seconds
    count: int  # requests
    harmed: str = ""  # a later request that would start too late because of it


def admit_before_placing(cluster: ClusterState, request: Request) -> None:
    """A new request while others wait. A long request has the earliest latest start, so it would be placed before
    `admit` checks it. It is rejected here if it displaces more than one other request."""
    outlook = request.outlook
    if not cluster.rules >= {"refusal", "shortest"} or outlook is None or request.request_id not in cluster.queue:
        return
    if not _others_wait(cluster.queue, cluster.queue.entry(request.request_id)):
        return
    free = _capacity(cluster)
    displaced = _displaced(cluster, outlook, free)
    if displaced > 1.0:
        message = f"its prefill of {outlook.ttft_s:.3f} s would displace {displaced:.1f} other requests"
        retry_s = bounded_retry_s(free.start_in_s(cluster.queue.on_time_s))
        turn_away(cluster, request, FailKind.OVERLOADED, message, retry_s)


def admit(cluster: ClusterState, request: Request) -> None:
    """A new request that could not be placed immediately."""
    outlook = request.outlook
    if "refusal" not in cluster.rules or outlook is None or request.request_id not in cluster.queue:
        return
    queue, slo, waited_s = cluster.queue, request.facts.slo, cluster.now_s - request.arrived_s
    entry, free = queue.entry(request.request_id), _capacity(cluster)
    is_too_much = _is_too_much(cluster, outlook, free)
    ahead = around(entry, queue, free, cluster.now_s)
    start_s, own_s = free.start_in_s(ahead.work_s) + _standstill_s(cluster), outlook.ttft_s
    done_s = free.done_in_s(start_s, own_s)
    predicted_s = waited_s + done_s
    error_s = _error_s(cluster, outlook, max(done_s - own_s, 0.0), ahead.count)
    longest_s = max(slo.ttft_s - waited_s - start_s - error_s, 0.0) / ROOM
    benefit_s = _benefit_of_doubt(cluster, outlook, free) * error_s if error_s < math.inf else math.inf
    surely_late_s = predicted_s - benefit_s
    if surely_late_s > slo.ttft_s or _misses_tpot(outlook, slo.tpot_s):
        message = f"first token predicted after {predicted_s:.3f} s"
        if not _refuse_late(cluster, request, message, bounded_retry_s(max(predicted_s, surely_late_s) - slo.ttft_s)):
            queue.turn_late(request.request_id)
    elif is_too_much and "shortest" in cluster.rules and _others_wait(queue, entry) and own_s > longest_s:
        message = f"demand exceeds capacity: prompts with a prefill of up to {longest_s:.3f} s are admitted"
        _refuse_late(cluster, request, message, bounded_retry_s(predicted_s + (ROOM - 1.0) * own_s - slo.ttft_s))
    elif ahead.harmed and _drain_error(cluster, outlook) < 1.0:
        message = f"{ahead.harmed} was admitted before and would miss its TTFT target"
        turn_away(cluster, request, FailKind.OVERLOADED, message, bounded_retry_s(own_s))


def drop_late(cluster: ClusterState) -> None:
    """Requests whose last moment to start has passed are rejected, or served after those that can be on time."""
    for request_id in cluster.queue.mark_newly_late(cluster.now_s):
        request = cluster.requests[request_id]
        outlook, waited_s = request.outlook, cluster.now_s - request.arrived_s
        if "refusal" not in cluster.rules or outlook is None:
            continue
        free, least_s = _capacity(cluster), surely_s(outlook.ttft_s, outlook)
        target_s = request.facts.slo.ttft_s
        is_hopeless = _is_long(cluster, outlook) and waited_s + least_s > target_s
        late_start_s = free.start_in_s(cluster.queue.late_ahead_s(request_id))
        if is_hopeless or late_start_s > target_s or _is_too_much(cluster, outlook, free):
            # There may be room for it after the waiting requests were served.
            work_s = sum(cluster.queue.entry(one).prefill_s for one in cluster.queue)
            retry_s = bounded_retry_s(free.start_in_s(work_s))
            _refuse_late(cluster, request, f"has waited {waited_s:.3f} s, which leaves too little", retry_s)


def would_miss_slo(cluster: ClusterState, request: Request, decision: Decision) -> bool:
    """The placement is predicted to miss the target: the request is rejected, or put behind requests that can meet
    theirs. A request that was late before has waited for this placement and gets it.
    """
    outlook, slo, queue = request.outlook, request.facts.slo, cluster.queue
    if "least-slack" not in cluster.rules or outlook is None or not decision.candidates or request.output:
        return False
    if request.request_id not in queue:
        return False
    waited_s, own_s = cluster.now_s - request.arrived_s, decision.candidates[0].ttft_s
    ttft_s = waited_s + own_s
    if ttft_s <= slo.ttft_s:
        return False
    if queue.is_late(request.request_id):
        return False
    is_hopeless = _is_long(cluster, outlook) and waited_s + surely_s(own_s, outlook) > slo.ttft_s
    message, retry_s = f"first token predicted after {ttft_s:.3f} s", bounded_retry_s(ttft_s - slo.ttft_s)
    is_sure = is_hopeless or _is_too_much(cluster, outlook, _capacity(cluster))
    if is_sure and _refuse_late(cluster, request, message, retry_s):
        return True
    queue.turn_late(request.request_id)
    return queue.num_on_time > 0


def surely_s(predicted_s: float, outlook: UnloadedEstimate) -> float:
    """The least time of one prefill, by the error band of the model of the outlook."""
    if outlook.ttft_s <= 0.0:
        return predicted_s
    return predicted_s * max(1.0 - outlook.band_s / outlook.ttft_s, 0.0)


def around(entry: Entry, queue: Queue, fluid: Capacity, now_s: float) -> Ahead:
    """The work ahead of the entry, and a later request that would become late because of it."""
    shares = queue.shares
    before: defaultdict[str, float] = defaultdict(float)  # tenant -> prefill seconds that go before the entry
    behind, count = [], 0
    for one in queue.on_time(entry.level):
        if one < entry:
            before[one.tenant] += one.prefill_s
            count += 1
        elif one is not entry:
            behind.append(one)
    room_s = shares.served_s(entry.tenant) + before[entry.tenant] + shares.quantum_s
    work_s = sum(
        seconds if tenant == entry.tenant else min(seconds, max(room_s - shares.served_s(tenant), 0.0))
        for tenant, seconds in before.items()
    )
    for level in queue.levels:
        if level >= entry.level:
            break
        higher = queue.at_level(level)
        work_s += sum(one.prefill_s for one in higher)
        count += len(higher)
    before_s, own_s = work_s, entry.prefill_s
    for one in behind:
        spare_s = fluid.done_by(one.late_at_s - now_s) - work_s
        if 0.0 <= spare_s < own_s and not shares.is_ahead(one.tenant, entry.tenant):
            return Ahead(work_s=before_s, count=count, harmed=one.request_id)
        work_s += one.prefill_s
    return Ahead(work_s=before_s, count=count)


def _others_wait(queue: Queue, entry: Entry) -> bool:
    """Whether others of the entry's level wait that are on time."""
    return any(one is not entry for one in queue.on_time(entry.level))


def _is_too_much(cluster: ClusterState, outlook: UnloadedEstimate, free: Capacity) -> bool:
    """Whether demand is certainly above capacity."""
    demand = cluster.demand
    error = math.hypot(demand.error, _drain_error(cluster, outlook))
    return demand.rate(cluster.now_s) * max(1.0 - SIGMAS * error, 0.0) > free.rate


def _displaced(cluster: ClusterState, outlook: UnloadedEstimate, free: Capacity) -> float:
    """How many other requests are expected to miss their target if this one is served.

    If demand exceeds capacity, the requests up to some size can be served, and each second of this request displaces
    one request of that size. `bearable` is the demand at which the queue reaches the target within the horizon. Demand
    is uncertain, so the result is a mean over QUARTERS of its distribution. The probability that the queue fills up is
    taken to be its fullness, because demand that has lasted for some time is expected to last as long again.
    """
    demand = cluster.demand
    rate, error = demand.of_others(outlook.ttft_s, cluster.now_s)
    error = rate * math.hypot(error, _drain_error(cluster, outlook))
    if demand.target_s <= 0.0 or free.rate <= 0.0:
        return 0.0
    full = free.start_in_s(cluster.queue.on_time_s) / demand.target_s  # its own prefill is part of it
    bearable = free.rate * max(1.0 + (1.0 - full) / HORIZON, 0.0)
    demands = [rate + sigmas * error for sigmas in QUARTERS]
    sizes_s = [demand.size_within(bearable / each) for each in demands if each > bearable]
    return min(full, 1.0) * sum(outlook.ttft_s / size_s for size_s in sizes_s) / len(QUARTERS)


def _is_long(cluster: ClusterState, outlook: UnloadedEstimate) -> bool:
    """Whether it takes more than the mean request. Rejecting a shorter one after it has waited saves little."""
    return outlook.ttft_s > LONG * cluster.demand.mean_s


def _benefit_of_doubt(cluster: ClusterState, outlook: UnloadedEstimate, free: Capacity) -> float:
    """By how many standard errors the prediction must miss the target for a rejection: SIGMAS if demand is certainly
    below capacity, and fewer if that is less certain. Long requests, and all requests if demand is certainly above
    capacity, must instead meet the target with one standard error to spare."""
    rate = cluster.demand.rate(cluster.now_s)
    error = rate * math.hypot(cluster.demand.error, _drain_error(cluster, outlook))
    if error <= 0.0:
        return SIGMAS
    spare = (free.rate - rate) / error
    least = -1.0 if spare < -SIGMAS or _is_long(cluster, outlook) else 0.0
    return min(max(spare, least), SIGMAS)


def _drain_error(cluster: ClusterState, outlook: UnloadedEstimate) -> float:
    """Relative error of the drain rate: as observed, or from the model's error."""
    observed = cluster.pace.error
    if not outlook.is_sure or outlook.ttft_s <= 0.0:
        return observed
    return min(observed, UNSEEN_ERROR + outlook.band_s / outlook.ttft_s / SIGMAS)


def _error_s(cluster: ClusterState, outlook: UnloadedEstimate, start_s: float, num_ahead: int) -> float:
    """Error of the predicted TTFT of a request behind `num_ahead` others; infinite if nothing is known."""
    drain = _drain_error(cluster, outlook)
    if drain >= 1.0:
        return math.inf
    single = outlook.band_s / outlook.ttft_s / SIGMAS if outlook.ttft_s > 0.0 else 0.0
    own_s, variation = single * outlook.ttft_s, cluster.pace.variation.relative
    return math.hypot(start_s * drain, start_s * variation, start_s * single / math.sqrt(num_ahead + 1), own_s)


def _standstill_s(cluster: ClusterState) -> float:
    """How much longer nothing is expected to start because decode workers are full: as long as it has lasted so far."""
    head = cluster.queue.first()
    is_decode_full = head is not None and cluster.requests[head].waits_for in (Obstacle.ROOM, Obstacle.DECODE)
    return cluster.pace.standstill_s if is_decode_full else 0.0


def _misses_tpot(outlook: UnloadedEstimate, tpot_s: float) -> bool:
    return outlook.is_sure and surely_s(outlook.tpot_s, outlook) > tpot_s


def _refuse_late(cluster: ClusterState, request: Request, message: str, retry_after_s: float) -> bool:
    """False: it may stay, because it costs no request that can be on time."""
    if "refusal" not in cluster.rules or request.attempt:
        return False
    rate, demand = _capacity(cluster).rate, cluster.demand
    # Its worker is unavailable to the others while it computes this request; they come first, but cannot interrupt it.
    if demand.rate(cluster.now_s) * (1.0 - demand.error) <= max(BUSY_SHARE * rate, rate - 1.0):
        return False
    target_s = request.facts.slo.ttft_s
    turn_away(cluster, request, FailKind.OVERLOADED, f"{message}, the target is {target_s:.3f} s", retry_after_s)
    return True


def _capacity(cluster: ClusterState) -> Capacity:
    prefills, decodes = cluster.fleet.usable(cluster.now_s)
    fluid = capacity(prefills, decodes, cluster.now_s, cluster.pace.share, with_local="path-choice" in cluster.rules)
    cluster.pace.offers(fluid.rate / cluster.pace.share, cluster.now_s, cluster.demand.target_s)
    return fluid


def bounded_retry_s(wait_s: float) -> float:
    return clamped_s(wait_s, SHORTEST_RETRY_S, LONGEST_RETRY_S)

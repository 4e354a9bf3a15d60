"""Admission control: decides whether a request may wait in the queue. Pure.

A request is rejected only if serving it would cost others: if demand is above BUSY_SHARE of the capacity, and above
what the other workers can serve while one worker serves this request. Otherwise a request that cannot meet its target
is served late, behind those that can. The KV that it leaves in the prefix cache helps the next turn of its session.

forecast.py predicts when a request starts, from the work ahead of it in the order of queue.py:

    start(r) = when the capacity has done the work ahead of r, at the observed drain rate
    ttft(r)  = waited + prefill of r on the worker that would finish it first, from start(r) or when that is free

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

A new request is also rejected if others wait and it is expected to displace more than one of them (_displaced):
serving it would meet one target and make several requests miss theirs.

A rejection is most useful at arrival. A request that was admitted and has become late is rejected only if demand is
certainly above capacity, if it is long, or if the late requests before it take longer than its TTFT target. Otherwise
it is served late.

A new request r is rejected, too, if it would make an earlier request q miss its target: q goes behind r, and would
start in time only without r. Only requests of the same level count, so no request is rejected because of a lower class.
The check takes one pass over the waiting requests. If r's tenant is less served, other tenants count only with the work
that they may receive before they yield (fairness.py), and requests that must yield to r are not harmed by it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from router.cluster_state import ClusterState
from router.commands import FailKind
from router.forecast import HORIZON, Capacity
from router.overload import clamped_retry_s, drain_error, is_certain, is_long, least_s, present_capacity, reject_late
from router.policy.interface import Obstacle, UnloadedEstimate
from router.policy.unloaded import SIGMAS
from router.queue import Entry, Queue
from router.request import Request
from router.transitions import Reject

# Multiple of its own prefill that must fit. Results are equal from 2.5 to 3 (docs/benchmarks/scheduling.md).
ROOM: Final = 2.5
DISPLACING: Final = frozenset({"rejection", "shortest"})  # rules that reject a request for the sake of others
QUARTERS: Final = (-1.15, -0.32, 0.32, 1.15)  # medians of a normal distribution's four quarters


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The work ahead of a waiting request."""

    work_s: float  # prefill seconds
    count: int  # requests
    harmed: str = ""  # a request behind it that would start too late because of it


def reject_before_placing(cluster: ClusterState, request: Request) -> Iterator[Reject]:
    """Rejects a new request, while others wait, if it would displace more than one of them. This check comes first,
    because a long request is first in the queue (it must start the soonest), and would otherwise be placed before
    `reject_or_queue` sees it."""
    unloaded = request.unloaded
    if not cluster.rules >= DISPLACING or unloaded is None or request.request_id not in cluster.queue:
        return
    if not _others_wait(cluster.queue, cluster.queue.entry(request.request_id)):
        return
    present = present_capacity(cluster)
    displaced = _displaced(cluster, unloaded, present)
    if displaced > 1.0:
        message = f"its prefill of {unloaded.ttft_s:.3f} s would displace {displaced:.1f} other requests"
        retry_after_s = clamped_retry_s(present.start_in_s(cluster.queue.on_time_s))
        yield Reject(request, FailKind.OVERLOADED, message, retry_after_s)


def reject_or_queue(cluster: ClusterState, request: Request) -> Iterator[Reject]:
    """Rejects a new request that could not be placed immediately, or lets it wait."""
    unloaded = request.unloaded
    if "rejection" not in cluster.rules or unloaded is None or request.request_id not in cluster.queue:
        return
    queue, slo, waited_s = cluster.queue, request.facts.slo, cluster.now_s - request.arrived_s
    entry, present = queue.entry(request.request_id), present_capacity(cluster)
    is_overloaded = is_certain(cluster, unloaded, present)
    ahead = work_ahead(entry, queue, present, cluster.now_s)
    start_s, own_s = present.start_in_s(ahead.work_s) + _standstill_s(cluster), unloaded.ttft_s
    done_s = present.done_in_s(start_s, own_s)
    predicted_s = waited_s + done_s
    error_s = _error_s(cluster, unloaded, max(done_s - own_s, 0.0), ahead.count)
    longest_s = max(slo.ttft_s - waited_s - start_s - error_s, 0.0) / ROOM
    benefit_s = _benefit_of_doubt(cluster, unloaded, present) * error_s if error_s < math.inf else math.inf
    surely_s = predicted_s - benefit_s
    if surely_s > slo.ttft_s or _misses_tpot(unloaded, slo.tpot_s):
        message = f"first token predicted after {predicted_s:.3f} s"
        rejection = reject_late(cluster, request, message, max(predicted_s, surely_s) - slo.ttft_s)
        if rejection is None:
            queue.turn_late(request.request_id)
    elif is_overloaded and "shortest" in cluster.rules and _others_wait(queue, entry) and own_s > longest_s:
        message = f"demand exceeds capacity: prompts with a prefill of up to {longest_s:.3f} s are admitted"
        rejection = reject_late(cluster, request, message, predicted_s + (ROOM - 1.0) * own_s - slo.ttft_s)
    elif ahead.harmed and drain_error(cluster, unloaded) < 1.0:
        message = f"{ahead.harmed} was admitted earlier and would miss its TTFT target"
        rejection = Reject(request, FailKind.OVERLOADED, message, clamped_retry_s(own_s))
    else:
        return
    if rejection is not None:
        yield rejection


def work_ahead(entry: Entry, queue: Queue, present: Capacity, now_s: float) -> Ahead:
    """The work ahead of the entry, and a later request that would become late because of it."""
    fairness = queue.fairness
    before: defaultdict[str, float] = defaultdict(float)  # tenant -> prefill seconds ahead of the entry
    behind, count = [], 0
    for one in queue.on_time(entry.level):
        if one < entry:
            before[one.tenant] += one.prefill_s
            count += 1
        elif one is not entry:
            behind.append(one)
    room_s = fairness.served_s(entry.tenant) + before[entry.tenant] + fairness.quantum_s
    work_s = sum(
        seconds if tenant == entry.tenant else min(seconds, max(room_s - fairness.served_s(tenant), 0.0))
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
        spare_s = present.done_by(one.late_at_s - now_s) - work_s
        if 0.0 <= spare_s < own_s and not fairness.is_ahead(one.tenant, entry.tenant):
            return Ahead(work_s=before_s, count=count, harmed=one.request_id)
        work_s += one.prefill_s
    return Ahead(work_s=before_s, count=count)


def _others_wait(queue: Queue, entry: Entry) -> bool:
    """Whether other requests of the entry's level wait that can still be on time."""
    return any(one is not entry for one in queue.on_time(entry.level))


def _displaced(cluster: ClusterState, unloaded: UnloadedEstimate, present: Capacity) -> float:
    """How many other requests are expected to miss their target if this one is served.

    If demand exceeds capacity, the requests up to some size can be served, and each second of this request displaces
    one request of that size. `sustainable` is the demand at which the queue just reaches the target within the
    horizon. Demand is uncertain, so the result is a mean over QUARTERS of its distribution. The queue is assumed to
    fill up with a probability equal to its fullness, because demand that has lasted for some time is expected to last
    as long again.
    """
    demand = cluster.demand
    rate, error = demand.of_others(unloaded.ttft_s, cluster.now_s)
    error = rate * math.hypot(error, drain_error(cluster, unloaded))
    if demand.target_s <= 0.0 or present.rate <= 0.0:
        return 0.0
    full = present.start_in_s(cluster.queue.on_time_s) / demand.target_s  # includes its own prefill
    sustainable = present.rate * max(1.0 + (1.0 - full) / HORIZON, 0.0)
    demands = [rate + sigmas * error for sigmas in QUARTERS]
    sizes_s = [demand.size_within(sustainable / each) for each in demands if each > sustainable]
    return min(full, 1.0) * sum(unloaded.ttft_s / size_s for size_s in sizes_s) / len(QUARTERS)


def _benefit_of_doubt(cluster: ClusterState, unloaded: UnloadedEstimate, present: Capacity) -> float:
    """The number of standard errors by which the prediction must miss the target for a rejection: SIGMAS if demand is
    certainly below capacity, and less if that is uncertain. For long requests, and for all requests if demand is
    certainly above capacity, it can fall to -1: the target must then be met with one standard error to spare."""
    rate = cluster.demand.rate(cluster.now_s)
    error = rate * math.hypot(cluster.demand.error, drain_error(cluster, unloaded))
    if error <= 0.0:
        return SIGMAS
    spare = (present.rate - rate) / error
    least = -1.0 if spare < -SIGMAS or is_long(cluster, unloaded) else 0.0
    return min(max(spare, least), SIGMAS)


def _error_s(cluster: ClusterState, unloaded: UnloadedEstimate, start_s: float, num_ahead: int) -> float:
    """Error of the predicted TTFT of a request behind `num_ahead` others; infinite if nothing is known."""
    drain = drain_error(cluster, unloaded)
    if drain >= 1.0:
        return math.inf
    single = unloaded.band_s / unloaded.ttft_s / SIGMAS if unloaded.ttft_s > 0.0 else 0.0
    own_s, variation = single * unloaded.ttft_s, cluster.utilization.variation.relative
    return math.hypot(start_s * drain, start_s * variation, start_s * single / math.sqrt(num_ahead + 1), own_s)


def _standstill_s(cluster: ClusterState) -> float:
    """The expected time until a request starts while decode workers are full: as long as nothing has started so far."""
    head = cluster.queue.first()
    is_decode_full = head is not None and cluster.requests[head].waits_for in (Obstacle.ROOM, Obstacle.DECODE)
    return cluster.utilization.standstill_s if is_decode_full else 0.0


def _misses_tpot(unloaded: UnloadedEstimate, tpot_s: float) -> bool:
    return unloaded.is_sure and least_s(unloaded.tpot_s, unloaded) > tpot_s

"""Admission control: decides which of the waiting requests are given up when a new one arrives. Pure.

If not all waiting requests can start in time, as many of them as possible should. The rule takes them in the order in
which their first tokens are due, which is also the order in which they start (queue.py). Whenever one of them would be
late, it gives up the longest of those taken so far: a met target counts the same for every prompt, and the longest one
makes room for the most others. That may be the new request, or one that has waited. This is Moore's rule
(simulator/bound_deadlines.py), which is optimal for one worker and known work.

forecast.py predicts when a request starts, from the work ahead of it:

    start(r) = when the capacity has done the work ahead of r, at the observed drain rate
    ttft(r)  = waited + prefill of r on the worker that would finish it first, from start(r) or when that is free

While decode workers are full, nothing starts. This standstill is expected to last as long again as it has lasted so
far. Until the cost model or the drain rate is known, no request is given up.

Only requests of one level compete, so no request is given up because of a lower class. Other tenants count only with
the work that they may receive before they yield (fairness.py). No request of a tenant is given up for one of a
tenant that yields to it.

A request that is given up is rejected only if serving it would cost others: if demand is above BUSY_SHARE of the
capacity, and above what the other workers can serve while one worker serves this request. Otherwise it is served late,
behind those that can meet their target. The KV that it leaves in the prefix cache helps the next turn of its session.
late_requests.py decides about requests that become late in the queue.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from router.cluster_state import ClusterState
from router.commands import FailKind
from router.forecast import Capacity
from router.overload import clamped_retry_s, drain_error, least_s, present_capacity, reject_late
from router.policy.interface import Obstacle, UnloadedEstimate
from router.policy.unloaded import SIGMAS
from router.queue import Entry, Level, Queue
from router.request import Request
from router.transitions import Reject


class Forecast(NamedTuple):
    """Predicts first tokens. The errors of single prefills are independent, so the relative error of their sum falls
    with the number of prompts. A first token counts as late if it may be late by one standard error."""

    present: Capacity
    standstill_s: float = 0.0
    error: float = 0.0  # relative, of one prefill

    def done_in_s(self, ahead_s: float, count: int, own_s: float) -> float:
        """The first token of a request of `own_s` behind work of `ahead_s`; they are `count` requests together."""
        start_s = self.present.start_in_s(ahead_s) + self.standstill_s
        error_s = self.error * math.hypot(start_s / math.sqrt(count), own_s)
        return self.present.done_in_s(start_s, own_s) + error_s


def reject_before_placing(cluster: ClusterState, request: Request) -> Iterator[Reject]:
    """`reject_waiting` for a new request while others wait. This check comes first, because a long request whose first
    token is due soon would otherwise be placed before it is compared with the others."""
    queue, name = cluster.queue, request.request_id
    if name in queue and any(one.request_id != name for one in queue.on_time(queue.entry(name).level)):
        yield from reject_waiting(cluster, request)


def reject_waiting(cluster: ClusterState, request: Request) -> Iterator[Reject]:
    """Gives up requests of the level of `request`, which is new, until all others of it can start in time."""
    unloaded, queue = request.unloaded, cluster.queue
    if "rejection" not in cluster.rules or unloaded is None or request.request_id not in queue:
        return
    entry, present = queue.entry(request.request_id), present_capacity(cluster)
    if _misses_tpot(unloaded, request.facts.slo.tpot_s):
        yield from _give_up(cluster, entry, f"at least {unloaded.tpot_s:.3f} s per token", present)
    elif drain_error(cluster, unloaded) < 1.0:
        error = unloaded.band_s / unloaded.ttft_s / SIGMAS if unloaded.ttft_s > 0.0 else 0.0
        forecast = Forecast(present, _standstill_s(cluster), error)
        by_length = "shortest" in cluster.rules
        while found := excess(queue, entry.level, forecast, cluster.now_s, by_length=by_length):
            message = f"the requests ahead leave no time for its prefill of {found.prefill_s:.3f} s"
            yield from _give_up(cluster, found, message, present)


def excess(queue: Queue, level: Level, forecast: Forecast, now_s: float, *, by_length: bool = True) -> Entry | None:
    """The waiting request to give up so that others of this level can start in time; None if all of them can.

    `by_length`: the longest one, and the last of equal ones; otherwise the last that came.
    """
    fairness = queue.fairness
    higher_s = sum(one.prefill_s for other in queue.levels if other < level for one in queue.at_level(other))
    before: defaultdict[str, float] = defaultdict(float)  # tenant -> prefill seconds ahead
    first: list[Entry] = []
    for entry in queue.on_time(level):
        first.append(entry)
        own_s = before[entry.tenant]
        work_s = higher_s + own_s
        if len(before) > 1:
            room_s = fairness.served_s(entry.tenant) + own_s + fairness.quantum_s
            others = ((one, seconds) for one, seconds in before.items() if one != entry.tenant)
            work_s += sum(min(seconds, max(room_s - fairness.served_s(one), 0.0)) for one, seconds in others)
        done_s = forecast.done_in_s(work_s, len(first), entry.prefill_s)
        if now_s + done_s > entry.late_at_s + entry.prefill_s:
            able = [one for one in first if not fairness.is_ahead(entry.tenant, one.tenant)]
            return max(able, key=lambda one: (one.prefill_s if by_length else 0.0, one.serial))
        before[entry.tenant] += entry.prefill_s
    return None


def _give_up(cluster: ClusterState, entry: Entry, message: str, present: Capacity) -> Iterator[Reject]:
    """Rejects the request, or serves it late if that costs no other request and few late ones wait."""
    queue, request = cluster.queue, cluster.requests[entry.request_id]
    retry_after_s = clamped_retry_s(present.start_in_s(queue.on_time_s))
    rejection = reject_late(cluster, request, message, retry_after_s)
    if rejection is None and present.start_in_s(queue.late_ahead_s(entry.request_id)) > request.facts.slo.ttft_s:
        rejection = Reject(
            request, FailKind.OVERLOADED, f"{message}, and other late requests already wait", retry_after_s
        )
    if rejection is None:
        queue.turn_late(entry.request_id)
    else:
        yield rejection


def _standstill_s(cluster: ClusterState) -> float:
    """The expected time until a request starts while decode workers are full: as long as nothing has started so far."""
    head = cluster.queue.first()
    is_decode_full = head is not None and cluster.requests[head].waits_for in (Obstacle.ROOM, Obstacle.DECODE)
    return cluster.utilization.standstill_s if is_decode_full else 0.0


def _misses_tpot(unloaded: UnloadedEstimate, tpot_s: float) -> bool:
    return unloaded.is_sure and least_s(unloaded.tpot_s, unloaded) > tpot_s

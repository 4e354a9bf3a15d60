"""Which requests are rejected under overload: newcomers, and requests that have become late. Pure.

Overload is measured first: the predicted capacity, the demand, and the errors of both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final, NamedTuple

from pdserve.core.durations import clamped_s
from router.policy.availability import SIGMAS
from router.policy.interface import Decision, Obstacle, UnloadedEstimate
from router.state.cluster_state import ClusterState
from router.state.endings import Reject, apply_ending
from router.state.forecast import Capacity, capacity
from router.state.interface import Command, FailKind
from router.state.queue import Entry, Level, Queue
from router.state.request import Request

BUSY_SHARE: Final = 0.5  # of the capacity: with less demand, a late request delays others only briefly
LONG: Final = 1.05  # multiple of the mean prefill; if all requests are alike, none is long
UNSEEN_ERROR: Final = 0.1  # error of the predicted drain rate for effects outside the model: memory, other routers
SHORTEST_RETRY_S: Final = 0.05
LONGEST_RETRY_S: Final = 30.0


def present_capacity(cluster: ClusterState) -> Capacity:
    prefills, decodes = cluster.fleet.usable(cluster.now_s)
    share, with_local = cluster.utilization.share, "path-choice" in cluster.rules
    present = capacity(prefills, decodes, cluster.now_s, share, with_local=with_local)
    cluster.utilization.offers(present.rate / share, cluster.now_s)
    return present


def is_certain(cluster: ClusterState, unloaded: UnloadedEstimate, present: Capacity) -> bool:
    """Whether demand is certainly above capacity."""
    demand = cluster.demand
    error = math.hypot(demand.error, drain_error(cluster, unloaded))
    return demand.rate(cluster.now_s) * max(1.0 - SIGMAS * error, 0.0) > present.rate


def drain_error(cluster: ClusterState, unloaded: UnloadedEstimate) -> float:
    """Relative error of the drain rate: observed, or derived from the cost model's error."""
    observed = cluster.utilization.error
    if not unloaded.is_sure or unloaded.ttft_s <= 0.0:
        return observed
    return min(observed, UNSEEN_ERROR + unloaded.band_s / unloaded.ttft_s / SIGMAS)


def is_long(cluster: ClusterState, unloaded: UnloadedEstimate) -> bool:
    """Whether the request takes longer than the mean. Rejecting a shorter one after it has waited saves little."""
    return unloaded.ttft_s > LONG * cluster.demand.mean_s


def least_s(predicted_s: float, unloaded: UnloadedEstimate) -> float:
    """The least time that is consistent with a prediction of `predicted_s`, given the model's error band."""
    if unloaded.ttft_s <= 0.0:
        return predicted_s
    return predicted_s * max(1.0 - unloaded.band_s / unloaded.ttft_s, 0.0)


def is_task_in_time(cluster: ClusterState, request: Request, present: Capacity) -> bool:
    """Whether the request is a turn of a task whose deadline is after the turn's first token, even if all requests that
    can be on time, and earlier late ones, are served before it. Without the turn, the task fails."""
    task = None if request.conversation is None else request.conversation.session.task
    if task is None or not task.is_running or request.request_id not in cluster.queue:
        return False
    queue = cluster.queue
    ahead_s = queue.on_time_s + queue.late_ahead_s(request.request_id)
    start_s = present.start_in_s(ahead_s + queue.entry(request.request_id).prefill_s)
    return cluster.now_s + start_s <= task.due_s


def reject_late(cluster: ClusterState, request: Request, message: str, retry_after_s: float) -> Reject | None:
    """Rejects a request that will be late. None: it may stay, because it delays no request that can be on time, or its
    task can be in time."""
    if "rejection" not in cluster.rules or request.attempt:
        return None
    present, demand = present_capacity(cluster), cluster.demand
    if is_task_in_time(cluster, request, present):
        return None
    rate = present.rate
    # While its worker computes this request, it can start no others, although those go first.
    if demand.rate(cluster.now_s) * (1.0 - demand.error) <= max(BUSY_SHARE * rate, rate - 1.0):
        return None
    message = f"{message}, the target is {request.facts.slo.ttft_s:.3f} s"
    return Reject(request, FailKind.OVERLOADED, message, clamped_retry_s(retry_after_s))


def clamped_retry_s(wait_s: float) -> float:
    return clamped_s(wait_s, SHORTEST_RETRY_S, LONGEST_RETRY_S)


# --- newcomers ------------------------------------------------------------------------------------------------
# Admission control: which of the waiting requests are given up when a new one arrives.
#
# If not all waiting requests can start in time, as many of them as possible should. The rule takes them in the order in
# which their first tokens are due, which is also the order in which they start (queue.py). Whenever one of them would
# be late, it gives up the longest of those taken so far: a met target counts the same for every prompt, and the longest
# one makes room for the most others. That may be the new request, or one that has waited. This is Moore's rule
# (simulator/search/bound.py), which is optimal for one worker and known work.
#
# forecast.py predicts when a request starts, from the work ahead of it:
#
#     start(r) = when the capacity has done the work ahead of r, at the observed drain rate
#     ttft(r)  = waited + prefill of r on the worker that would finish it first, from start(r) or when that is free
#
# While decode workers are full, nothing starts. This standstill is expected to last as long again as it has lasted so
# far. Until the cost model or the drain rate is known, no request is given up.
#
# Only requests of one level compete, so no request is given up because of a lower class. Other tenants count only with
# the work that they may receive before they yield (queue.py). No request of a tenant is given up for one of a tenant
# that yields to it.
#
# A request that is given up is rejected only if serving it would cost others: if demand is above BUSY_SHARE of the
# capacity, and above what the other workers can serve while one worker serves this request. Otherwise it is served
# late, behind those that can meet their target. The KV that it leaves in the prefix cache helps the next turn of its
# session. A turn of a task that can still be in time is not rejected (`is_task_in_time`). The next section decides
# about requests that become late in the queue.


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


def reject_before_placing(cluster: ClusterState, request: Request) -> list[Command]:
    """`reject_waiting` for a new request while others wait. This check comes first, because a long request whose first
    token is due soon would otherwise be placed before it is compared with the others."""
    queue, name = cluster.queue, request.request_id
    if name in queue and any(one.request_id != name for one in queue.on_time(queue.entry(name).level)):
        return reject_waiting(cluster, request)
    return []


def reject_waiting(cluster: ClusterState, request: Request) -> list[Command]:
    """Gives up requests of the level of `request`, which is new, until all others of it can start in time."""
    unloaded, queue = request.unloaded, cluster.queue
    commands: list[Command] = []
    if "rejection" not in cluster.rules or unloaded is None or request.output or request.request_id not in queue:
        return commands
    entry, present = queue.entry(request.request_id), present_capacity(cluster)
    if _misses_tpot(unloaded, request.facts.slo.tpot_s):
        commands += _reject_or_delay(cluster, entry, f"at least {unloaded.tpot_s:.3f} s per token", present)
    elif drain_error(cluster, unloaded) < 1.0:
        error = unloaded.band_s / unloaded.ttft_s / SIGMAS if unloaded.ttft_s > 0.0 else 0.0
        forecast = Forecast(present, _standstill_s(cluster), error)
        by_length = "shortest" in cluster.rules
        while found := excess(queue, entry.level, forecast, cluster.now_s, by_length=by_length):
            message = f"the requests ahead leave no time for its prefill of {found.prefill_s:.3f} s"
            commands += _reject_or_delay(cluster, found, message, present)
    return commands


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


def _reject_or_delay(cluster: ClusterState, entry: Entry, message: str, present: Capacity) -> list[Command]:
    """Rejects the request, or serves it late if that costs no other request and few late ones wait."""
    queue, request = cluster.queue, cluster.requests[entry.request_id]
    retry_after_s = clamped_retry_s(present.start_in_s(queue.on_time_s))
    rejection = reject_late(cluster, request, message, retry_after_s)
    late_start_s = present.start_in_s(queue.late_ahead_s(entry.request_id))
    if rejection is None and late_start_s > request.facts.slo.ttft_s and not is_task_in_time(cluster, request, present):
        rejection = Reject(
            request, FailKind.OVERLOADED, f"{message}, and other late requests already wait", retry_after_s
        )
    if rejection is not None:
        return apply_ending(cluster, rejection)
    queue.turn_late(entry.request_id)
    return []


def _standstill_s(cluster: ClusterState) -> float:
    """The expected time until a request starts while decode workers are full: as long as nothing has started so far."""
    head = cluster.queue.first()
    is_decode_full = head is not None and cluster.requests[head].waits_for in (Obstacle.ROOM, Obstacle.DECODE)
    return cluster.utilization.standstill_s if is_decode_full else 0.0


def _misses_tpot(unloaded: UnloadedEstimate, tpot_s: float) -> bool:
    return unloaded.is_sure and least_s(unloaded.tpot_s, unloaded) > tpot_s


# --- late requests --------------------------------------------------------------------------------------------
# A request that was admitted and has become late is rejected only if demand is certainly above capacity, if it is long,
# or if the late requests before it take longer than its TTFT target. Otherwise it is served late, behind the requests
# that can meet theirs.


def reject_newly_late(cluster: ClusterState) -> list[Command]:
    """Rejects requests whose latest time to start has passed, or puts them behind those that can be on time."""
    commands: list[Command] = []
    for request_id in cluster.queue.mark_newly_late(cluster.now_s):
        request = cluster.requests[request_id]
        unloaded, waited_s = request.unloaded, cluster.now_s - request.arrived_s
        if "rejection" not in cluster.rules or unloaded is None:
            continue
        present, target_s = present_capacity(cluster), request.facts.slo.ttft_s
        is_hopeless = is_long(cluster, unloaded) and waited_s + least_s(unloaded.ttft_s, unloaded) > target_s
        late_start_s = present.start_in_s(cluster.queue.late_ahead_s(request_id))
        if is_hopeless or late_start_s > target_s or is_certain(cluster, unloaded, present):
            # After the waiting requests were served, there may be room for it.
            work_s = sum(cluster.queue.entry(one).prefill_s for one in cluster.queue)
            message = f"has waited {waited_s:.3f} s, which leaves too little"
            rejection = reject_late(cluster, request, message, present.start_in_s(work_s))
            if rejection is not None:
                commands += apply_ending(cluster, rejection)
    return commands


def delay_if_late(cluster: ClusterState, request: Request, decision: Decision) -> list[Command] | None:
    """Rejects a request that is predicted to miss its target with this placement, or puts it behind requests that can
    meet theirs. None: the request starts. A request that was late before has waited for this placement, and starts."""
    unloaded, slo, queue = request.unloaded, request.facts.slo, cluster.queue
    if "least-slack" not in cluster.rules or unloaded is None or not decision.candidates or request.output:
        return None
    if request.request_id not in queue:
        return None
    waited_s, own_s = cluster.now_s - request.arrived_s, decision.candidates[0].ttft_s
    ttft_s = waited_s + own_s
    if ttft_s <= slo.ttft_s or queue.is_late(request.request_id):
        return None
    is_hopeless = is_long(cluster, unloaded) and waited_s + least_s(own_s, unloaded) > slo.ttft_s
    if is_hopeless or is_certain(cluster, unloaded, present_capacity(cluster)):
        message = f"first token predicted after {ttft_s:.3f} s"
        rejection = reject_late(cluster, request, message, ttft_s - slo.ttft_s)
        if rejection is not None:
            return apply_ending(cluster, rejection)
    queue.turn_late(request.request_id)
    return [] if queue.num_on_time else None

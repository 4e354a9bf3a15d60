"""Decides what happens to waiting requests that can no longer meet their target. Pure.

A request that was admitted and has become late is rejected only if demand is certainly above capacity, if it is long,
or if the late requests before it take longer than its TTFT target. Otherwise it is served late, behind the requests
that can meet theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.cluster_state import ClusterState
from router.overload import is_certain, is_long, least_s, present_capacity, reject_late
from router.policy.interface import Decision
from router.request import Request
from router.transitions import Reject, Steps


def reject_newly_late(cluster: ClusterState) -> Iterator[Reject]:
    """Rejects requests whose latest time to start has passed, or puts them behind those that can be on time."""
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
                yield rejection


def delay_if_late(cluster: ClusterState, request: Request, decision: Decision) -> Steps[bool]:
    """Rejects a request that is predicted to miss its target with this placement, or puts it behind requests that can
    meet theirs. False: the request starts. A request that was late before has waited for this placement, and starts."""
    unloaded, slo, queue = request.unloaded, request.facts.slo, cluster.queue
    if "least-slack" not in cluster.rules or unloaded is None or not decision.candidates or request.output:
        return False
    if request.request_id not in queue:
        return False
    waited_s, own_s = cluster.now_s - request.arrived_s, decision.candidates[0].ttft_s
    ttft_s = waited_s + own_s
    if ttft_s <= slo.ttft_s or queue.is_late(request.request_id):
        return False
    is_hopeless = is_long(cluster, unloaded) and waited_s + least_s(own_s, unloaded) > slo.ttft_s
    if is_hopeless or is_certain(cluster, unloaded, present_capacity(cluster)):
        message = f"first token predicted after {ttft_s:.3f} s"
        rejection = reject_late(cluster, request, message, ttft_s - slo.ttft_s)
        if rejection is not None:
            yield rejection
            return True
    queue.turn_late(request.request_id)
    return queue.num_on_time > 0

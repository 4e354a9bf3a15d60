"""Measures overload: the predicted capacity, the demand, and the errors of both. Pure.

newcomers.py and late_requests.py use it to decide which requests are rejected.
"""

from __future__ import annotations

import math
from typing import Final

from pdserve.core.durations import clamped_s
from router.cluster_state import ClusterState
from router.commands import FailKind
from router.forecast import Capacity, capacity
from router.policy.interface import UnloadedEstimate
from router.policy.unloaded import SIGMAS
from router.request import Request
from router.transitions import Reject

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


def reject_late(cluster: ClusterState, request: Request, message: str, retry_after_s: float) -> Reject | None:
    """Rejects a request that will be late. None: it may stay, because it delays no request that can be on time."""
    if "rejection" not in cluster.rules or request.attempt:
        return None
    rate, demand = present_capacity(cluster).rate, cluster.demand
    # While its worker computes this request, it can start no others, although those go first.
    if demand.rate(cluster.now_s) * (1.0 - demand.error) <= max(BUSY_SHARE * rate, rate - 1.0):
        return None
    message = f"{message}, the target is {request.facts.slo.ttft_s:.3f} s"
    return Reject(request, FailKind.OVERLOADED, message, clamped_retry_s(retry_after_s))


def clamped_retry_s(wait_s: float) -> float:
    return clamped_s(wait_s, SHORTEST_RETRY_S, LONGEST_RETRY_S)

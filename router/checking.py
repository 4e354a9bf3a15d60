"""Invariants of the router's state; tests call this after every event. Pure."""

from __future__ import annotations

from router.cluster_state import ClusterState
from router.lifecycle import ENDED, NEEDS_SENDER, WITH_WORKERS, SenderEnd, Stage


def check(cluster: ClusterState) -> None:
    """Raises AssertionError, naming the violated invariant."""
    cluster.queue.check()
    cluster.fleet.check(cluster.now_s)
    queued = list(cluster.queue)
    assert len(queued) == len(set(queued)), "a request is queued twice"
    assert not cluster.parked & set(queued), "a request is queued and in backoff"
    bound = [request_id for view in cluster.fleet.workers.values() for request_id in view.queue]
    assert len(bound) == cluster.num_bound, "bound requests are miscounted"
    assert len(bound) == len(set(bound)), "a request is in the queues of two workers"
    assert not set(bound) & (cluster.parked | set(queued)), "a request is in a worker's queue and elsewhere"
    for view in cluster.fleet.workers.values():
        for request_id in view.queue:
            assert cluster.requests[request_id].bound_to == view.worker_id, (
                f"{request_id} is in the queue of another worker"
            )
    waiting = cluster.parked | set(queued) | set(bound)
    assert waiting <= cluster.requests.keys(), "a forgotten request is queued"
    assert cluster.ended <= cluster.requests.keys(), "a forgotten request is among the ended ones"
    for request_id, request in cluster.requests.items():
        assert request.request_id == request_id
        assert (request.stage is Stage.QUEUED) is (request_id in waiting), f"{request_id}: {request.stage} and queue"
        assert (request.stage in ENDED) is (request_id in cluster.ended), f"{request_id}: {request.stage} and ended"
        assert request.stage is not Stage.FORGOTTEN, f"{request_id} is forgotten and remembered"
        assert not request.bound_to or request_id in bound, f"{request_id} is bound and in no worker's queue"
        if request.stage in ENDED:
            assert request.bookings, f"{request_id} has ended and has no bookings, but is not forgotten"
        if request.stage in WITH_WORKERS:
            placement = request.placement
            assert placement is not None, f"{request_id}: {request.stage} without a placement"
            assert (placement.decode_worker, request.attempt) in request.bookings, f"{request_id}: no decode booking"
            if request.stage in NEEDS_SENDER[SenderEnd.RELEASED]:
                assert (placement.prefill_worker, request.attempt) in request.bookings, (
                    f"{request_id}: no prefill booking"
                )
        if request.stage is Stage.QUEUED:
            assert request.placement is None, f"{request_id} is queued and placed"
            for worker_id, attempt in request.bookings:
                booking = cluster.booking(worker_id, request_id, attempt)
                assert booking is not None, f"{request_id}: no booking on the worker"
                assert booking.is_cancelled, f"{request_id} is queued, and {worker_id} was not asked to free it"
        for worker_id, attempt in request.bookings:
            assert cluster.booking(worker_id, request_id, attempt) is not None, (
                f"{request_id}: no booking on the worker"
            )
    for view in cluster.fleet.workers.values():
        view.check()
        for request_id, attempt in view.bookings:
            holder = cluster.requests.get(request_id)
            assert holder is not None, f"{view.worker_id} is booked for {request_id}, which is forgotten"
            assert (view.worker_id, attempt) in holder.bookings, f"{request_id}: no booking of the request"
    timers = cluster.timers
    for alarms, of in ((timers.deadlines, cluster.requests.keys() - cluster.ended), (timers.releases, cluster.ended)):
        alarms.check()
        assert all(request_id in of for request_id in alarms), "an alarm outlives its request"
    timers.backoffs.check()
    assert set(timers.backoffs) == cluster.parked, "a backoff without its alarm, or the reverse"
    assert len(cluster.explanations) <= cluster.settings.explain_capacity, "explanations are not bounded"

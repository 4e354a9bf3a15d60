"""Handles lost attempts: a new attempt on other workers, at the exact next token, or a typed error. Pure.

A lost attempt is cancelled on every connected worker that holds memory of it. The next attempt recomputes the prompt
and the output so far. The token at each position depends only on seed and position, so the stream continues without a
difference.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from pdserve.core.durations import backoff_s
from pdserve.core.types import Role
from router.cluster_state import ClusterState
from router.commands import FailKind
from router.ending import forget_if_free, give_up
from router.events import WorkerConnected, WorkerForgotten, WorkerLost
from router.lifecycle import ENDED, NEEDS_SENDER, UNANSWERED, Move, SenderEnd
from router.request import Request

FIRST_BACKOFF_S: Final = 0.05
LONGEST_BACKOFF_S: Final = 2.0
INNOCENT_TOKENS: Final = 8  # output tokens in one attempt


class Cause(Enum):
    """Why an attempt was lost."""

    DEATH = "a worker died"
    SILENCE = "a worker fell silent"
    TRANSFER = "the KV transfer failed"
    INTERNAL = "a worker failed"
    GAP = "tokens are missing"
    PLAN = "the planned prefill worker left before it was asked"


FAILURES: Final = {
    Cause.DEATH: FailKind.KV_LOST,
    Cause.SILENCE: FailKind.UNAVAILABLE,
    Cause.TRANSFER: FailKind.TRANSFER,
    Cause.INTERNAL: FailKind.INTERNAL,
    Cause.GAP: FailKind.INTERNAL,
    Cause.PLAN: FailKind.UNAVAILABLE,
}

WORKER_LEFT: Final = (Cause.DEATH, Cause.SILENCE, Cause.PLAN)


def lose(cluster: ClusterState, request: Request, cause: Cause, culprit: str = "", message: str = "") -> None:
    """The present attempt is lost. Its `culprit`, or otherwise the pair, is avoided while there are others."""
    placement = request.placement
    assert placement is not None, "only a placed request can be lost"
    if culprit:
        request.avoid_workers.add(cluster.fleet.key(culprit))
    if placement.prefill_worker and cause is not Cause.PLAN:
        fleet = cluster.fleet
        request.avoid_pairs.add((fleet.key(placement.prefill_worker), fleet.key(placement.decode_worker)))
    cluster.counters[f"lost_{cause.name.lower()}"] += 1
    if cause is not Cause.PLAN:
        request.lost_attempts += 1
    said = f"{cause.value}: {message}" if message else cause.value
    if request.deaths >= cluster.settings.max_worker_deaths:
        give_up(cluster, request, FailKind.INTERNAL, f"{request.deaths} workers died while they had this request")
    elif request.lost_attempts >= cluster.settings.max_attempts:
        give_up(cluster, request, FAILURES[cause], f"{request.lost_attempts} attempts were lost, the last since {said}")
    elif cluster.move(request, Move.LOST):
        # A started answer should not pause, but a request that fails again without a lost worker would only repeat the
        # failure.
        is_fresh = request.lost_attempts <= 1 or cause in WORKER_LEFT
        wait_s = 0.0 if is_fresh else backoff_s(FIRST_BACKOFF_S, LONGEST_BACKOFF_S, request.lost_attempts - 2)
        requeue(cluster, request, wait_s)


def requeue(cluster: ClusterState, request: Request, wait_s: float) -> None:
    """Puts the request back into the queue (the stage is QUEUED already), without memory on workers."""
    cluster.cancel_attempt(request)
    cluster.refund(request)
    request.placement = None
    request.not_before_s = cluster.now_s + wait_s
    cluster.enqueue(request)


def on_worker_connected(cluster: ClusterState, event: WorkerConnected) -> None:
    if cluster.fleet.connected(event.worker_id) is not None:
        # The hello of the new stream came before the end of the old one.
        _worker_gone(cluster, event.worker_id, Cause.DEATH)
    cluster.fleet.connect(event, cluster.now_s)
    if event.role is Role.DECODE:
        cluster.no_decode_since_s = None
    cluster.is_placing_due = True


def on_worker_lost(cluster: ClusterState, event: WorkerLost) -> None:
    _worker_gone(cluster, event.worker_id, Cause.DEATH)


def on_worker_forgotten(cluster: ClusterState, event: WorkerForgotten) -> None:
    _worker_gone(cluster, event.worker_id, Cause.DEATH)
    cluster.fleet.forget(event.worker_id)
    cluster.is_placing_due = True


def give_up_silent(cluster: ClusterState) -> None:
    """Moves the attempts of workers that were silent for twice the limit to other workers. Their streams still exist,
    so they are told, and their memory stays booked until they answer or their stream ends."""
    limit_s = 2.0 * cluster.settings.worker_silence_s
    for view in cluster.fleet.views.values():
        if view.is_connected and cluster.now_s - view.heard_s >= limit_s:
            for booking in list(view.bookings.values()):
                request = cluster.requests.get(booking.request_id)
                if request is not None and _depends_on(request, view.worker_id, booking.attempt):
                    lose(cluster, request, Cause.SILENCE, culprit=view.worker_id, message=view.worker_id)


def _worker_gone(cluster: ClusterState, worker_id: str, cause: Cause) -> None:
    view = cluster.fleet.connected(worker_id)
    if view is None:
        return
    cluster.is_placing_due = True
    cluster.shrunk_s = cluster.now_s
    was_draining = view.is_draining
    cluster.fleet.changed()
    cluster.unbind_all(view)
    for booking in view.lost():
        request = cluster.requests.get(booking.request_id)
        if request is None:
            continue
        request.holds.discard((worker_id, booking.attempt))
        request.cached_blocks.pop(worker_id, None)
        if not _depends_on(request, worker_id, booking.attempt):
            forget_if_free(cluster, request)
        elif not booking.is_sent:
            lose(cluster, request, Cause.PLAN, culprit=worker_id)
        else:
            _count_death(request, is_planned=was_draining)
            lose(cluster, request, cause, culprit=worker_id, message=worker_id)


def _count_death(request: Request, *, is_planned: bool) -> None:
    """Distinguishes a request that crashes its workers from one that was there by chance: an attempt that made progress
    is not suspect, and neither is one for which the worker had only been asked to reserve. So the requests are not
    blamed if a host with several workers dies."""
    if len(request.output) - request.attempt_output >= INNOCENT_TOKENS:
        request.deaths = 0
    elif not is_planned and request.stage not in UNANSWERED:
        request.deaths += 1


def _depends_on(request: Request, worker_id: str, attempt: int) -> bool:
    """Whether the request's present attempt would be lost with this worker."""
    placement = request.placement
    if attempt != request.attempt or placement is None or request.stage in ENDED:
        return False
    if worker_id == placement.decode_worker:
        return True
    return request.stage in NEEDS_SENDER[SenderEnd.LOST]

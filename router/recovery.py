"""Handles workers that connect, disconnect or fall silent: their attempts are lost. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pdserve.core.types import Role
from router.cluster_state import ClusterState
from router.events import WorkerConnected, WorkerForgotten, WorkerLost
from router.lifecycle import ENDED, NEEDS_SENDER, UNANSWERED, SenderEnd
from router.request import Request
from router.transitions import Cause, Lose

INNOCENT_TOKENS: Final = 8  # an attempt with as many output tokens has made progress


def on_worker_connected(cluster: ClusterState, event: WorkerConnected) -> Iterator[Lose]:
    if cluster.fleet.connected(event.worker_id) is not None:
        # The hello of the new stream came before the end of the old one.
        yield from _worker_gone(cluster, event.worker_id)
    cluster.fleet.connect(event, cluster.now_s)
    if event.role is Role.DECODE:
        cluster.no_decode_since_s = None
    cluster.is_placing_due = True


def on_worker_lost(cluster: ClusterState, event: WorkerLost) -> Iterator[Lose]:
    return _worker_gone(cluster, event.worker_id)


def on_worker_forgotten(cluster: ClusterState, event: WorkerForgotten) -> Iterator[Lose]:
    yield from _worker_gone(cluster, event.worker_id)
    cluster.fleet.forget(event.worker_id)
    cluster.is_placing_due = True


def on_silence(cluster: ClusterState) -> Iterator[Lose]:
    """Loses the attempts on workers that were silent for twice the limit. Their streams still exist, so the router
    sends a Cancel. The memory stays booked until the worker answers or its stream ends."""
    limit_s = 2.0 * cluster.settings.worker_silence_s
    for view in cluster.fleet.workers.values():
        if view.is_connected and cluster.now_s - view.heard_s >= limit_s:
            for booking in list(view.bookings.values()):
                request = cluster.requests.get(booking.request_id)
                if request is not None and _depends_on(request, view.worker_id, booking.attempt):
                    yield Lose(request, Cause.SILENCE, culprit=view.worker_id, message=view.worker_id)


def _worker_gone(cluster: ClusterState, worker_id: str) -> Iterator[Lose]:
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
        request.bookings.discard((worker_id, booking.attempt))
        request.cached_blocks.pop(worker_id, None)
        if not _depends_on(request, worker_id, booking.attempt):
            cluster.forget_if_free(request)
        elif not booking.is_sent:
            yield Lose(request, Cause.PLAN, culprit=worker_id)
        else:
            _count_death(request, is_planned=was_draining)
            yield Lose(request, Cause.DEATH, culprit=worker_id, message=worker_id)


def _count_death(request: Request, *, is_planned: bool) -> None:
    """Counts worker deaths that the request may have caused. An attempt that made progress is not suspect, nor is one
    for which the worker was only asked to reserve memory. So requests are not blamed if a host with several workers
    dies."""
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

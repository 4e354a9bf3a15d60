"""Frames of the live view: the router's state and the requests that ended since the frame before. Pure.

The size of a frame is bounded. Requests on workers come before those in the queue, and `omitted` counts the requests
that did not fit. Recently ended requests are kept for new viewers, and the totals also count the dropped ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain, islice
from typing import Final

from pdserve.core.live import LiveFrame, LiveTotals, LiveWorker
from router.cluster_state import ClusterState
from router.lifecycle import Stage
from router.live_log import live_request
from router.request import Request
from router.view import WorkerView

MAX_IN_PROGRESS: Final = 256  # requests in one frame
_TOTALS: Final = tuple(one.name for one in fields(LiveTotals))


def live_frame(cluster: ClusterState, now_s: float, after: int, most: int = MAX_IN_PROGRESS) -> LiveFrame:
    """The state at `now_s`: at most `most` requests in progress, and those that ended after the first `after` ones."""
    in_progress = list(islice(_in_progress(cluster), most))
    num_in_progress = len(cluster.requests) - len(cluster.ended)
    rows = [
        live_request(
            one, cluster.explanations.last(one.request_id), one.timeline.so_far(one.stage, one.attempt_token_s, now_s)
        )
        for one in in_progress
    ]
    counts = {**cluster.live_log.counts, "arrived": cluster.serial}
    return LiveFrame(
        at_s=now_s,
        queued=cluster.num_queued,
        running=num_in_progress - cluster.num_queued,
        omitted=num_in_progress - len(in_progress),
        totals=LiveTotals(**{name: counts.get(name, 0) for name in _TOTALS}),
        workers=tuple(_worker(view, now_s) for _, view in sorted(cluster.fleet.workers.items())),
        requests=(*rows, *cluster.live_log.after(after)),
    )


def _in_progress(cluster: ClusterState) -> Iterator[Request]:
    """Requests on workers first, then the others, each in order of arrival."""
    alive = [one for one in cluster.requests.values() if one.request_id not in cluster.ended]
    return chain(
        (one for one in alive if one.stage is not Stage.QUEUED), (one for one in alive if one.stage is Stage.QUEUED)
    )


def _worker(view: WorkerView, now_s: float) -> LiveWorker:
    report = view.report
    return LiveWorker(
        worker_id=view.worker_id,
        role=view.role,
        endpoint=view.hello.endpoint,
        is_connected=view.is_connected,
        is_draining=view.is_draining,
        is_drained=view.is_drained,
        running=report.running,
        waiting=report.waiting,
        booked=len(view.bookings),
        num_blocks=view.hello.num_blocks,
        free_blocks=report.free_blocks,
        cached_blocks=report.evictable_blocks,
        context_tokens=report.context_tokens,
        pending_prefill_tokens=report.pending_prefill_tokens,
        steps=report.steps,
        step_s=view.last_step_s,
        silent_s=max(now_s - view.heard_s, 0.0),
        preemptions=report.preemptions,
        version=view.hello.version,
    )

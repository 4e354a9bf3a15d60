"""The router's state for operators: its view of the workers, requests by stage, and frames of the live view. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import Final

from pdserve.core.cost.latency import CostPrior
from pdserve.core.live import LiveFrame, LiveTotals, LiveWorker
from pdserve.core.protocol import Load
from pdserve.core.types import Role
from router.state.cluster_state import ClusterState
from router.state.history import live_request
from router.state.lifecycle import Stage
from router.state.request import Request
from router.state.view import WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    worker_id: str
    incarnation: str
    role: Role
    endpoint: str
    version: str  # with its build; empty if unknown
    num_blocks: int
    is_connected: bool
    is_draining: bool
    is_drained: bool  # by an operator
    is_usable: bool  # may receive new work: connected, not draining, not silent
    silent_s: float
    report: Load
    booked_requests: int  # this router's requests on the worker
    booked_blocks: int
    cost: CostPrior
    prefill_error: float
    decode_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    workers: tuple[WorkerFacts, ...]
    queued: int
    running: int
    releasing: int  # ended requests for which workers still hold memory


def take_snapshot(cluster: ClusterState) -> ClusterSnapshot:
    workers = tuple(
        WorkerFacts(
            worker_id=view.worker_id,
            incarnation=view.incarnation,
            role=view.role,
            endpoint=view.hello.endpoint,
            version=view.hello.version,
            num_blocks=view.hello.num_blocks,
            is_connected=view.is_connected,
            is_draining=view.is_draining,
            is_drained=view.is_drained,
            is_usable=cluster.fleet.is_usable(view, cluster.now_s),
            silent_s=cluster.now_s - view.heard_s,
            report=view.report,
            booked_requests=len(view.bookings),
            booked_blocks=view.totals.blocks,
            cost=view.cost.coefficients,
            prefill_error=view.cost.prefill_error,
            decode_error=view.cost.decode_error,
        )
        for _, view in sorted(cluster.fleet.workers.items())
    )
    queued = cluster.num_queued
    return ClusterSnapshot(
        workers=workers,
        queued=queued,
        running=len(cluster.requests) - len(cluster.ended) - queued,
        releasing=len(cluster.ended),
    )


# --- frames of the live view ----------------------------------------------------------------------------------
# A frame has the router's state, and the requests that ended since the frame before.
#
# Its size is bounded. Requests on workers come before those in the queue, and `omitted` counts the requests that did
# not fit. Recently ended requests are kept for new viewers, and the totals also count the dropped ones.

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

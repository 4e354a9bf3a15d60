"""The router's state for operators: its view of the workers, and the numbers of requests by stage. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.latency import CostPrior
from pdserve.core.protocol import Load
from pdserve.core.types import Role
from router.cluster_state import ClusterState


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

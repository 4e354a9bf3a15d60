"""How requests end: finished, cancelled, expired, rejected, failed, and finally forgotten. Pure.

The client gets exactly one last message. After it a request only waits until no worker holds memory for it.
"""

from __future__ import annotations

from pdserve.core.types import FinishReason
from router.cluster_state import ClusterState
from router.commands import EndCancelled, FailKind, FailRequest, FinishRequest, Outcome
from router.lifecycle import Move, Stage
from router.request import Request


def finish(
    cluster: ClusterState, request: Request, reason: FinishReason, num_output_tokens: int | None = None, *, cancel: bool
) -> None:
    """The answer is complete. `cancel`: workers do not know it and must be told."""
    queued = request.stage is Stage.QUEUED
    if not cluster.move(request, Move.LAST_TOKEN):
        return
    timings = request.timings(cluster.now_s)
    slo = request.facts.slo
    kept = timings.ttft_s <= slo.ttft_s and timings.tpot_s <= slo.tpot_s
    outcome = Outcome.SERVED if kept else Outcome.LATE
    cluster.lengths.observe(request.facts.sampling.max_tokens, len(request.output))
    count = len(request.output) if num_output_tokens is None else min(num_output_tokens, len(request.output))
    cluster.out.append(
        FinishRequest(
            request_id=request.request_id,
            reason=reason,
            usage=request.usage(count),
            timings=timings,
            outcome=outcome,
            slices=request.timeline.slices,
        )
    )
    _end(cluster, request, outcome, was_queued=queued, cancel=cancel)


def cancel(cluster: ClusterState, request: Request) -> None:
    """The client disconnected."""
    queued = request.stage is Stage.QUEUED
    if not cluster.move(request, Move.CLIENT_LEFT):
        return
    cluster.out.append(
        EndCancelled(
            request_id=request.request_id,
            num_output_tokens=len(request.output),
            timings=request.timings(cluster.now_s),
            slices=request.timeline.slices,
        )
    )
    _end(cluster, request, Outcome.CANCELLED, was_queued=queued, cancel=True, why="the client left")


def expire(cluster: ClusterState, request: Request) -> None:
    """The deadline passed."""
    stage = request.stage
    if not cluster.move(request, Move.DEADLINE):
        return
    message = f"the deadline passed while {stage.value}"
    _fail(cluster, request, FailKind.DEADLINE, message, Outcome.EXPIRED, stage=stage)
    _end(cluster, request, Outcome.EXPIRED, was_queued=stage is Stage.QUEUED, cancel=True, why=message)


def turn_away(
    cluster: ClusterState,
    request: Request,
    kind: FailKind,
    message: str,
    retry_after_s: float | None,
    role: str = "",
) -> None:
    """Never placed: overload, or no worker."""
    if not cluster.move(request, Move.TURNED_AWAY):
        return
    _fail(cluster, request, kind, message, Outcome.REFUSED, retry_after_s=retry_after_s, role=role)
    _end(cluster, request, Outcome.REFUSED, was_queued=True, cancel=False, why=message, retry_after_s=retry_after_s)


def give_up(
    cluster: ClusterState, request: Request, kind: FailKind, message: str, *, field: str = "", role: str = ""
) -> None:
    """All attempts were used, or the request itself is the cause."""
    queued = request.stage is Stage.QUEUED
    if not cluster.move(request, Move.GIVEN_UP):
        return
    _fail(cluster, request, kind, message, Outcome.FAILED, field=field, role=role)
    _end(cluster, request, Outcome.FAILED, was_queued=queued, cancel=True, why=message)


def forget_if_free(cluster: ClusterState, request: Request) -> None:
    """Forgets an ended request once no worker holds memory for it."""
    if request.request_id in cluster.ended and not request.holds and cluster.move(request, Move.RELEASED):
        cluster.ended.discard(request.request_id)
        cluster.timers.releases.clear(request.request_id)
        del cluster.requests[request.request_id]


def forget_overdue(cluster: ClusterState) -> None:
    """Bounds the router's memory if workers never send Released."""
    while (request_id := cluster.timers.releases.pop_due(cluster.now_s)) is not None:
        request = cluster.requests[request_id]
        for worker_id, attempt in sorted(request.holds):
            cluster.counters["never_released"] += 1
            cluster.drop_hold(request, worker_id, attempt)
        forget_if_free(cluster, request)


def _fail(
    cluster: ClusterState,
    request: Request,
    kind: FailKind,
    message: str,
    outcome: Outcome,
    *,
    retry_after_s: float | None = None,
    role: str = "",
    stage: Stage | None = None,
    field: str = "",
) -> None:
    cluster.out.append(
        FailRequest(
            request_id=request.request_id,
            kind=kind,
            message=message,
            outcome=outcome,
            retry_after_s=retry_after_s,
            role=role,
            stage=stage.value if stage is not None else "",
            field=field,
            timings=request.timings(cluster.now_s),
            slices=request.timeline.slices,
        )
    )


def _end(
    cluster: ClusterState,
    request: Request,
    outcome: Outcome,
    *,
    was_queued: bool,
    cancel: bool,
    why: str = "",
    retry_after_s: float | None = None,
) -> None:
    if was_queued:
        cluster.dequeue(request)
    if cancel:
        cluster.cancel_attempt(request)
    cluster.settle(request)
    cluster.counters[f"outcome_{outcome.value}"] += 1
    cluster.explanations.ended(request, outcome, cluster.now_s, why=why, retry_after_s=retry_after_s)
    cluster.ended.add(request.request_id)
    cluster.timers.deadlines.clear(request.request_id)
    cluster.timers.releases.set(request.request_id, cluster.now_s + cluster.settings.release_timeout_s)
    forget_if_free(cluster, request)

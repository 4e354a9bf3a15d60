"""How requests end: finished, cancelled, expired, rejected, failed, and finally forgotten. Pure.

The client gets exactly one last message. After it a request only waits until no worker holds memory for it.
"""

from __future__ import annotations

from pdserve.core.types import FinishReason
from router.commands import EndCancelled, FailKind, FailRequest, FinishRequest, Outcome
from router.ledger import Ledger
from router.lifecycle import Move, Stage
from router.request import Request


def finish(
    ledger: Ledger, request: Request, reason: FinishReason, num_output_tokens: int | None = None, *, cancel: bool
) -> None:
    """The answer is complete. `cancel`: workers do not know it and must be told."""
    queued = request.stage is Stage.QUEUED
    if not ledger.move(request, Move.LAST_TOKEN):
        return
    timings = request.timings(ledger.now_s)
    slo = request.facts.slo
    kept = timings.ttft_s <= slo.ttft_s and timings.tpot_s <= slo.tpot_s
    outcome = Outcome.SERVED if kept else Outcome.LATE
    ledger.lengths.observe(request.facts.sampling.max_tokens, len(request.output))
    count = len(request.output) if num_output_tokens is None else min(num_output_tokens, len(request.output))
    ledger.out.append(
        FinishRequest(
            request_id=request.request_id,
            reason=reason,
            usage=request.usage(count),
            timings=timings,
            outcome=outcome,
            slices=request.timeline.slices,
        )
    )
    _end(ledger, request, outcome, was_queued=queued, cancel=cancel)


def cancel(ledger: Ledger, request: Request) -> None:
    """The client disconnected."""
    queued = request.stage is Stage.QUEUED
    if not ledger.move(request, Move.CLIENT_LEFT):
        return
    ledger.out.append(
        EndCancelled(
            request_id=request.request_id,
            num_output_tokens=len(request.output),
            timings=request.timings(ledger.now_s),
            slices=request.timeline.slices,
        )
    )
    _end(ledger, request, Outcome.CANCELLED, was_queued=queued, cancel=True, why="the client left")


def expire(ledger: Ledger, request: Request) -> None:
    """The deadline passed."""
    stage = request.stage
    if not ledger.move(request, Move.DEADLINE):
        return
    message = f"the deadline passed while {stage.value}"
    _fail(ledger, request, FailKind.DEADLINE, message, Outcome.EXPIRED, stage=stage)
    _end(ledger, request, Outcome.EXPIRED, was_queued=stage is Stage.QUEUED, cancel=True, why=message)


def turn_away(
    ledger: Ledger,
    request: Request,
    kind: FailKind,
    message: str,
    retry_after_s: float | None,
    role: str = "",
) -> None:
    """Never placed: overload, or no worker."""
    if not ledger.move(request, Move.TURNED_AWAY):
        return
    _fail(ledger, request, kind, message, Outcome.REFUSED, retry_after_s=retry_after_s, role=role)
    _end(ledger, request, Outcome.REFUSED, was_queued=True, cancel=False, why=message, retry_after_s=retry_after_s)


def give_up(ledger: Ledger, request: Request, kind: FailKind, message: str, *, field: str = "", role: str = "") -> None:
    """All attempts were used, or the request itself is the cause."""
    queued = request.stage is Stage.QUEUED
    if not ledger.move(request, Move.GIVEN_UP):
        return
    _fail(ledger, request, kind, message, Outcome.FAILED, field=field, role=role)
    _end(ledger, request, Outcome.FAILED, was_queued=queued, cancel=True, why=message)


def forget_if_free(ledger: Ledger, request: Request) -> None:
    """Forgets an ended request once no worker holds memory for it."""
    if request.request_id in ledger.ended and not request.holds and ledger.move(request, Move.RELEASED):
        ledger.ended.discard(request.request_id)
        ledger.timers.releases.clear(request.request_id)
        del ledger.requests[request.request_id]


def forget_overdue(ledger: Ledger) -> None:
    """Bounds the router's memory if workers never send Released."""
    while (request_id := ledger.timers.releases.pop_due(ledger.now_s)) is not None:
        request = ledger.requests[request_id]
        for worker_id, attempt in sorted(request.holds):
            ledger.counters["never_released"] += 1
            ledger.drop_hold(request, worker_id, attempt)
        forget_if_free(ledger, request)


def _fail(
    ledger: Ledger,
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
    ledger.out.append(
        FailRequest(
            request_id=request.request_id,
            kind=kind,
            message=message,
            outcome=outcome,
            retry_after_s=retry_after_s,
            role=role,
            stage=stage.value if stage is not None else "",
            field=field,
            timings=request.timings(ledger.now_s),
            slices=request.timeline.slices,
        )
    )


def _end(
    ledger: Ledger,
    request: Request,
    outcome: Outcome,
    *,
    was_queued: bool,
    cancel: bool,
    why: str = "",
    retry_after_s: float | None = None,
) -> None:
    if was_queued:
        ledger.dequeue(request)
    if cancel:
        ledger.cancel_attempt(request)
    ledger.settle(request)
    ledger.counters[f"outcome_{outcome.value}"] += 1
    ledger.explanations.ended(request, outcome, ledger.now_s, why=why, retry_after_s=retry_after_s)
    ledger.ended.add(request.request_id)
    ledger.timers.deadlines.clear(request.request_id)
    ledger.timers.releases.set(request.request_id, ledger.now_s + ledger.settings.release_timeout_s)
    forget_if_free(ledger, request)

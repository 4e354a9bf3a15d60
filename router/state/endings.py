"""Applies the ends of requests and of their attempts to the state. Pure.

Handlers return what happened to a request, as one of the classes below. APPLY maps each class to the function of its
consequences. The client gets exactly one last message. After that, the request only waits until no worker holds memory
for it.

A lost or migrated attempt is cancelled on every connected worker that holds memory of it. The next attempt recomputes
the prompt and the output so far, or gets the KV of a migrated answer from the worker that it leaves. The token at each
position depends only on seed and position, so the stream continues without a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from pdserve.core.durations import backoff_s
from pdserve.core.types import FinishReason
from router.state.cluster_state import ClusterState
from router.state.interface import Command, EndCancelled, FailKind, FailRequest, FinishRequest, Outcome
from router.state.lifecycle import WAITING, Move
from router.state.request import Request

FIRST_BACKOFF_S: Final = 0.05
LONGEST_BACKOFF_S: Final = 2.0
MOST_CRASHES: Final = 32  # of workers that had a request, so that none ends workers without bound
RELEASE_TIMEOUT_S: Final = 120.0  # how long to wait for Released after the end of a request


class Finish(NamedTuple):
    """The answer is complete."""

    request: Request
    reason: FinishReason
    cancel: bool  # workers must be sent a Cancel, because they do not know the end
    num_output_tokens: int | None = None  # tokens that count, if a stop string ended the answer


class Disconnect(NamedTuple):
    """The client disconnected."""

    request: Request


class Expire(NamedTuple):
    """The deadline passed."""

    request: Request


class Reject(NamedTuple):
    """The request was never placed: overload, or no worker."""

    request: Request
    kind: FailKind
    message: str
    retry_after_s: float
    role: str = ""


class Fail(NamedTuple):
    """All attempts were used, or the request itself is the cause."""

    request: Request
    kind: FailKind
    message: str
    field: str = ""
    role: str = ""
    retry_after_s: float | None = None


class Cause(Enum):
    """Why an attempt was lost."""

    DEATH = "a worker died"
    SILENCE = "a worker fell silent"
    TRANSFER = "the KV transfer failed"
    INTERNAL = "a worker failed"
    GAP = "tokens are missing"
    PLAN = "the chosen prefill worker left before it received the prompt"


FAILURES: Final = {
    Cause.DEATH: FailKind.KV_LOST,
    Cause.SILENCE: FailKind.UNAVAILABLE,
    Cause.TRANSFER: FailKind.TRANSFER,
    Cause.INTERNAL: FailKind.INTERNAL,
    Cause.GAP: FailKind.INTERNAL,
    Cause.PLAN: FailKind.UNAVAILABLE,
}
WORKER_LEFT: Final = (Cause.DEATH, Cause.SILENCE, Cause.PLAN)


class Lose(NamedTuple):
    """The current attempt is lost. From now on `culprit`, or else the pair, is avoided while there are others."""

    request: Request
    cause: Cause
    culprit: str = ""  # worker id
    message: str = ""
    is_cause: bool = False  # the request is assumed to end its workers


class Migrate(NamedTuple):
    """The answer leaves a draining worker. It is no failure, so it counts for no limit, and nothing is avoided."""

    request: Request


Ending = Finish | Disconnect | Expire | Reject | Fail | Lose | Migrate


def apply_ending(cluster: ClusterState, ending: Ending) -> list[Command]:
    """Applies an ending at once."""
    return APPLY[type(ending)](cluster, ending)


def _finish(cluster: ClusterState, end: Finish) -> list[Command]:
    request = end.request
    was_queued = request.stage in WAITING
    if not cluster.move(request, Move.LAST_TOKEN):
        return []
    timings = request.timings(cluster.now_s)
    slo, num_tokens = request.facts.slo, len(request.output)
    is_met = timings.ttft_s <= slo.ttft_s and timings.tpot_s <= slo.tpot_s
    outcome = Outcome.SERVED if is_met else Outcome.LATE
    message = FinishRequest(
        request_id=request.request_id,
        reason=end.reason,
        usage=request.usage(num_tokens if end.num_output_tokens is None else min(end.num_output_tokens, num_tokens)),
        timings=timings,
        outcome=outcome,
        slices=request.timeline.slices,
    )
    return [message, *_end(cluster, request, outcome, was_queued=was_queued, cancel=end.cancel)]


def _disconnect(cluster: ClusterState, end: Disconnect) -> list[Command]:
    request = end.request
    was_queued = request.stage in WAITING
    if not cluster.move(request, Move.CLIENT_LEFT):
        return []
    message = EndCancelled(
        request_id=request.request_id,
        num_output_tokens=len(request.output),
        timings=request.timings(cluster.now_s),
        slices=request.timeline.slices,
    )
    return [message, *_end(cluster, request, Outcome.CANCELLED, was_queued=was_queued, why="the client disconnected")]


def _expire(cluster: ClusterState, end: Expire) -> list[Command]:
    stage = end.request.stage.value
    message = f"the deadline passed while {stage}"
    return _fail(cluster, end.request, Move.DEADLINE, Outcome.EXPIRED, FailKind.DEADLINE, message, stage=stage)


def _reject(cluster: ClusterState, end: Reject) -> list[Command]:
    return _fail(
        cluster,
        end.request,
        Move.REJECTED,
        Outcome.REJECTED,
        end.kind,
        end.message,
        retry_after_s=end.retry_after_s,
        role=end.role,
    )


def _give_up(cluster: ClusterState, end: Fail) -> list[Command]:
    return _fail(
        cluster,
        end.request,
        Move.GIVEN_UP,
        Outcome.FAILED,
        end.kind,
        end.message,
        role=end.role,
        field=end.field,
        retry_after_s=end.retry_after_s,
    )


def _lose(cluster: ClusterState, loss: Lose) -> list[Command]:
    request, cause, fleet = loss.request, loss.cause, cluster.fleet
    placement = request.placement
    assert placement is not None, "only a placed request can be lost"
    if loss.culprit:
        request.avoid_workers.add(fleet.key(loss.culprit))
    if placement.prefill_worker and cause is not Cause.PLAN:
        request.avoid_pairs.add((fleet.key(placement.prefill_worker), fleet.key(placement.decode_worker)))
    cluster.counters[f"lost_{cause.name.lower()}"] += 1
    if cause not in (Cause.PLAN, Cause.DEATH):  # attempts.py has counted deaths
        request.lost_attempts += 1
    if loss.is_cause:
        message = f"{request.deaths} workers crashed while they computed this request"
        return _give_up(cluster, Fail(request, FailKind.INTERNAL, message))
    if request.num_crashes >= MOST_CRASHES:
        message = f"{request.num_crashes} workers crashed while they had this request"
        return _give_up(cluster, Fail(request, FailKind.INTERNAL, message))
    if request.lost_attempts >= cluster.settings.max_attempts:
        why = f"{cause.value}: {loss.message}" if loss.message else cause.value
        message = f"{request.lost_attempts} attempts were lost, the last since {why}"
        return _give_up(cluster, Fail(request, FAILURES[cause], message))
    if not cluster.move(request, Move.LOST):
        return []
    # A started answer continues without a backoff. The exception is a repeated failure without a lost worker, which
    # an immediate retry would only repeat.
    is_fresh = request.lost_attempts <= 1 or cause in WORKER_LEFT
    wait_s = 0.0 if is_fresh else backoff_s(FIRST_BACKOFF_S, LONGEST_BACKOFF_S, request.lost_attempts - 2)
    return cluster.requeue(request, wait_s)


def _migrate(cluster: ClusterState, end: Migrate) -> list[Command]:
    request = end.request
    if not cluster.move(request, Move.MIGRATED):
        return []
    cluster.counters["migrated"] += 1
    request.migrations += 1
    cluster.migrating.add(request.request_id)
    return cluster.requeue(request, 0.0)


def _fail(
    cluster: ClusterState,
    request: Request,
    move: Move,
    outcome: Outcome,
    kind: FailKind,
    message: str,
    *,
    retry_after_s: float | None = None,
    role: str = "",
    stage: str = "",
    field: str = "",
) -> list[Command]:
    """The request ends with an error."""
    was_queued = request.stage in WAITING
    if not cluster.move(request, move):
        return []
    error = FailRequest(
        request_id=request.request_id,
        kind=kind,
        message=message,
        outcome=outcome,
        retry_after_s=retry_after_s,
        role=role,
        stage=stage,
        field=field,
        timings=request.timings(cluster.now_s),
        slices=request.timeline.slices,
    )
    return [error, *_end(cluster, request, outcome, was_queued=was_queued, why=message, retry_after_s=retry_after_s)]


def _end(
    cluster: ClusterState,
    request: Request,
    outcome: Outcome,
    *,
    was_queued: bool,
    cancel: bool = True,
    why: str = "",
    retry_after_s: float | None = None,
) -> list[Command]:
    if was_queued:
        cluster.dequeue(request)
    commands = cluster.cancel_attempt(request) if cancel else []
    cluster.settle(request)
    is_whole = outcome in (Outcome.SERVED, Outcome.LATE)
    cluster.lengths.ended(request.facts, len(request.output), is_whole=is_whole)
    if request.conversation is not None:
        hashes = cluster.sessions.ended(request.conversation, cluster.now_s, is_served=bool(request.output))
        commands += cluster.end_text(request.conversation, hashes)
    cluster.counters[f"outcome_{outcome.value}"] += 1
    cluster.note_end(request, outcome, why, retry_after_s)
    cluster.ended.add(request.request_id)
    cluster.migrating.discard(request.request_id)
    cluster.timers.deadlines.clear(request.request_id)
    cluster.timers.releases.set(request.request_id, cluster.now_s + RELEASE_TIMEOUT_S)
    cluster.forget_if_free(request)
    return commands


APPLY: Final[Mapping[type, Callable[[ClusterState, Any], list[Command]]]] = {
    Finish: _finish,
    Disconnect: _disconnect,
    Expire: _expire,
    Reject: _reject,
    Fail: _give_up,
    Lose: _lose,
    Migrate: _migrate,
}

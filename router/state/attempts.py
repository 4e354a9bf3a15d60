"""Handles workers' messages about a request's current attempt (grant, first token, KV, tokens, end), and lost workers.
Pure.

Every message names its attempt. A message of an older attempt, of a forgotten request, or from a worker that is not
part of the attempt is late: it is counted and ignored. The streams of the two workers are not ordered relative to each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.core.attempt import AttemptKey, FailureKind, RefusalReason
from pdserve.core.durations import backoff_s, clamped_s
from pdserve.core.grammar import GrammarKind
from pdserve.core.protocol import (
    Admit,
    AttemptFailed,
    FirstToken,
    Granted,
    Prefill,
    PullEnded,
    Refused,
    Released,
    TokenRow,
    TokensArrived,
    TransferEnded,
)
from pdserve.core.results import Phase
from pdserve.core.types import FinishReason, Path, Role, TokenOut
from router.state.cluster_state import ClusterState
from router.state.endings import Cause, Ending, Expire, Fail, Finish, Lose, apply_ending
from router.state.interface import (
    AdaptersChanged,
    Command,
    EmitTokens,
    FailKind,
    WorkerConnected,
    WorkerForgotten,
    WorkerLost,
)
from router.state.lifecycle import COMPUTES, ENDED, IN_BATCH, NEEDS_SENDER, Move, SenderEnd
from router.state.request import Placement, Request

FIRST_REFUSAL_S: Final = 0.01  # backoff before a declined request is placed again; doubles each time
LONGEST_REFUSAL_S: Final = 0.5
GRAMMAR_FIELDS: Final = frozenset(kind.value for kind in GrammarKind)
LONGEST_CLOSED_S: Final = 5.0  # a worker that declined gets no requests for at most this time
UNREACHABLE_S: Final = 2.0  # nothing is pulled from a worker for this time after it did not answer
#: Reasons that concern one request alone.
NOT_BUSY: Final = (RefusalReason.TOO_LARGE, RefusalReason.NO_ADAPTER, RefusalReason.NO_KV)


def on_granted(cluster: ClusterState, event: Granted) -> Sequence[Command]:
    found = _present(cluster, event.worker_id, event.request_id, event.attempt)
    if found is None:
        return ()
    request, placement = found
    if event.worker_id != placement.decode_worker or (event.grant is None) is not (placement.path is Path.LOCAL):
        _wrong_sender(cluster, request, Move.GRANTED)
        return ()
    if event.grant_s > 0.0:
        request.timeline.report(Phase.RESERVE, event.grant_s, event.worker_id)
        request.timeline.is_accounted = True
    request.grant_s = event.grant_s
    if not cluster.move(request, Move.GRANTED):
        return ()
    view = cluster.fleet.workers[event.worker_id]
    view.granted_after(cluster.now_s - request.placed_s, request.awaits_s, request.half_step_s)
    request.refusals = 0
    request.granted_s = cluster.now_s
    request.add_reported(event)
    if event.grant is None:
        return ()
    reservation = cluster.reservation(placement.prefill_worker, request.request_id, request.attempt)
    assert reservation is not None, "a lost prefill worker ends the attempt"
    reservation.is_sent = True
    prefill = Prefill(
        key=AttemptKey(placement.prefill_worker, request.request_id, request.attempt),
        grant=event.grant,
        output_token_ids=request.output_ids,
        deadline_s=request.deadline_left_s(cluster.now_s),
        waited_s=request.waited_s(cluster.now_s),
        reuse_within_s=request.reuse_within_s,
        source=placement.source,
    )
    return (prefill,)


def on_refused(cluster: ClusterState, event: Refused) -> Sequence[Command]:
    request = cluster.requests.get(event.request_id)
    if request is not None:
        cluster.counters[f"refused_{event.reason.value}"] += 1
    view = cluster.fleet.connected(event.worker_id)
    if view is not None and event.reason not in NOT_BUSY:
        closed_s = clamped_s(event.retry_after_s, FIRST_REFUSAL_S, LONGEST_CLOSED_S)
        view.closed_until_s = max(view.closed_until_s, cluster.now_s + closed_s)
    found = _present(cluster, event.worker_id, event.request_id, event.attempt)
    if request is not None:
        # Also true for an older attempt: the worker has reported that it holds no memory for it.
        cluster.drop_reservation(request, event.worker_id, event.attempt)
        cluster.forget_if_free(request)
    if found is None:
        return ()
    request, _ = found
    if event.reason is RefusalReason.TOO_LARGE:
        request.too_large_for.add(cluster.fleet.key(event.worker_id))
    if event.reason is RefusalReason.NO_ADAPTER and view is not None:
        view.adapters -= {request.facts.adapter}
    if not cluster.move(request, Move.DECLINED):
        return ()
    wait_s = backoff_s(FIRST_REFUSAL_S, LONGEST_REFUSAL_S, request.refusals)
    request.refusals += 1
    request.num_tried -= 1
    return cluster.requeue(request, 0.0 if request.refusals == 1 else wait_s)


def on_first_token(cluster: ClusterState, event: FirstToken) -> Sequence[Command | Ending]:
    found = _present(cluster, event.worker_id, event.request_id, event.attempt)
    if found is None:
        return ()
    request, placement = found
    if event.worker_id != placement.prefill_worker:
        _wrong_sender(cluster, request, Move.FIRST_TOKEN)
        return ()
    _account_prefill(request, event.queue_s, event.prefill_s, placement.prefill_worker)
    if not cluster.move(request, Move.FIRST_TOKEN):
        return ()
    view = cluster.fleet.workers[placement.prefill_worker]
    if view.totals.prefills == 1:  # otherwise the time may include the prefill of other requests
        view.replies.observe(cluster.now_s - request.granted_s - event.queue_s - event.prefill_s)
    view.computed(view.reservations[request.request_id, request.attempt], cluster.now_s)
    view.arrived(view.reservations[request.request_id, request.attempt])
    cluster.is_placing_due = True
    _prefilled(request, placement.prefill_worker, view.hello.block_size, event)
    tokens = _emit(cluster, request, (event.token,))
    if event.finish is not None:
        cluster.frees_itself(request, event.worker_id)
        return tokens, Finish(request, event.finish, cancel=True)
    if _is_full(request):
        # The worker should have reported it.
        return tokens, Finish(request, FinishReason.LENGTH, cancel=True)
    if request.stage in IN_BATCH:
        _joined(cluster, request, placement)
    key = AttemptKey(placement.decode_worker, request.request_id, request.attempt)
    return tokens, Admit(key=key, first_token_id=event.token.token_id)


def on_transfer_ended(cluster: ClusterState, event: TransferEnded) -> Sequence[Command | Ending]:
    found = _present(cluster, event.worker_id, event.request_id, event.attempt)
    if found is None:
        return ()
    request, placement = found
    is_from_prefill = event.worker_id == placement.prefill_worker
    if is_from_prefill and event.is_committed:
        request.add_reported(event)
        return ()
    if is_from_prefill and request.stage not in NEEDS_SENDER[SenderEnd.TRANSFER_FAILED]:
        cluster.counters["sender_disagrees"] += 1
        return ()
    if not event.is_committed:
        return (Lose(request, Cause.TRANSFER, message=event.error),)
    if not cluster.move(request, Move.COMMITTED):
        return ()
    request.add_reported(event)
    attempt_tokens = request.facts.num_prompt_tokens + request.attempt_output
    cluster.fleet.measured(placement.prefill_worker, placement.decode_worker, event.num_bytes, event.busy_s)
    block_size = cluster.fleet.workers[placement.decode_worker].hello.block_size
    request.holds(placement.decode_worker, attempt_tokens // block_size)
    if cluster.sender_of(request):
        cluster.counters["migrated_with_kv"] += 1
    if request.stage in IN_BATCH:
        _joined(cluster, request, placement)
    return ()


def on_pull_ended(cluster: ClusterState, event: PullEnded) -> Sequence[Command]:
    found = _present(cluster, event.worker_id, event.request_id, event.attempt)
    if found is None:
        return ()
    request, placement = found
    if event.worker_id != (placement.prefill_worker or placement.decode_worker):
        cluster.counters["wrong_sender"] += 1
        return ()
    view = cluster.fleet.workers[event.worker_id]
    reservation = view.reservations[request.request_id, request.attempt]
    view.pulled(reservation)
    expected = placement.source
    source = cluster.fleet.connected(event.source)
    if source is None or expected is None or expected.worker_id != event.source:
        return ()
    has_failed = not event.num_tokens
    cluster.counters["failed_pulls" if has_failed else "pulls"] += 1
    view.pull_ended(event.source, cluster.now_s, has_failed=has_failed, pull_s=event.pull_s)
    if event.is_unreachable:
        source.pulls_closed_until_s = cluster.now_s + UNREACHABLE_S
    if event.num_bytes:  # also of a part
        is_whole = not has_failed
        cluster.fleet.measured(event.source, event.worker_id, event.num_bytes, event.busy_s, is_whole=is_whole)
    rest_s = event.pull_s - event.busy_s - reservation.pull_read_s
    if not has_failed or rest_s > source.pulls.typical_s:  # a pull that was given up would have taken longer
        source.pulls.observe(rest_s)
    return ()


def on_tokens(cluster: ClusterState, event: TokensArrived) -> list[Command]:
    view = cluster.fleet.connected(event.worker_id)
    if view is not None:
        view.stepped(event, cluster.now_s)
    commands: list[Command] = []
    for row in event.rows:
        _on_row(cluster, event.worker_id, row, commands)
    return commands


def on_attempt_failed(cluster: ClusterState, event: AttemptFailed) -> Sequence[Command | Ending]:
    found = _present(cluster, event.worker_id, event.request_id, event.attempt)
    if found is None:
        return ()
    request, placement = found
    if event.worker_id == placement.prefill_worker and request.stage not in NEEDS_SENDER[SenderEnd.FAILED]:
        cluster.counters["sender_disagrees"] += 1
        return ()
    match event.kind:
        case FailureKind.DEADLINE:
            return (Expire(request),)
        case FailureKind.INVALID:
            field, message = _invalid_field(event.message)
            return (Fail(request, FailKind.INVALID, message, field=field),)
        case FailureKind.TRANSFER:
            return (Lose(request, Cause.TRANSFER, message=event.message),)
        case FailureKind.INTERNAL:
            return (Lose(request, Cause.INTERNAL, culprit=event.worker_id, message=event.message),)


def _invalid_field(message: str) -> tuple[str, str]:
    """The field that a worker's message about a grammar names at its beginning."""
    field, separator, rest = message.partition(": ")
    return (field, rest) if separator and field in GRAMMAR_FIELDS else ("request", message)


def on_released(cluster: ClusterState, event: Released) -> Sequence[Command | Ending]:
    request = cluster.requests.get(event.request_id)
    if request is None or (event.worker_id, event.attempt) not in request.reservations:
        cluster.counters["late"] += 1
        return ()
    placement = request.placement
    is_present = request.attempt == event.attempt and placement is not None and request.request_id not in cluster.ended
    cluster.drop_reservation(request, event.worker_id, event.attempt)
    if is_present and placement is not None:
        is_sender = event.worker_id == placement.prefill_worker
        if not is_sender or request.stage in NEEDS_SENDER[SenderEnd.RELEASED]:
            # The worker freed memory that the attempt still needs, and gave no reason.
            return (Lose(request, Cause.INTERNAL, culprit=event.worker_id, message="released too early"),)
    cluster.forget_if_free(request)
    return ()


def _on_row(cluster: ClusterState, worker_id: str, row: TokenRow, commands: list[Command]) -> None:
    """Appends to `commands`."""
    _, request_id, attempt = row.key
    found = _present(cluster, worker_id, request_id, attempt)
    if found is None:
        return
    request, placement = found
    if worker_id != placement.decode_worker:
        _wrong_sender(cluster, request, Move.TOKENS)
        return
    seen = len(request.output) - row.output_index
    if seen < 0:
        commands += apply_ending(cluster, Lose(request, Cause.GAP, culprit=worker_id))
        return
    room = request.facts.sampling.max_tokens - len(request.output)
    tokens = row.tokens[seen : seen + room]
    if seen:
        cluster.counters["repeated_tokens"] += min(seen, len(row.tokens))
    if not cluster.move(request, Move.TOKENS):
        return
    view = cluster.fleet.workers[worker_id]
    reservation = view.reservations[request_id, attempt]
    if reservation.prefill_tokens:
        spent_s = cluster.now_s - request.placed_s - request.awaits_s
        view.first_tokens.observe(spent_s - row.queue_s - row.prefill_s)
        view.computed(reservation, cluster.now_s)
        view.joined(reservation, request.first_token_s or cluster.now_s)
        cluster.is_placing_due = True
        # A decode worker counts the wait of a local prompt from the arrival of Reserve, so it includes the grant.
        _account_prefill(request, row.queue_s - request.grant_s, row.prefill_s, worker_id)
        request.timeline.close(Phase.MESSAGES, cluster.now_s, request.attempt, works_on=True)
        _prefilled(request, worker_id, view.hello.block_size, row)
    if row.decode_s or row.decode_queue_s or row.preempted_s or row.preemptions:  # few rows report any
        _account_decode(request, row, worker_id)
    if tokens:
        view.grew(reservation, len(tokens))
        commands.append(_emit(cluster, request, tokens))
    if row.finish is not None or _is_full(request):
        request.timeline.is_accounted = row.finish is not None
        view.left_batch(reservation)
        view.freed_s = cluster.now_s
        cluster.is_placing_due = True
        # A worker that reports `finish` frees its memory itself.
        ending = Finish(request, row.finish or FinishReason.LENGTH, cancel=row.finish is None)
        commands += apply_ending(cluster, ending)


def _joined(cluster: ClusterState, request: Request, placement: Placement) -> None:
    """The decode worker has the KV and the first token: the sequence is in the batch."""
    view = cluster.fleet.workers[placement.decode_worker]
    reservation = view.reservations[request.request_id, request.attempt]
    view.joined(reservation, request.first_token_s or cluster.now_s)
    view.freed_s = cluster.now_s
    cluster.is_placing_due = True


def _present(cluster: ClusterState, worker_id: str, request_id: str, attempt: int) -> tuple[Request, Placement] | None:
    """The request and its placement if the message belongs to the current attempt. Otherwise counts a late message and
    returns None."""
    request = cluster.requests.get(request_id)
    placement = None if request is None else request.placement
    if (
        request is None
        or placement is None
        or request.attempt != attempt
        or worker_id not in (placement.decode_worker, placement.prefill_worker)
        or request_id in cluster.ended
        or (worker_id, attempt) not in request.reservations
    ):
        cluster.counters["late"] += 1
        return None
    return request, placement


def _wrong_sender(cluster: ClusterState, request: Request, move: Move) -> None:
    """Counts a message that only the other worker of the attempt, or an attempt on the other path, may send."""
    cluster.counters["wrong_sender"] += 1
    request.remember(move, None)


def _account_prefill(request: Request, queue_s: float, prefill_s: float, worker_id: str) -> None:
    request.timeline.report(Phase.PREFILL_QUEUE, queue_s, worker_id)
    request.timeline.report(Phase.PREFILL, prefill_s, worker_id)
    request.timeline.is_accounted = True


def _account_decode(request: Request, row: TokenRow, worker_id: str) -> None:
    request.timeline.report(Phase.DECODE_QUEUE, row.decode_queue_s, worker_id)
    request.timeline.report(Phase.DECODE, row.decode_s, worker_id)
    request.timeline.report(Phase.PREEMPTED, row.preempted_s, worker_id)
    request.preemptions += row.preemptions


def _prefilled(request: Request, worker_id: str, block_size: int, durations: FirstToken | TokenRow) -> None:
    if request.cached_tokens is None:
        request.cached_tokens = durations.cached_tokens
    attempt_tokens = request.facts.num_prompt_tokens + request.attempt_output
    request.holds(worker_id, attempt_tokens // block_size)


def _emit(cluster: ClusterState, request: Request, tokens: Sequence[TokenOut]) -> EmitTokens:
    if request.first_token_s is None:
        request.first_token_s = cluster.now_s
    weights = ""
    if request.first_emitted_s is None:
        request.first_emitted_s, weights = cluster.now_s, request.weights
    request.last_token_s = cluster.now_s
    first_index = len(request.output)
    request.output.extend([token.token_id for token in tokens])
    if request.lost_attempts and _has_progressed(request):
        request.lost_attempts = 0
    emitted = tuple(tokens)
    return EmitTokens(request_id=request.request_id, first_index=first_index, tokens=emitted, weights=weights)


def _has_progressed(request: Request) -> bool:
    """In its current attempt, so whatever ended the attempts before was not the request."""
    return len(request.output) - request.attempt_output >= INNOCENT_TOKENS


def _is_full(request: Request) -> bool:
    return len(request.output) >= request.facts.sampling.max_tokens


# --- workers that connect, disconnect or fall silent ----------------------------------------------------------
# Their attempts are lost.

INNOCENT_TOKENS: Final = 8  # an attempt with as many output tokens has made progress
CRASH_WINDOW_S: Final = 60.0  # for which a router remembers crashes


def on_worker_connected(cluster: ClusterState, event: WorkerConnected) -> list[Command]:
    # If it is connected, the hello of the new stream came before the end of the old one.
    commands = _worker_gone(cluster, event.worker_id)
    cluster.fleet.connect(event, cluster.now_s)
    if event.role is Role.DECODE:
        cluster.no_decode_since_s = None
    cluster.is_placing_due = True
    return commands


def on_adapters_changed(cluster: ClusterState, event: AdaptersChanged) -> Sequence[Command]:
    view = cluster.fleet.connected(event.worker_id)
    if view is not None:
        view.adapters = frozenset(event.adapters)
        view.freed_s = cluster.now_s  # requests that wait for an adapter ask again
        cluster.is_placing_due = True
    return ()


def on_worker_lost(cluster: ClusterState, event: WorkerLost) -> list[Command]:
    return _worker_gone(cluster, event.worker_id)


def on_worker_forgotten(cluster: ClusterState, event: WorkerForgotten) -> list[Command]:
    commands = _worker_gone(cluster, event.worker_id)
    cluster.fleet.forget(event.worker_id)
    cluster.is_placing_due = True
    return commands


def on_silence(cluster: ClusterState) -> list[Command]:
    """Loses the attempts on workers that were silent for twice the limit. Their streams still exist, so the router
    sends a Cancel. The memory stays reserved until the worker answers or its stream ends."""
    limit_s = 2.0 * cluster.settings.worker_silence_s
    commands: list[Command] = []
    for view in cluster.fleet.workers.values():
        if view.is_connected and cluster.now_s - view.heard_s >= limit_s:
            for reservation in list(view.reservations.values()):
                request = cluster.requests.get(reservation.request_id)
                if request is not None and _depends_on(request, view.worker_id, reservation.attempt):
                    loss = Lose(request, Cause.SILENCE, culprit=view.worker_id, message=view.worker_id)
                    commands += apply_ending(cluster, loss)
    return commands


def _worker_gone(cluster: ClusterState, worker_id: str) -> list[Command]:
    commands: list[Command] = []
    view = cluster.fleet.connected(worker_id)
    if view is None:
        return commands
    cluster.is_placing_due = True
    cluster.shrunk_s = cluster.now_s
    was_draining = view.is_draining
    if not was_draining:
        _note_crash(cluster)
    cluster.fleet.changed()
    cluster.unbind_all(view)
    for reservation in view.lost():
        request = cluster.requests.get(reservation.request_id)
        if request is None:
            continue
        request.reservations.discard((worker_id, reservation.attempt))
        request.forget_blocks(worker_id)
        if not _depends_on(request, worker_id, reservation.attempt):
            cluster.forget_if_free(request)
        elif not reservation.is_sent:
            commands += apply_ending(cluster, Lose(request, Cause.PLAN, culprit=worker_id))
        else:
            request.num_crashes += not was_draining
            is_suspect = not was_draining and _may_have_caused(request, worker_id)
            request.lost_attempts += is_suspect
            loss = Lose(request, Cause.DEATH, worker_id, worker_id, is_cause=is_suspect and _is_cause(cluster, request))
            commands += apply_ending(cluster, loss)
    return commands


def _may_have_caused(request: Request, worker_id: str) -> bool:
    """Whether the request may have ended the worker: the worker was computing it, and the attempt had no progress."""
    assert request.placement is not None, "a worker can only lose a placed request"
    role = Role.DECODE if worker_id == request.placement.decode_worker else Role.PREFILL
    return request.stage in COMPUTES[role] and not _has_progressed(request)


def _is_cause(cluster: ClusterState, request: Request) -> bool:
    """Counts a crash that the request may have caused. True if it is assumed to cause them: it has made no progress on
    any worker, and most of the latest crashes may be its own. If many workers crash, as those of a failing host, others
    than the request are to blame. A router that has just started does not know."""
    if len(request.output) >= INNOCENT_TOKENS:
        return False
    request.deaths += 1
    knows = cluster.now_s - cluster.started_s >= CRASH_WINDOW_S
    num_others = len(cluster.crashes) - request.deaths
    return knows and request.deaths >= cluster.settings.max_worker_deaths and request.deaths > num_others


def _note_crash(cluster: ClusterState) -> None:
    cluster.crashes.append(cluster.now_s)
    while cluster.crashes[0] < cluster.now_s - CRASH_WINDOW_S:
        cluster.crashes.popleft()


def _depends_on(request: Request, worker_id: str, attempt: int) -> bool:
    """Whether the request's present attempt would be lost with this worker."""
    placement = request.placement
    if attempt != request.attempt or placement is None or request.stage in ENDED:
        return False
    if worker_id == placement.decode_worker:
        return True
    return request.stage in NEEDS_SENDER[SenderEnd.LOST]

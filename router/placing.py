"""Places waiting requests, and lets others wait or rejects them. Pure.

Late binding: requests stay in the queue until the policy finds workers that can start them now. The queue is considered
after every event that may have made room, at most LOOKAHEAD requests deep. A policy that chooses the prefill worker
before it has room binds the request, which then waits in that worker's line (line.py). The policy is asked for the head
of a line when the worker can start it.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import Reserve
from pdserve.core.types import FinishReason, Path, Role
from router.asking import ask_of, large_enough
from router.commands import FailKind
from router.ending import finish, give_up, turn_away
from router.ledger import Ledger
from router.lifecycle import Move, Stage
from router.policy.interface import Choice, Decision, Obstacle
from router.policy.rooms import can_start, opens_in_s
from router.refusal import admit, bounded_retry_s, drop_late, is_in_vain
from router.request import Placement, Request
from router.view import Booking, WorkerView

LOOKAHEAD: Final = 4  # requests waiting for a prefill worker that later ones may overtake on the local path
AWAY_S: Final = 0.25  # interval for checking whether disconnected workers are back


def place_waiting(ledger: Ledger) -> None:
    """Places all requests that can be placed, from the head of the queue."""
    ledger.is_placing_due = False
    ledger.timers.retry_at_s = None
    _end_backoffs(ledger)
    ledger.is_placing_due = False
    if not ledger.num_queued:
        return
    prefills, decodes = ledger.fleet.usable(ledger.now_s)
    if not decodes:
        _nobody_decodes(ledger)
        return
    ledger.no_decode_since_s = None
    is_decode_full = _serve_lines(ledger, prefills, decodes)
    drop_late(ledger)
    passed: list[str] = []
    while len(passed) < LOOKAHEAD:
        first = ledger.queue.first(passed)
        if first is None:
            return
        request = ledger.requests[first]
        if _is_worth_asking(ledger, request, prefills, decodes):
            decision = _decide(ledger, request, prefills, decodes)
            if decision is not None and _takes_the_last_worker(ledger, request, decision, prefills, decodes):
                decision = _wait_for_another(prefills, decodes, ledger.now_s)
            if decision is None or _has_left(ledger, request, decision, prefills, is_decode_full=is_decode_full):
                continue
            _waits(ledger, request, decision)
        _retry_at(ledger, request.ask_again_s)
        if request.waits_for not in (Obstacle.PREFILL, Obstacle.ROOM):
            return
        passed.append(first)


def _waits(ledger: Ledger, request: Request, decision: Decision) -> None:
    """The policy has decided that the request waits."""
    request.asked_s = ledger.now_s
    request.waits_for = decision.obstacle
    request.ask_again_s = math.inf if decision.retry_in_s is None else ledger.now_s + decision.retry_in_s


def _is_worth_asking(ledger: Ledger, request: Request, prefills: list[WorkerView], decodes: list[WorkerView]) -> bool:
    """Whether an event that the request waits for has occurred. Most events make no room for most waiting requests, and
    a decision is the most expensive operation of the router."""
    now_s, asked_s = ledger.now_s, request.asked_s
    if now_s >= request.ask_again_s or asked_s <= ledger.shrunk_s:
        return True
    if request.waits_for is not Obstacle.PREFILL:
        return any(view.freed_s >= asked_s for view in decodes)
    tokens = request.num_tokens
    # A worker becomes available by an event, or at the time when its batch is almost done.
    return any(
        max(view.freed_s, view.free_at_s - view.batch_s) >= asked_s and can_start(view, tokens, now_s)
        for view in prefills
    ) or any(view.computed_s >= asked_s and view.queue_s(now_s) <= view.load.batch_s for view in decodes)


def _takes_the_last_worker(
    ledger: Ledger, request: Request, decision: Decision, prefills: list[WorkerView], decodes: list[WorkerView]
) -> bool:
    """Whether a request that could not meet its target even on an unloaded cluster would take the last worker that can
    start another one. Such a request computes for a long time, cannot be interrupted, and misses its target in any
    case."""
    outlook, is_placed = request.outlook, decision.choice in (Choice.REMOTE, Choice.LOCAL)
    if not is_placed or "refusal" not in ledger.rules or outlook is None or request.output:
        return False
    if outlook.ttft_s <= request.facts.slo.ttft_s:
        return False
    taken = decision.prefill_worker or decision.decode_worker
    others = [view for view in _readers(prefills, decodes) if view.worker_id != taken]
    return bool(others) and not any(can_start(view, 1, ledger.now_s) for view in others)


def _readers(prefills: list[WorkerView], decodes: list[WorkerView]) -> list[WorkerView]:
    """The workers that take long prompts."""
    return prefills if len(prefills) > 1 else [*prefills, *decodes]


def _wait_for_another(prefills: list[WorkerView], decodes: list[WorkerView], now_s: float) -> Decision:
    return Decision(
        choice=Choice.WAIT,
        reason="it is late, and would take the last worker that can start another request",
        obstacle=Obstacle.PREFILL,
        retry_in_s=min(opens_in_s(view, now_s) for view in _readers(prefills, decodes)),
    )


def _serve_lines(ledger: Ledger, prefills: list[WorkerView], decodes: list[WorkerView]) -> bool:
    """Asks the policy for the heads of lines whose worker can start them, the earliest first. True: one of them waits
    for a decode worker, and later requests must not take the room that it waits for."""
    if not ledger.num_bound:
        return False
    usable = {view.worker_id: view for view in prefills}
    for view in ledger.fleet.views.values():
        if view.line and view.worker_id not in usable:
            ledger.unbind_all(view)
    heads = [(view.line.first(), view.worker_id) for view in prefills if view.line]
    heapq.heapify(heads)
    while heads:
        (_, request_id), worker_id = heapq.heappop(heads)
        request, view = ledger.requests[request_id], usable[worker_id]
        if not can_start(view, request.num_tokens, ledger.now_s):
            _retry_in(ledger, opens_in_s(view, ledger.now_s))
            continue
        if not _is_worth_asking(ledger, request, prefills, decodes):
            _retry_at(ledger, request.ask_again_s)
            if request.waits_for is Obstacle.DECODE:
                return True
            continue
        decision = _decide(ledger, request, prefills, decodes)
        if decision is not None and not _has_left(ledger, request, decision, prefills):
            _waits(ledger, request, decision)
            _retry_at(ledger, request.ask_again_s)
            if decision.obstacle is Obstacle.DECODE:
                return True
        elif view.line:
            heapq.heappush(heads, (view.line.first(), worker_id))
    return False


def _has_left(
    ledger: Ledger,
    request: Request,
    decision: Decision,
    prefills: list[WorkerView],
    *,
    is_decode_full: bool = False,
) -> bool:
    """Carries out the decision. False: the request still waits."""
    was_bound_to = request.bound_to
    match decision.choice:
        case Choice.REMOTE | Choice.LOCAL:
            worker_id = decision.prefill_worker
            if worker_id and not was_bound_to and (is_decode_full or ledger.has_line(worker_id)):
                ledger.bind(request, worker_id)  # others wait for the worker already
            elif is_decode_full:
                return False
            elif not is_in_vain(ledger, request, decision):
                _place(ledger, request, decision)
        case Choice.REFUSE:
            ledger.explain(request.request_id, decision)
            message = decision.reason
            turn_away(ledger, request, FailKind.OVERLOADED, message, decision.retry_in_s or retry_after_s(ledger))
        case Choice.WAIT:
            if decision.obstacle is Obstacle.WORKERS:
                _wait_for_workers(ledger, request)
            elif was_bound_to or not any(view.worker_id == decision.bound_to for view in prefills):
                return False
            else:
                ledger.bind(request, decision.bound_to)
                _retry_in(ledger, opens_in_s(ledger.fleet.views[request.bound_to], ledger.now_s))
    return True


def retry_after_s(ledger: Ledger) -> float:
    """Estimates when the queue will be shorter, from the recent placement interval."""
    wait_s = (ledger.num_queued + 1) * ledger.placement_interval_s
    return bounded_retry_s(wait_s)


def _end_backoffs(ledger: Ledger) -> None:
    while (request_id := ledger.timers.backoffs.pop_due(ledger.now_s)) is not None:
        ledger.unpark(ledger.requests[request_id])


def _nobody_decodes(ledger: Ledger) -> None:
    """Workers may reconnect; requests wait for them for a limited time."""
    if ledger.no_decode_since_s is None:
        ledger.no_decode_since_s = ledger.now_s
    grace_s = ledger.settings.workers_grace_s if ledger.fleet.has_known_decode else 0.0
    until_s = ledger.no_decode_since_s + grace_s
    if ledger.now_s < until_s:
        _retry_in(ledger, until_s - ledger.now_s)
        return
    for view in ledger.fleet.views.values():
        ledger.unbind_all(view)
    waiting = [*ledger.queue, *sorted(ledger.parked)]
    for request_id in waiting:
        _no_workers(ledger, ledger.requests[request_id])


def _wait_for_workers(ledger: Ledger, request: Request) -> None:
    """Parks the request, because the workers that could take it are disconnected, possibly for long."""
    if ledger.now_s - request.queued_s >= ledger.settings.workers_grace_s:
        _no_workers(ledger, request)
    else:
        ledger.park(request, ledger.now_s + AWAY_S)


def _no_workers(ledger: Ledger, request: Request) -> None:
    message = "no decode worker that could take the request is connected"
    if request.attempt:
        give_up(ledger, request, FailKind.NO_WORKERS, message, role=Role.DECODE.value)
    else:
        turn_away(ledger, request, FailKind.NO_WORKERS, message, retry_after_s=1.0, role=Role.DECODE.value)


def _decide(ledger: Ledger, request: Request, prefills: list[WorkerView], decodes: list[WorkerView]) -> Decision | None:
    """None: the request has ended instead."""
    sampling = request.facts.sampling
    if len(request.output) >= sampling.max_tokens:
        finish(ledger, request, FinishReason.LENGTH, cancel=False)
        return None
    fitting = large_enough(request, decodes, request.num_tokens + 1)
    if not fitting:
        everyone = [view for view in ledger.fleet.views.values() if view.role is Role.DECODE]
        if large_enough(request, everyone, request.num_tokens + 1):
            return Decision(
                choice=Choice.WAIT, reason="the workers that are large enough are away", obstacle=Obstacle.WORKERS
            )
        limit = max(view.most_tokens for view in everyone)
        message = f"{request.num_tokens} tokens, no decode worker holds more than {limit}"
        give_up(ledger, request, FailKind.INVALID, message, field="prompt")
        return None
    able = large_enough(request, prefills, request.num_tokens)
    return ledger.policy(ask_of(request, ledger.fleet, ledger.lengths, ledger.now_s), able, fitting, ledger.now_s)


def _place(ledger: Ledger, request: Request, decision: Decision) -> None:
    is_local = decision.choice is Choice.LOCAL
    ledger.queue.take(request.request_id)
    ledger.dequeue(request)
    ledger.charge(request)
    if request.outlook is not None:
        ledger.pace.placed(request.outlook.ttft_s, ledger.now_s)
    if not ledger.move(request, Move.PLACED_LOCAL if is_local else Move.PLACED_REMOTE):
        return
    now_s = ledger.now_s
    ledger.placement_interval_s += 0.05 * (min(now_s - ledger.last_placement_s, 1.0) - ledger.placement_interval_s)
    ledger.last_placement_s = now_s
    request.attempt += 1
    request.num_tried += 1
    request.attempt_output = len(request.output)
    request.placed_s = now_s
    request.placement = request.last_path = Placement(
        path=Path.LOCAL if is_local else Path.REMOTE,
        decode_worker=decision.decode_worker,
        prefill_worker=decision.prefill_worker,
    )
    ledger.explain(request.request_id, decision)
    decode = ledger.fleet.views[decision.decode_worker]
    reader = decode if is_local else ledger.fleet.views[decision.prefill_worker]
    request.awaits_s, request.half_step_s = decode.rest_of_step_s(now_s), decode.half_step_s
    booking = _book(ledger, request, decode, has_row=True, computes=is_local)
    booking.is_sent = True
    if not is_local:
        _book(ledger, request, reader, has_row=False, computes=True)
    ledger.out.append(
        Reserve(
            key=AttemptKey(decision.decode_worker, request.request_id, request.attempt),
            is_local=is_local,
            output_token_ids=request.output_ids,
            deadline_s=request.deadline_left_s(now_s),
        )
    )


def _book(ledger: Ledger, request: Request, view: WorkerView, *, has_row: bool, computes: bool) -> Booking:
    tokens = request.num_tokens
    uncached = 0
    if computes:
        uncached = request.uncached_on(view)
    booking = Booking(
        request_id=request.request_id,
        attempt=request.attempt,
        tokens=tokens,
        blocks=view.blocks_for(tokens + 1 if has_row else tokens),
        prefill_tokens=uncached,
        prefill_s=view.share_s(uncached, tokens - uncached) if computes else 0.0,
        tpot_s=request.facts.slo.tpot_s if has_row else None,
    )
    view.book(booking, ledger.now_s)
    request.holds.add((view.worker_id, request.attempt))
    return booking


def _retry_in(ledger: Ledger, wait_s: float) -> None:
    _retry_at(ledger, ledger.now_s + wait_s)


def _retry_at(ledger: Ledger, at_s: float) -> None:
    if at_s < math.inf:
        timers = ledger.timers
        timers.retry_at_s = at_s if timers.retry_at_s is None else min(timers.retry_at_s, at_s)


def settle_newcomer(ledger: Ledger, request: Request) -> None:
    """A new request that could not be placed immediately: it may wait, or is rejected now."""
    if request.stage is not Stage.QUEUED:
        return
    if ledger.num_queued > ledger.settings.max_queue:
        message = f"the queue is full ({ledger.settings.max_queue} requests wait)"
        turn_away(ledger, request, FailKind.OVERLOADED, message, retry_after_s(ledger))
    else:
        admit(ledger, request)

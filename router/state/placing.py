"""Places waiting requests, keeps them waiting, or rejects them. Pure.

Late binding: requests stay in the queue until the policy finds workers that can start them now. The queue is considered
after every event that may have made room, at most LOOKAHEAD requests deep. A policy that chooses the prefill worker
before it has room binds the request, which then waits in that worker's queue (load.py). The policy is asked for
the head of that queue when the worker can start it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final, final

from pdserve.core.attempt import AttemptKey, PrefixSource
from pdserve.core.protocol import Reserve
from pdserve.core.types import FinishReason, Path, Role
from router.policy.availability import can_start, lead_of, opens_in_s
from router.policy.interface import Choice, Decision, Obstacle
from router.state.cluster_state import ClusterState
from router.state.endings import Ending, Fail, Finish, Reject, apply_ending
from router.state.fleet import able, policy_input_of, with_adapter, with_weights
from router.state.interface import Command, FailKind
from router.state.lifecycle import WAITING, Move
from router.state.load import Reservation
from router.state.rejection import (
    clamped_retry_s,
    delay_if_late,
    reject_before_placing,
    reject_newly_late,
    reject_waiting,
)
from router.state.request import Placement, Request
from router.state.view import WorkerView

LOOKAHEAD: Final = 4  # requests waiting for a prefill worker that a later one may overtake on the local path
DRAINED_GRACE_S: Final = 5.0  # if all decode workers are drained: time to undo the drain of the wrong worker
NO_WEIGHTS: Final = "the weights that began this answer are no longer served, and its tokens cannot be of other ones"
STARTS: Final = (Choice.REMOTE, Choice.LOCAL)
AWAY_S: Final = 0.25  # interval for checking whether disconnected workers are back


def place(cluster: ClusterState, newcomer: Request | None) -> list[Command]:
    """Places every request that can be placed. `newcomer` has just arrived, and is placed, rejected or queued."""
    commands = reject_before_placing(cluster, newcomer) if newcomer is not None else []
    retry_at_s = cluster.timers.retry_at_s
    if not cluster.is_placing_due and (retry_at_s is None or retry_at_s > cluster.now_s):
        return commands
    commands += _place_waiting(cluster)
    if newcomer is not None and newcomer.stage in WAITING:
        commands += _queue_newcomer(cluster, newcomer)
    cluster.utilization.contended(len(cluster.queue) > 0, cluster.now_s)
    return commands


def _place_waiting(cluster: ClusterState) -> list[Command]:
    """Places all requests that can be placed, from the head of the queue."""
    cluster.is_placing_due = False
    cluster.timers.retry_at_s = None
    _end_backoffs(cluster)
    cluster.is_placing_due = False
    if not cluster.num_queued:
        return []
    prefills, decodes = cluster.fleet.usable(cluster.now_s)
    if not decodes:
        return _wait_for_decode_workers(cluster)
    cluster.no_decode_since_s = None
    placing = _Placing(cluster, prefills, decodes)
    placing.serve_worker_queues()
    placing.commands += reject_newly_late(cluster)
    placing.serve_queue()
    return placing.commands


@final
class _Placing:
    """One pass over the waiting requests."""

    def __init__(self, cluster: ClusterState, prefills: list[WorkerView], decodes: list[WorkerView]) -> None:
        self.commands: list[Command] = []
        self._cluster = cluster
        self._prefills = prefills
        self._decodes = decodes
        # The head of a worker's queue waits for a decode worker, so later requests must not take the room there.
        self._is_decode_full = False

    def serve_worker_queues(self) -> None:
        """Decides about the heads of the workers' queues, the earliest first, if their worker can start them."""
        cluster = self._cluster
        if not cluster.num_bound:
            return
        usable = {view.worker_id: view for view in self._prefills}
        for view in cluster.fleet.workers.values():
            if view.queue and view.worker_id not in usable:
                cluster.unbind_all(view)
        heads = [(view.queue.first(), view.worker_id) for view in self._prefills if view.queue]
        heapq.heapify(heads)
        while heads and not self._is_decode_full:
            (_, request_id), worker_id = heapq.heappop(heads)
            request, view = cluster.requests[request_id], usable[worker_id]
            lead_s = _lead_s(request, view, cluster.now_s)
            if not can_start(view, request.num_tokens, cluster.now_s, lead_s):
                _retry_in(cluster, opens_in_s(view, cluster.now_s, lead_s))
                continue
            is_asked = self._is_worth_asking(request)
            decision = self._decide(request) if is_asked else None
            if not is_asked or (decision is not None and not self._apply(request, decision)):
                if decision is not None:
                    _waits(cluster, request, decision)
                _retry_at(cluster, request.ask_again_s)
                if request.waits_for is not Obstacle.DECODE:
                    continue
                if not self._is_restricted(request, self._decodes):
                    self._is_decode_full = True
                    continue
                cluster.unbind(request)  # later ones may find room on other workers
            if view.queue:
                heapq.heappush(heads, (view.queue.first(), worker_id))

    def serve_queue(self) -> None:
        """Decides about the requests at the head of the common queue."""
        cluster, passed = self._cluster, _Passed(self._cluster)
        while len(passed.request_ids) < LOOKAHEAD:
            first = cluster.queue.first(passed)
            if first is None:
                return
            request = cluster.requests[first]
            if self._is_worth_asking(request):
                decision = self._decide(request)
                if decision is not None and self._takes_the_last_worker(request, decision):
                    decision = self._wait_for_another()
                if decision is None or self._apply(request, decision):
                    continue
                _waits(cluster, request, decision)
            _retry_at(cluster, request.ask_again_s)
            if self._is_restricted(request, self._decodes) or self._is_restricted(request, self._prefills):
                passed.groups.add(_group(request))
            elif request.waits_for in (Obstacle.PREFILL, Obstacle.ROOM):
                passed.request_ids.add(first)
            else:
                return

    def _is_worth_asking(self, request: Request) -> bool:
        """Whether an event has occurred for which the request waits. Most events make no room for most requests, and a
        decision is the router's most expensive operation."""
        now_s, asked_s = self._cluster.now_s, request.asked_s
        if now_s >= request.ask_again_s or asked_s <= self._cluster.shrunk_s:
            return True
        if request.waits_for is not Obstacle.PREFILL:
            return any(view.freed_s >= asked_s for view in self._decodes)
        return any(self._has_opened(request, view) for view in self._prefills) or any(
            view.computed_s >= asked_s and view.queue_s(now_s) <= view.load.batch_s + _lead_s(request, view, now_s)
            for view in self._decodes
        )

    def _has_opened(self, request: Request, view: WorkerView) -> bool:
        """Whether the worker has become available since the policy was asked, by an event, or at the time when its
        batch is almost done."""
        now_s, asked_s = self._cluster.now_s, request.asked_s
        lead_s = _lead_s(request, view, now_s)
        opened_s = max(view.freed_s, view.free_at_s - view.batch_s - lead_s)
        return opened_s >= asked_s and can_start(view, request.num_tokens, now_s, lead_s)

    def _is_restricted(self, request: Request, views: list[WorkerView]) -> bool:
        """Whether only some of `views` have its adapter and its weights, so that later requests may find room on the
        others."""
        fleet = self._cluster.fleet
        weights = fleet.workers[request.bound_to].hello.weights if request.bound_to else request.needs_weights
        return len(with_weights(weights, with_adapter(request.facts.adapter, views))) < len(views)

    def _takes_the_last_worker(self, request: Request, decision: Decision) -> bool:
        """Whether a request that could not meet its target even on an unloaded cluster would take the last worker that
        can start another one. Such a request computes for a long time, cannot be interrupted, and misses its target in
        any case."""
        cluster = self._cluster
        unloaded, is_placed = request.unloaded, decision.choice in (Choice.REMOTE, Choice.LOCAL)
        if not is_placed or "rejection" not in cluster.rules or unloaded is None or request.output:
            return False
        if unloaded.ttft_s <= request.facts.slo.ttft_s:
            return False
        taken = decision.prefill_worker or decision.decode_worker
        others = [view for view in self._prefillers() if view.worker_id != taken]
        return bool(others) and not any(can_start(view, 1, cluster.now_s) for view in others)

    def _prefillers(self) -> list[WorkerView]:
        """The workers that take long prompts."""
        return self._prefills if len(self._prefills) > 1 else [*self._prefills, *self._decodes]

    def _wait_for_another(self) -> Decision:
        now_s = self._cluster.now_s
        return Decision(
            choice=Choice.WAIT,
            reason="it is late, and would take the last worker that can start another request",
            obstacle=Obstacle.PREFILL,
            retry_in_s=min(opens_in_s(view, now_s) for view in self._prefillers()),
        )

    def _decide(self, request: Request) -> Decision | None:
        """Asks the policy. None: the request has ended instead."""
        cluster = self._cluster
        if len(request.output) >= request.facts.sampling.max_tokens:
            self._end(Finish(request, FinishReason.LENGTH, cancel=False))
            return None
        fits_all = cluster.fleet.fits_all
        fitting = able(request, self._decodes, request.num_tokens + 1, fits_all)
        if not fitting:
            facts = request.facts
            if not with_adapter(facts.adapter, list(cluster.fleet.workers.values())):
                message = f"no worker has the LoRA adapter {facts.adapter_name} any more"
                # Not an unknown model: the name may have other weights by now. A retry finds them, or that it has none.
                self._end(Fail(request, FailKind.UNAVAILABLE, message))
                return None
            weights = request.needs_weights
            if not with_weights(weights, cluster.fleet.all_decode()):
                self._end(Fail(request, FailKind.UNAVAILABLE, NO_WEIGHTS))
                return None
            if _all_able(cluster, request):
                which = "have its LoRA adapter" if facts.adapter else "are large enough"
                which = f"{which} and have the weights that began it" if cluster.fleet.is_mixed and weights else which
                reason = f"all workers that {which} are disconnected"
                return Decision(choice=Choice.WAIT, reason=reason, obstacle=Obstacle.WORKERS)
            limit = max(view.max_tokens for view in cluster.fleet.all_decode())
            message = f"{request.num_tokens} tokens; no decode worker takes more than {limit}"
            self._end(Fail(request, FailKind.INVALID, message, field="prompt"))
            return None
        return self._ask(request, able(request, self._prefills, request.num_tokens, fits_all), fitting)

    def _ask(self, request: Request, prefills: list[WorkerView], decodes: list[WorkerView]) -> Decision:
        """Both workers of a placement have the same weights. The request's own come first, then those with the largest
        share, until it can start."""
        cluster, fleet = self._cluster, self._cluster.fleet
        asked = policy_input_of(request, fleet, cluster.lengths, cluster.now_s)
        if not fleet.is_mixed:
            return cluster.policy(asked, prefills, decodes, cluster.now_s)
        names = {view.hello.weights for view in decodes}
        if request.bound_to:
            names &= {fleet.workers[request.bound_to].hello.weights}
        found = Decision(
            choice=Choice.WAIT,
            reason="no decode worker has the weights of the prefill worker for which it waits",
            obstacle=Obstacle.DECODE,
        )
        for number, weights in enumerate(
            sorted(names, key=lambda one: (one != request.weights, -fleet.shares.get(one, 0.0), one))
        ):
            own = with_weights(weights, prefills), with_weights(weights, decodes)
            decision = cluster.policy(asked, *own, cluster.now_s)
            if decision.choice in STARTS:
                return decision
            if number == 0 or found.choice is Choice.REJECT:
                found = decision
        return found

    def _apply(self, request: Request, decision: Decision) -> bool:
        """Places, binds, rejects or parks the request. False: it still waits."""
        cluster, was_bound_to = self._cluster, request.bound_to
        match decision.choice:
            case Choice.REMOTE | Choice.LOCAL:
                worker_id = decision.prefill_worker
                if worker_id and not was_bound_to and (self._is_decode_full or cluster.has_queue(worker_id)):
                    cluster.bind(request, worker_id)  # other requests already wait for this worker
                elif self._is_decode_full:
                    return False
                elif (delayed := delay_if_late(cluster, request, decision)) is not None:
                    self.commands += delayed
                else:
                    self.commands += start(cluster, request, decision)
            case Choice.REJECT:
                cluster.explain(request.request_id, decision)
                retry_after_s = decision.retry_in_s or _retry_after_s(cluster)
                self._end(Reject(request, FailKind.OVERLOADED, decision.reason, retry_after_s))
            case Choice.WAIT:
                if decision.obstacle is Obstacle.WORKERS:
                    self.commands += _wait_for_workers(cluster, request)
                elif was_bound_to or not any(view.worker_id == decision.bound_to for view in self._prefills):
                    return False
                else:
                    cluster.bind(request, decision.bound_to)
                    view = cluster.fleet.workers[request.bound_to]
                    _retry_in(cluster, opens_in_s(view, cluster.now_s, _lead_s(request, view, cluster.now_s)))
        return True

    def _end(self, ending: Ending) -> None:
        self.commands += apply_ending(self._cluster, ending)


@final
class _Passed:
    """The waiting requests that later ones may overtake in this pass: some, and all of some groups."""

    def __init__(self, cluster: ClusterState) -> None:
        self.request_ids, self.groups = set[str](), set[tuple[str, str]]()
        self._requests = cluster.requests

    def __contains__(self, request_id: object) -> bool:
        if self.groups and _group(self._requests[str(request_id)]) in self.groups:
            return True
        return request_id in self.request_ids


def _group(request: Request) -> tuple[str, str]:
    """The adapter and the weights that it needs."""
    return request.facts.adapter, request.needs_weights


def _waits(cluster: ClusterState, request: Request, decision: Decision) -> None:
    """Notes that the policy lets the request wait."""
    request.asked_s = cluster.now_s
    request.waits_for = decision.obstacle
    request.ask_again_s = math.inf if decision.retry_in_s is None else cluster.now_s + decision.retry_in_s


def _retry_after_s(cluster: ClusterState) -> float:
    """Estimates when the queue will be shorter, from the recent placement interval."""
    wait_s = (cluster.num_queued + 1) * cluster.placement_interval_s
    return clamped_retry_s(wait_s)


def _end_backoffs(cluster: ClusterState) -> None:
    while (request_id := cluster.timers.backoffs.pop_due(cluster.now_s)) is not None:
        cluster.unpark(cluster.requests[request_id])


def _wait_for_decode_workers(cluster: ClusterState) -> list[Command]:
    """Without a decode worker, requests wait for a limited time, because workers may reconnect. If all are drained,
    only requests with tokens wait that long."""
    if cluster.no_decode_since_s is None:
        cluster.no_decode_since_s = cluster.now_s
    grace_s = cluster.settings.workers_grace_s if cluster.fleet.has_known_decode else 0.0
    new_grace_s = min(grace_s, DRAINED_GRACE_S) if cluster.fleet.is_decode_drained() else grace_s
    until_s, new_until_s = cluster.no_decode_since_s + grace_s, cluster.no_decode_since_s + new_grace_s
    if cluster.now_s < new_until_s:
        _retry_at(cluster, new_until_s)
        return []
    for view in cluster.fleet.workers.values():
        cluster.unbind_all(view)
    waiting = [cluster.requests[request_id] for request_id in (*cluster.queue, *sorted(cluster.parked))]
    commands: list[Command] = []
    for request in waiting:
        if cluster.now_s >= until_s or not request.output:
            commands += _no_workers(cluster, request, cluster.fleet.all_decode())
    if cluster.now_s < until_s:
        _retry_at(cluster, until_s)
    return commands


def _wait_for_workers(cluster: ClusterState, request: Request) -> list[Command]:
    """Parks a request for which no large enough worker receives requests, possibly for long."""
    if cluster.now_s - request.queued_s >= cluster.settings.workers_grace_s:
        return _no_workers(cluster, request, _all_able(cluster, request))
    cluster.park(request, cluster.now_s + AWAY_S)
    return []


def _all_able(cluster: ClusterState, request: Request) -> list[WorkerView]:
    """Also those that routers will give the adapter, which another worker has."""
    return able(request, cluster.fleet.all_decode(), request.num_tokens + 1, needs_adapter=False)


def _no_workers(cluster: ClusterState, request: Request, decodes: Sequence[WorkerView]) -> list[Command]:
    message = cluster.fleet.why_none(decodes, cluster.now_s).message
    if request.attempt:
        return apply_ending(cluster, Fail(request, FailKind.NO_WORKERS, message, role=Role.DECODE.value))
    rejection = Reject(request, FailKind.NO_WORKERS, message, retry_after_s=1.0, role=Role.DECODE.value)
    return apply_ending(cluster, rejection)


def start(cluster: ClusterState, request: Request, decision: Decision) -> list[Command]:
    """Starts an attempt of a waiting request on the workers that the policy has chosen."""
    is_local = decision.choice is Choice.LOCAL
    cluster.queue.take(request.request_id)
    cluster.dequeue(request)
    cluster.charge(request)
    if request.unloaded is not None:
        cluster.utilization.placed(request.unloaded.ttft_s, cluster.now_s)
    if not cluster.move(request, Move.PLACED_LOCAL if is_local else Move.PLACED_REMOTE):
        return []
    now_s = cluster.now_s
    cluster.placement_interval_s += 0.05 * (min(now_s - cluster.last_placement_s, 1.0) - cluster.placement_interval_s)
    cluster.last_placement_s = now_s
    request.attempt += 1
    request.num_tried += 1
    request.attempt_output = len(request.output)
    request.placed_s = now_s
    computing = cluster.fleet.workers[decision.decode_worker if is_local else decision.prefill_worker]
    request.placement = request.last_path = Placement(
        path=Path.LOCAL if is_local else Path.REMOTE,
        decode_worker=decision.decode_worker,
        prefill_worker=decision.prefill_worker,
        source=_source(cluster, decision),
    )
    if request.conversation is not None:
        request.conversation.placed_on(filter(None, (decision.prefill_worker, decision.decode_worker)))
    cluster.explain(request.request_id, decision)
    decode = cluster.fleet.workers[decision.decode_worker]
    request.weights = decode.hello.weights
    request.awaits_s, request.half_step_s = decode.rest_of_step_s(now_s), decode.half_step_s
    pulled = 0 if decision.pull is None else decision.pull.prefix_tokens
    reservation = _reserve(cluster, request, decode, has_row=True, computes=is_local, pulled=pulled)
    reservation.is_sent = True
    if not is_local:
        _reserve(cluster, request, computing, has_row=False, computes=True, pulled=pulled)
    if decision.pull is not None:
        computing.pulls_from(
            cluster.fleet.workers[decision.pull.source],
            computing.reservations[request.request_id, request.attempt],
            decision.pull.num_tokens,
            decision.pull.source_read_s,
        )
    reserve = Reserve(
        key=AttemptKey(decision.decode_worker, request.request_id, request.attempt),
        is_local=is_local,
        output_token_ids=request.output_ids,
        deadline_s=request.deadline_left_s(now_s),
        waited_s=request.waited_s(now_s),
        reuse_within_s=request.reuse_within_s,
        source=request.placement.source if is_local else None,
    )
    return [reserve]


def _lead_s(request: Request, view: WorkerView, now_s: float) -> float:
    """How much earlier it is sent to the worker, so that tiers are read for it."""
    if not request.cached_tiers:
        return 0.0
    return lead_of(request.reads_on(view, view.queue_s(now_s)), request.facts.slo)


def _source(cluster: ClusterState, decision: Decision) -> PrefixSource | None:
    if decision.pull is None:
        return None
    hello = cluster.fleet.workers[decision.pull.source].hello
    return PrefixSource(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        endpoint=hello.endpoint,
        num_tokens=decision.pull.prefix_tokens,
        predicted_s=decision.pull.pull_s,
    )


def _reserve(
    cluster: ClusterState, request: Request, view: WorkerView, *, has_row: bool, computes: bool, pulled: int
) -> Reservation:
    """`pulled`: leading tokens whose KV the worker has after its pull."""
    tokens = request.num_tokens
    uncached, copy_s, compute_s, read_s = 0, 0.0, 0.0, 0.0
    if computes:
        reads = request.reads_on(view, view.queue_s(cluster.now_s))
        uncached, copy_s = request.computed_on(view, reads)
        if pulled:
            uncached, copy_s = min(uncached, max(tokens - pulled, 1)), 0.0
        elif reads is not None:
            read_s = reads.lead_s
        compute_s = copy_s + view.prefill_share_s(uncached, tokens - uncached, view.slack(cluster.now_s))
    reservation = Reservation(
        request_id=request.request_id,
        attempt=request.attempt,
        tokens=tokens,
        blocks=view.blocks_for(tokens + 1 if has_row else tokens),
        prefill_tokens=uncached,
        prefill_s=compute_s,
        tpot_s=request.facts.slo.tpot_s if has_row else None,
        itl_s=request.facts.slo.itl_s,
        prompt_tokens=request.facts.num_prompt_tokens,
        due_at_s=math.inf if request.output else request.arrived_s + request.facts.slo.ttft_s,
        read_s=read_s,
    )
    view.reserve(reservation, cluster.now_s)
    request.reservations.add((view.worker_id, request.attempt))
    return reservation


def _retry_in(cluster: ClusterState, wait_s: float) -> None:
    _retry_at(cluster, cluster.now_s + wait_s)


def _retry_at(cluster: ClusterState, at_s: float) -> None:
    if at_s < math.inf:
        timers = cluster.timers
        timers.retry_at_s = at_s if timers.retry_at_s is None else min(timers.retry_at_s, at_s)


def _queue_newcomer(cluster: ClusterState, request: Request) -> list[Command]:
    """Queues or rejects a new request that could not be placed immediately."""
    if cluster.num_queued > cluster.settings.max_queue:
        message = f"the queue is full ({cluster.settings.max_queue} requests wait)"
        return apply_ending(cluster, Reject(request, FailKind.OVERLOADED, message, _retry_after_s(cluster)))
    return reject_waiting(cluster, request)

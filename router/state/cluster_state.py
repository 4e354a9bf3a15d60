"""The data of a RouterState, shared by the modules that change it, and its summary for operators. Pure.

Each module takes the cluster as its first argument and handles one part of a request's lifecycle: placing.py,
attempts.py, endings.py.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import Final

from pdserve.core.attempt import AttemptKey
from pdserve.core.cost.latency import CostPrior
from pdserve.core.durations import Alarms
from pdserve.core.live import LiveFrame, LiveTotals, LiveWorker
from pdserve.core.protocol import Cancel, EndText, Load
from pdserve.core.types import Role, Slo
from router.policy import find_policy, make_policy
from router.policy.interface import Decision
from router.state.conversations import Conversation
from router.state.fleet import Fleet, OutputLengths, entry_of
from router.state.forecast import RecentDemand, Utilization
from router.state.history import Explanations, LiveLog, live_request
from router.state.interface import Command, Outcome, RequestArrived, RouterSettings
from router.state.lifecycle import MOVES, IllegalMove, Move, Stage
from router.state.load import Reservation
from router.state.queue import Queue
from router.state.request import Request
from router.state.sessions import Sessions
from router.state.turns import Expected
from router.state.view import WorkerView

KEPT_CRASHES: Final = 64  # that are remembered


@dataclass(slots=True)
class Timers:
    """Times at which something is due for requests that still exist then."""

    deadlines: Alarms[str] = field(default_factory=Alarms)  # deadlines of requests that have not ended
    backoffs: Alarms[str] = field(default_factory=Alarms)  # ends of backoffs of parked requests
    releases: Alarms[str] = field(default_factory=Alarms)  # time limits for Released; they need no wake-up of their own
    retry_at_s: float | None = None  # when the head of the queue should be considered again
    silence_at_s: float | None = None  # when to check for silent workers
    wake_at_s: float | None = None  # the WakeAt that was requested


class ClusterState:
    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.worker_silence_s)
        self.policy = make_policy(settings, self.fleet.link)
        self.lengths = OutputLengths()
        self.counters: Counter[str] = Counter()
        self.sessions = Sessions(self.counters)
        self.requests: dict[str, Request] = {}
        self.rules = find_policy(settings.policy).rules_on(settings.rules_off)
        # QUEUED requests, except those bound to a worker or in backoff
        self.queue = Queue(is_ageing="ageing" in self.rules)
        self.num_bound = 0  # QUEUED requests that wait for one prefill worker
        self.parked: set[str] = set()  # QUEUED requests in a backoff
        self.ended: set[str] = set()  # ended requests that wait for Released
        self.migrating: set[str] = set()  # requests that have left a draining worker, and have not arrived elsewhere
        self.migration_asked_s = -math.inf  # when a migration last found no room to recompute an answer
        self.utilization = Utilization()
        self.demand = RecentDemand()
        self.explanations = Explanations(settings.explain_capacity)
        self.live_log = LiveLog()
        self.timers = Timers()
        self.now_s = self.started_s = 0.0
        self.has_started = False
        self.crashes: deque[float] = deque(maxlen=KEPT_CRASHES)  # when workers that did not drain were lost
        self.is_closing = False
        self.is_placing_due = False
        self.shrunk_s = -math.inf  # when a worker last left: requests that wait for it must be placed elsewhere
        self.no_decode_since_s: float | None = None
        self.placement_interval_s = 0.05  # moving mean, for retry_after_s
        self.last_placement_s = 0.0
        self.serial = 0

    # -- the lifecycle -------------------------------------------------------------------------------------------

    def move(self, request: Request, move: Move) -> bool:
        """Applies a move of the lifecycle table. An illegal move raises if `is_strict`; otherwise it is counted, and
        the result is False."""
        after = MOVES.get((request.stage, move))
        if after is None:
            if self.settings.is_strict:
                raise IllegalMove(request.request_id, request.stage, move, request.story_text())
            self.counters["illegal"] += 1
            return False
        request.timeline.moved(request.stage, move, self.now_s, request.attempt, request.attempt_token_s)
        request.remember(move, after)
        request.stage = after
        return True

    # -- the queue -----------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        request.queued_s, request.asked_s = self.now_s, -math.inf
        if request.not_before_s > self.now_s:
            self.park(request, request.not_before_s)
        else:
            self._join_queue(request)
        self.is_placing_due = True

    def _join_queue(self, request: Request) -> None:
        self.queue.add(entry_of(request, self.fleet, self.lengths, self.rules, self.now_s))

    def park(self, request: Request, until_s: float) -> None:
        """Puts the request into a backoff: it is not considered before `until_s`."""
        self.dequeue(request)
        request.not_before_s = until_s
        self.parked.add(request.request_id)
        self.timers.backoffs.set(request.request_id, until_s)

    def unpark(self, request: Request) -> None:
        self._leave_backoff(request)
        self._join_queue(request)
        self.is_placing_due = True

    def _leave_backoff(self, request: Request) -> None:
        self.parked.discard(request.request_id)
        self.timers.backoffs.clear(request.request_id)

    def bind(self, request: Request, worker_id: str) -> None:
        """From now on the request waits for this prefill worker only."""
        self.dequeue(request)
        view = self.fleet.workers[worker_id]
        uncached, copy_s = request.computed_on(view, request.reads_on(view, view.queue_s(self.now_s)))
        rank = (0 if request.output else 1, -request.facts.priority, request.serial)
        prefill_s = copy_s + view.prefill_s(uncached, request.num_tokens - uncached)
        view.queue.join(request.request_id, uncached, prefill_s, rank)
        request.bound_to = worker_id
        self.num_bound += 1

    def has_queue(self, worker_id: str) -> bool:
        return self.num_bound > 0 and len(self.fleet.workers[worker_id].queue) > 0

    def unbind_all(self, view: WorkerView) -> None:
        """Returns the requests that waited for this worker to the common queue."""
        for request_id in list(view.queue):
            self.unbind(self.requests[request_id])
            self.is_placing_due = True

    def unbind(self, request: Request) -> None:
        """Returns the request to the common queue."""
        self.dequeue(request)
        self._join_queue(request)

    def dequeue(self, request: Request) -> None:
        self._leave_backoff(request)
        if request.bound_to:
            self.fleet.workers[request.bound_to].queue.leave(request.request_id)
            request.bound_to = ""
            self.num_bound -= 1
            return
        self.queue.remove(request.request_id)

    @property
    def num_queued(self) -> int:
        return len(self.queue) + self.num_bound + len(self.parked)

    def note_demand(self, request: Request) -> None:
        """Counts a new request as demand if it could meet its target on an unloaded cluster."""
        unloaded, slo = request.unloaded, request.facts.slo
        if unloaded is not None and unloaded.ttft_s <= slo.ttft_s and unloaded.tpot_s <= slo.tpot_s:
            self.demand.arrived(unloaded.ttft_s, slo.ttft_s, self.now_s)

    def targets(self, facts: RequestArrived, stated: frozenset[str], now_s: float) -> Slo:
        """As RouterState.targets."""

        def expected(turns: float | None, pause_s: float) -> Expected:
            return Expected(tokens=self.lengths.remaining(facts, 0), turns=turns, pause_s=pause_s)

        return self.sessions.targets(facts, stated, expected, now_s)

    # -- charges of tenants --------------------------------------------------------------------------------

    def charge(self, request: Request) -> None:
        """Charges the tenant of a placed request the predicted work."""
        unloaded = request.unloaded
        request.charged_s = unloaded.work_s if unloaded is not None else 0.0
        if "fairness" in self.rules:
            self.queue.fairness.charge(request.facts.tenant, request.charged_s)

    def settle(self, request: Request) -> None:
        """Corrects the tenant's charge to the actual length of an ended answer."""
        where = self.fleet.workers.get(request.last_path.decode_worker) if request.last_path is not None else None
        if where is None or request.unloaded is None:
            return
        _, per_row_s, per_context_token_s = where.cost.decode_coefficients
        answer_s = request.num_emitted * (per_row_s + per_context_token_s * request.num_tokens)
        self._recharge(request, request.unloaded.ttft_s + answer_s)

    def refund(self, request: Request) -> None:
        """Refunds the charge of a lost attempt."""
        self._recharge(request, 0.0)

    def _recharge(self, request: Request, work_s: float) -> None:
        if "fairness" in self.rules and request.charged_s:
            self.queue.fairness.correct(request.facts.tenant, work_s - request.charged_s)
        request.charged_s = 0.0

    # -- reservations ------------------------------------------------------------------------------------------------

    def sender_of(self, request: Request) -> str:
        """The decode worker that sends the KV of the present attempt; empty if a prefill worker does, or none."""
        worker_id = request.placement.prefill_worker if request.placement is not None else ""
        view = self.fleet.workers.get(worker_id)
        return worker_id if view is not None and view.role is Role.DECODE else ""

    def reservation(self, worker_id: str, request_id: str, attempt: int) -> Reservation | None:
        view = self.fleet.workers.get(worker_id)
        return None if view is None else view.reservations.get((request_id, attempt))

    def drop_reservation(self, request: Request, worker_id: str, attempt: int) -> bool:
        """Ends the reservation: the worker holds no memory for the attempt any more. False: there was none."""
        if (worker_id, attempt) not in request.reservations:
            return False
        request.reservations.discard((worker_id, attempt))
        view = self.fleet.workers[worker_id]
        reservation = view.reservations.get((request.request_id, attempt))
        if reservation is not None:
            view.unreserve(reservation, self.now_s)
        self.is_placing_due = True
        return True

    def cancel_attempt(self, request: Request) -> list[Command]:
        """Returns the commands that make every worker of the current attempt free its memory. A reservation that was
        never sent to its worker just ends."""
        commands: list[Command] = []
        for worker_id, attempt in sorted(request.reservations):
            reservation = self.reservation(worker_id, request.request_id, attempt)
            if attempt != request.attempt or reservation is None or reservation.is_cancelled:
                continue
            if not reservation.is_sent:
                self.drop_reservation(request, worker_id, attempt)
                continue
            self._is_ending(reservation, worker_id)
            commands.append(Cancel(key=AttemptKey(worker_id, request.request_id, attempt)))
        return commands

    def end_text(self, conversation: Conversation, hashes: tuple[bytes, ...]) -> list[Command]:
        """The commands that make the blocks of an ended session leave its workers first."""
        views = map(self.fleet.connected, conversation.workers if hashes else ())
        able = [one for one in views if one is not None and one.hello.ends_texts]
        return [EndText(worker_id=one.worker_id, block_hashes=hashes) for one in able]

    def requeue(self, request: Request, wait_s: float) -> list[Command]:
        """Puts a request whose stage is QUEUED again back into the queue."""
        commands = self.cancel_attempt(request)
        self.refund(request)
        request.placement = None
        request.not_before_s = self.now_s + wait_s
        self.enqueue(request)
        return commands

    def forget_if_free(self, request: Request) -> None:
        """Forgets an ended request once no worker holds memory for it."""
        if request.request_id in self.ended and not request.reservations and self.move(request, Move.RELEASED):
            self.ended.discard(request.request_id)
            self.timers.releases.clear(request.request_id)
            del self.requests[request.request_id]

    def forget_overdue(self) -> None:
        """Forgets ended requests whose workers never send Released, to bound the router's memory."""
        while (request_id := self.timers.releases.pop_due(self.now_s)) is not None:
            request = self.requests[request_id]
            for worker_id, attempt in sorted(request.reservations):
                self.counters["never_released"] += 1
                self.drop_reservation(request, worker_id, attempt)
            self.forget_if_free(request)

    def frees_itself(self, request: Request, worker_id: str) -> None:
        """Notes that the worker has ended the current attempt and will send Released without a command."""
        reservation = self.reservation(worker_id, request.request_id, request.attempt)
        if reservation is not None and not reservation.is_cancelled:
            self._is_ending(reservation, worker_id)

    def _is_ending(self, reservation: Reservation, worker_id: str) -> None:
        reservation.is_cancelled = True
        view = self.fleet.workers[worker_id]
        view.computed(reservation, self.now_s)
        view.left_batch(reservation)
        view.arrived(reservation)
        view.freed_s = self.now_s

    # -- explanations and the live view ----------------------------------------------------------------------------

    def note_end(self, request: Request, outcome: Outcome, why: str, retry_after_s: float | None) -> None:
        self.explanations.ended(request, outcome, self.now_s, why=why, retry_after_s=retry_after_s)
        self.live_log.ended(request, outcome, self.explanations.last(request.request_id), self.now_s)

    def explain(self, request_id: str, decision: Decision) -> None:
        self.explanations.note(self.requests[request_id], decision, self.now_s)


# --- snapshot -------------------------------------------------------------------------------------------------
# The router's state for operators: its view of the workers, requests by stage, and frames of the live view.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    worker_id: str
    incarnation: str
    role: Role
    endpoint: str
    version: str  # with its build; empty if unknown
    revision: str  # of its weights
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
    kv_tokens: int  # that its blocks hold
    max_batch: int
    max_batch_tokens: int


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
            revision=view.hello.revision,
            num_blocks=view.hello.num_blocks,
            is_connected=view.is_connected,
            is_draining=view.is_draining,
            is_drained=view.is_drained,
            is_usable=cluster.fleet.is_usable(view, cluster.now_s),
            silent_s=cluster.now_s - view.heard_s,
            report=view.report,
            booked_requests=len(view.reservations),
            booked_blocks=view.totals.blocks,
            cost=view.cost.coefficients,
            prefill_error=view.cost.prefill_error,
            decode_error=view.cost.decode_error,
            kv_tokens=view.hello.num_blocks * view.hello.block_size,
            max_batch=view.hello.max_batch,
            max_batch_tokens=view.hello.max_batch_tokens,
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
        booked=len(view.reservations),
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
        revision=view.hello.revision,
    )

"""Everything a RouterState knows, shared by the modules that change it. Pure.

Each module takes the ledger as its first argument and owns one part of the way of a request: placing.py,
attempts.py, recovery.py, ending.py. Commands go to `out` in the order in which they are to be carried out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field

from router.commands import Cancel, Command
from router.explaining import Explanations
from router.fleet import Fleet
from router.lengths import OutputLengths
from router.lifecycle import MOVES, IllegalMove, Move
from router.policy import make_policy
from router.policy.interface import Decision
from router.request import Request
from router.settings import RouterSettings
from router.view import Booking, WorkerView

QueueKey = tuple[int, int, float, int, str]


@dataclass(slots=True)
class Timers:
    """Times at which something is due, for the requests that are still there by then."""

    deadlines: list[tuple[float, str]] = field(default_factory=list)  # heap
    backoffs: list[tuple[float, str]] = field(default_factory=list)  # heap of requests that wait out a backoff
    releases: deque[tuple[float, str]] = field(
        default_factory=deque
    )  # ended ones; no alarm: silence rings while workers hold
    retry_at_s: float | None = None  # the head of the queue is worth another look
    silence_at_s: float | None = None  # look for silent workers
    wake_at_s: float | None = None  # the WakeAt that is out


class Ledger:
    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.worker_silence_s)
        self.policy = make_policy(settings, self.fleet.link)
        self.lengths = OutputLengths()
        self.requests: dict[str, Request] = {}
        self.queue: list[QueueKey] = []  # sorted; QUEUED requests that are not in backoff
        self.num_bound = 0  # QUEUED requests that wait in the line of one prefill worker
        self.parked: set[str] = set()  # QUEUED requests in backoff
        self.ended: set[str] = set()  # requests that only wait for Released
        self.counters: Counter[str] = Counter()
        self.explanations = Explanations(settings.explain_capacity)
        self.timers = Timers()
        self.out: list[Command] = []
        self.now_s = 0.0
        self.has_started = False
        self.is_closing = False
        self.is_placing_due = False
        self.no_decode_since_s: float | None = None
        self.placement_interval_s = 0.05  # moving mean, for retry_after_s
        self.last_placement_s = 0.0
        self.serial = 0

    # -- the lifecycle -------------------------------------------------------------------------------------------

    def move(self, request: Request, move: Move) -> bool:
        """Moves the request through the table. An illegal move raises if strict; else it is counted, and False."""
        after = MOVES.get((request.stage, move))
        if after is None:
            if self.settings.is_strict:
                raise IllegalMove(request.request_id, request.stage, move, tuple(request.story))
            self.counters["illegal"] += 1
            return False
        request.remember(f"{move.value} -> {after.value}")
        request.stage = after
        return True

    # -- the queue -----------------------------------------------------------------------------------------------

    @staticmethod
    def queue_key(request: Request) -> QueueKey:
        """Those whose client already has tokens, then by priority, then by the time their TTFT is promised for.

        The last is the least slack up to the prefill's length, and ages by itself.
        """
        group = 0 if request.output else 1
        promised_s = request.arrived_s + request.facts.slo.ttft_s
        return (group, -request.facts.priority, promised_s, request.serial, request.request_id)

    def enqueue(self, request: Request) -> None:
        request.queued_s = self.now_s
        if request.not_before_s > self.now_s:
            self.park(request, request.not_before_s)
        else:
            insort(self.queue, self.queue_key(request))
        self.is_placing_due = True

    def park(self, request: Request, until_s: float) -> None:
        """Not considered before `until_s`."""
        self.dequeue(request)
        request.not_before_s = until_s
        self.parked.add(request.request_id)
        heapq.heappush(self.timers.backoffs, (until_s, request.request_id))

    def unpark(self, request: Request) -> None:
        self.parked.discard(request.request_id)
        insort(self.queue, self.queue_key(request))
        self.is_placing_due = True

    def bind(self, request: Request, worker_id: str) -> None:
        """It waits in the line of one prefill worker from now on."""
        self.dequeue(request)
        view = self.fleet.views[worker_id]
        uncached = request.uncached_on(view)
        rank = (0 if request.output else 1, -request.facts.priority, request.serial)
        view.line.join(request.request_id, uncached, view.prefill_s(uncached, request.num_tokens - uncached), rank)
        request.bound_to = worker_id
        self.num_bound += 1

    def has_line(self, worker_id: str) -> bool:
        return self.num_bound > 0 and len(self.fleet.views[worker_id].line) > 0

    def unbind_all(self, view: WorkerView) -> None:
        """Whoever waited for this worker may go anywhere again."""
        for request_id in list(view.line):
            request = self.requests[request_id]
            self.dequeue(request)
            insort(self.queue, self.queue_key(request))
            self.is_placing_due = True

    def dequeue(self, request: Request) -> None:
        self.parked.discard(request.request_id)
        if request.bound_to:
            self.fleet.views[request.bound_to].line.leave(request.request_id)
            request.bound_to = ""
            self.num_bound -= 1
            return
        key = self.queue_key(request)
        index = bisect_left(self.queue, key)
        if index < len(self.queue) and self.queue[index] == key:
            del self.queue[index]

    @property
    def num_queued(self) -> int:
        return len(self.queue) + self.num_bound + len(self.parked)

    # -- holds ---------------------------------------------------------------------------------------------------

    def booking(self, worker_id: str, request_id: str, attempt: int) -> Booking | None:
        view = self.fleet.views.get(worker_id)
        return None if view is None else view.bookings.get((request_id, attempt))

    def drop_hold(self, request: Request, worker_id: str, attempt: int) -> bool:
        """The worker holds nothing (more) of the attempt. False: it never did, as far as is known."""
        if (worker_id, attempt) not in request.holds:
            return False
        request.holds.discard((worker_id, attempt))
        view = self.fleet.views[worker_id]
        booking = view.bookings.get((request.request_id, attempt))
        if booking is not None:
            view.unbook(booking, self.now_s)
        self.is_placing_due = True
        return True

    def cancel_attempt(self, request: Request) -> None:
        """Tells every worker that has the present attempt to free it. What was never sent just ends."""
        for worker_id, attempt in sorted(request.holds):
            if attempt == request.attempt:
                self.cancel_on(request, worker_id)

    def cancel_on(self, request: Request, worker_id: str) -> None:
        booking = self.booking(worker_id, request.request_id, request.attempt)
        if booking is None or booking.is_cancelled:
            return
        if not booking.is_sent:
            self.drop_hold(request, worker_id, request.attempt)
            return
        booking.is_cancelled = True
        view = self.fleet.views[worker_id]
        view.computed(booking, self.now_s)
        view.left_batch(booking)
        view.arrived(booking)
        self.out.append(Cancel(worker_id=worker_id, request_id=request.request_id, attempt=request.attempt))

    # -- explanations --------------------------------------------------------------------------------------------

    def explain(self, request_id: str, decision: Decision) -> None:
        self.explanations.note(self.requests[request_id], decision, self.now_s)

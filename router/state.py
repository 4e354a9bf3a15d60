"""The router's decisions: `RouterState.handle(event, now_s) -> list[Command]`. Pure.

It uses no clock, socket, thread or randomness: equal events at equal times give equal commands, so a recorded router
can be replayed (replay.py), and the simulator runs the same class. Modules:

    lifecycle.py   the legal events of each stage, and the next stages
    queue.py       in which order requests wait; shares.py: fairness between tenants
    placing.py     when the policy is asked, and how its decision is carried out
    refusal.py     which waiting requests are rejected, by the predicted start of forecast.py
    attempts.py    worker messages about an attempt
    recovery.py    lost attempts and lost workers
    ending.py      the end of requests
    explaining.py  explanations of placements
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from pdserve.core.phases import Phase
from pdserve.core.protocol import (
    AttemptFailed,
    BatchTimed,
    DrainWorker,
    FirstToken,
    Granted,
    Load,
    Refused,
    Released,
    TokensArrived,
    TransferEnded,
    UndrainWorker,
)
from pdserve.core.types import FinishReason
from router import attempts, ending, placing, recovery, refusal
from router.checking import check
from router.commands import Command, FailKind, WakeAt
from router.events import (
    ClientLeft,
    DrainRequested,
    Event,
    RequestArrived,
    RouterClosing,
    StopMatched,
    TimePassed,
    UndrainRequested,
    WorkerConnected,
    WorkerForgotten,
    WorkerLost,
)
from router.explaining import Explanation
from router.ledger import Ledger
from router.lifecycle import IllegalMove, Move, Stage
from router.policy.interface import Decision
from router.request import Request
from router.settings import RouterSettings
from router.snapshot import Topology, take_snapshot

SHORTEST_WAKE_S: Final = 0.001  # lower limit of the time to WakeAt


@final
class RouterState:
    def __init__(self, settings: RouterSettings | None = None) -> None:
        """Raises ConfigError on an unknown policy."""
        self.settings = settings or RouterSettings()
        self._ledger = Ledger(self.settings)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Handles one event and returns the commands to carry out, in order. `now_s` is from any monotonic clock."""
        ledger = self._ledger
        self._advance(now_s)
        self._expire_due()
        handler = _HANDLERS[type(event)]
        handler(ledger, event)
        if isinstance(event, RequestArrived) and event.request_id in ledger.queue:
            refusal.admit_before_placing(ledger, ledger.requests[event.request_id])
        if ledger.is_placing_due or _is_due(ledger.timers.retry_at_s, ledger.now_s):
            placing.place_waiting(ledger)
            if isinstance(event, RequestArrived):
                request = ledger.requests.get(event.request_id)
                if request is not None:
                    placing.settle_newcomer(ledger, request)
            ledger.pace.contended(len(ledger.queue) > 0, ledger.now_s)
        self._set_alarm()
        out, ledger.out = ledger.out, []
        return out

    # -- for inspection ----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counter[str]:
        """Counts of dropped messages, rejections, losses and outcomes, for metrics."""
        return self._ledger.counters

    @property
    def num_queued(self) -> int:
        return self._ledger.num_queued

    @property
    def num_running(self) -> int:
        """Number of requests on workers, without ended ones."""
        ledger = self._ledger
        return len(ledger.requests) - len(ledger.ended) - ledger.num_queued

    @property
    def is_empty(self) -> bool:
        """No request is known, not even one that waits for Released."""
        return not self._ledger.requests

    def knows(self, request_id: str) -> bool:
        """Also true while it only waits for Released, because its id must not be reused before."""
        return request_id in self._ledger.requests

    def stage_of(self, request_id: str) -> Stage | None:
        request = self._ledger.requests.get(request_id)
        return None if request is None else request.stage

    def cached_blocks(self, request_id: str) -> Mapping[str, int]:
        """Worker id -> leading blocks of the request's tokens that it may hold; nothing of an unknown request."""
        request = self._ledger.requests.get(request_id)
        return {} if request is None else dict(request.cached_blocks)

    def explain(self, request_id: str) -> Explanation | None:
        """Why a recent request was placed where it was; None if it is not among the last ones."""
        ledger = self._ledger
        request = ledger.requests.get(request_id)
        if request is None or request_id in ledger.ended:
            return ledger.explanations.last(request_id)
        return ledger.explanations.live(request, ledger.now_s)

    def snapshot(self) -> Topology:
        return take_snapshot(self._ledger)

    def check(self) -> None:
        """Raises AssertionError unless all invariants hold."""
        check(self._ledger)

    # -- time ----------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        ledger = self._ledger
        if not ledger.has_started:
            ledger.has_started = True
            ledger.now_s = ledger.last_placement_s = now_s
        gap_s = now_s - ledger.now_s
        if gap_s > self.settings.worker_silence_s:
            # While workers are connected, alarms are at most half of this apart, so the router itself was suspended.
            ledger.fleet.excuse_silence(gap_s)
        ledger.now_s = max(ledger.now_s, now_s)
        if _is_due(ledger.timers.wake_at_s, ledger.now_s):
            ledger.timers.wake_at_s = None
        if _is_due(ledger.timers.silence_at_s, ledger.now_s):
            ledger.timers.silence_at_s = None
            recovery.give_up_silent(ledger)

    def _expire_due(self) -> None:
        ledger = self._ledger
        while (request_id := ledger.timers.deadlines.pop_due(ledger.now_s)) is not None:
            ending.expire(ledger, ledger.requests[request_id])
            ledger.is_placing_due = True
        ending.forget_overdue(ledger)
        if _is_due(ledger.timers.backoffs.next_at_s, ledger.now_s):
            ledger.is_placing_due = True

    def _set_alarm(self) -> None:
        """Requests TimePassed at the earliest time at which something is due, unless it was requested already."""
        ledger, timers = self._ledger, self._ledger.timers
        if timers.silence_at_s is None:
            limit_s = 2.0 * self.settings.worker_silence_s
            ends = [view.heard_s + limit_s for view in ledger.fleet.views.values() if view.is_connected]
            if ends:  # workers beyond the limit are abandoned; their late attempts are checked again
                ahead = [at_s for at_s in ends if at_s > ledger.now_s]
                timers.silence_at_s = min(ahead, default=ledger.now_s + max(0.25 * limit_s, SHORTEST_WAKE_S))
        alarms = (timers.retry_at_s, timers.silence_at_s, timers.deadlines.next_at_s, timers.backoffs.next_at_s)
        due = [at_s for at_s in alarms if at_s is not None]
        if due:
            at_s = max(min(due), ledger.now_s + SHORTEST_WAKE_S)
            if timers.wake_at_s is None or at_s < timers.wake_at_s:
                timers.wake_at_s = at_s
                ledger.out.append(WakeAt(at_s=at_s))


def _is_due(at_s: float | None, now_s: float) -> bool:
    return at_s is not None and at_s <= now_s


def _on_arrived(ledger: Ledger, event: RequestArrived) -> None:
    if event.request_id in ledger.requests:
        if ledger.settings.is_strict:
            raise IllegalMove(event.request_id, ledger.requests[event.request_id].stage, Move.ARRIVED)
        ledger.counters["illegal"] += 1
        return
    deadline_at_s = None
    if event.deadline_s is not None and "deadline-drop" in ledger.rules:
        deadline_at_s = ledger.now_s + event.deadline_s
    ledger.serial += 1
    ledger.explanations.forget(event.request_id)
    request = Request(
        facts=event,
        arrived_s=ledger.now_s - event.spent_s,
        deadline_at_s=deadline_at_s,
        serial=ledger.serial,
        cached_blocks=dict(event.cached_blocks),
    )
    looked_up_s = min(max(event.lookup_s, 0.0), event.spent_s)
    request.timeline.close(Phase.PREPARE, ledger.now_s - looked_up_s, 0, is_rest_reported=True)
    request.timeline.close(Phase.PREFIX_LOOKUP, ledger.now_s, 0, is_rest_reported=True)
    ledger.requests[event.request_id] = request
    ledger.enqueue(request)
    ledger.note_demand(request)
    if ledger.is_closing:
        ending.turn_away(ledger, request, FailKind.UNAVAILABLE, "the router is shutting down", retry_after_s=1.0)
    elif deadline_at_s is not None and deadline_at_s <= ledger.now_s:
        ending.expire(ledger, request)
    elif deadline_at_s is not None:
        ledger.timers.deadlines.set(event.request_id, deadline_at_s)


def _on_client_left(ledger: Ledger, event: ClientLeft) -> None:
    request = ledger.requests.get(event.request_id)
    if request is not None and event.request_id not in ledger.ended:
        ending.cancel(ledger, request)
        ledger.is_placing_due = True


def _on_stop_matched(ledger: Ledger, event: StopMatched) -> None:
    request = ledger.requests.get(event.request_id)
    if request is not None and event.request_id not in ledger.ended:
        ending.finish(ledger, request, FinishReason.STOP, event.num_output_tokens, cancel=True)
        ledger.is_placing_due = True


def _on_load(ledger: Ledger, event: Load) -> None:
    view = ledger.fleet.connected(event.worker_id)
    if view is None:
        ledger.counters["late"] += 1
        return
    if event.is_draining is not view.report.is_draining:
        ledger.fleet.changed()
    view.reported(event, ledger.now_s)
    ledger.is_placing_due = ledger.is_placing_due or len(ledger.queue) + ledger.num_bound > 0


def _on_batch_timed(ledger: Ledger, event: BatchTimed) -> None:
    view = ledger.fleet.connected(event.worker_id)
    if view is None:
        ledger.counters["late"] += 1
        return
    if not view.timed(event):
        ledger.counters["odd_batch_times"] += 1


def _on_drain(ledger: Ledger, event: DrainRequested) -> None:
    view = ledger.fleet.connected(event.worker_id)
    if view is not None:
        view.is_drain_requested = True
        ledger.fleet.changed()
        ledger.shrunk_s = ledger.now_s
        ledger.is_placing_due = True
        ledger.out.append(DrainWorker(worker_id=event.worker_id))


def _on_undrain(ledger: Ledger, event: UndrainRequested) -> None:
    view = ledger.fleet.connected(event.worker_id)
    if view is not None:
        view.is_drain_requested = False
        ledger.fleet.changed()
        ledger.is_placing_due = True
        ledger.out.append(UndrainWorker(worker_id=event.worker_id))


def _on_closing(ledger: Ledger, event: RouterClosing) -> None:
    ledger.is_closing = True


def _on_time(ledger: Ledger, event: TimePassed) -> None:
    """Everything that is due is done before and after every event. The alarm may be slightly early."""
    ledger.timers.wake_at_s = None


def _heard(handler: Callable[[Ledger, Any], None]) -> Callable[[Ledger, Any], None]:
    """Any message of a worker ends its silence."""

    def hear(ledger: Ledger, event: Any) -> None:
        view = ledger.fleet.connected(event.worker_id)
        if view is not None:
            ledger.fleet.heard(view, ledger.now_s)
        handler(ledger, event)

    return hear


_HANDLERS: Final[Mapping[type, Callable[[Ledger, Any], None]]] = {
    RequestArrived: _on_arrived,
    ClientLeft: _on_client_left,
    StopMatched: _on_stop_matched,
    WorkerConnected: recovery.on_worker_connected,
    WorkerLost: recovery.on_worker_lost,
    WorkerForgotten: recovery.on_worker_forgotten,
    Load: _heard(_on_load),
    BatchTimed: _heard(_on_batch_timed),
    Granted: _heard(attempts.on_granted),
    Refused: _heard(attempts.on_refused),
    FirstToken: _heard(attempts.on_first_token),
    TransferEnded: _heard(attempts.on_transfer_ended),
    TokensArrived: _heard(attempts.on_tokens),
    AttemptFailed: _heard(attempts.on_attempt_failed),
    Released: _heard(attempts.on_released),
    DrainRequested: _on_drain,
    UndrainRequested: _on_undrain,
    RouterClosing: _on_closing,
    TimePassed: _on_time,
}

__all__ = ["Decision", "Explanation", "RouterState", "Topology"]

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
from router.cluster_state import ClusterState
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
        self._cluster = ClusterState(self.settings)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Handles one event and returns the commands to carry out, in order. `now_s` is from any monotonic clock."""
        cluster = self._cluster
        self._advance(now_s)
        self._expire_due()
        handler = _HANDLERS[type(event)]
        handler(cluster, event)
        if isinstance(event, RequestArrived) and event.request_id in cluster.queue:
            refusal.admit_before_placing(cluster, cluster.requests[event.request_id])
        if cluster.is_placing_due or _is_due(cluster.timers.retry_at_s, cluster.now_s):
            placing.place_waiting(cluster)
            if isinstance(event, RequestArrived):
                request = cluster.requests.get(event.request_id)
                if request is not None:
                    placing.settle_newcomer(cluster, request)
            cluster.pace.contended(len(cluster.queue) > 0, cluster.now_s)
        self._set_alarm()
        out, cluster.out = cluster.out, []
        return out

    # -- for inspection ----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counter[str]:
        """Counts of dropped messages, rejections, losses and outcomes, for metrics."""
        return self._cluster.counters

    @property
    def num_queued(self) -> int:
        return self._cluster.num_queued

    @property
    def num_running(self) -> int:
        """Number of requests on workers, without ended ones."""
        cluster = self._cluster
        return len(cluster.requests) - len(cluster.ended) - cluster.num_queued

    @property
    def is_empty(self) -> bool:
        """No request is known, not even one that waits for Released."""
        return not self._cluster.requests

    def knows(self, request_id: str) -> bool:
        """Also true while it only waits for Released, because its id must not be reused before."""
        return request_id in self._cluster.requests

    def stage_of(self, request_id: str) -> Stage | None:
        request = self._cluster.requests.get(request_id)
        return None if request is None else request.stage

    def cached_blocks(self, request_id: str) -> Mapping[str, int]:
        """Worker id -> leading blocks of the request's tokens that it may hold; nothing of an unknown request."""
        request = self._cluster.requests.get(request_id)
        return {} if request is None else dict(request.cached_blocks)

    def explain(self, request_id: str) -> Explanation | None:
        """Why a recent request was placed where it was; None if it is not among the last ones."""
        cluster = self._cluster
        request = cluster.requests.get(request_id)
        if request is None or request_id in cluster.ended:
            return cluster.explanations.last(request_id)
        return cluster.explanations.live(request, cluster.now_s)

    def snapshot(self) -> Topology:
        return take_snapshot(self._cluster)

    def check(self) -> None:
        """Raises AssertionError unless all invariants hold."""
        check(self._cluster)

    # -- time ----------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        cluster = self._cluster
        if not cluster.has_started:
            cluster.has_started = True
            cluster.now_s = cluster.last_placement_s = now_s
        gap_s = now_s - cluster.now_s
        if gap_s > self.settings.worker_silence_s:
            # While workers are connected, alarms are at most half of this apart, so the router itself was suspended.
            cluster.fleet.excuse_silence(gap_s)
        cluster.now_s = max(cluster.now_s, now_s)
        if _is_due(cluster.timers.wake_at_s, cluster.now_s):
            cluster.timers.wake_at_s = None
        if _is_due(cluster.timers.silence_at_s, cluster.now_s):
            cluster.timers.silence_at_s = None
            recovery.give_up_silent(cluster)

    def _expire_due(self) -> None:
        cluster = self._cluster
        while (request_id := cluster.timers.deadlines.pop_due(cluster.now_s)) is not None:
            ending.expire(cluster, cluster.requests[request_id])
            cluster.is_placing_due = True
        ending.forget_overdue(cluster)
        if _is_due(cluster.timers.backoffs.next_at_s, cluster.now_s):
            cluster.is_placing_due = True

    def _set_alarm(self) -> None:
        """Requests TimePassed at the earliest time at which something is due, unless it was requested already."""
        cluster, timers = self._cluster, self._cluster.timers
        if timers.silence_at_s is None:
            limit_s = 2.0 * self.settings.worker_silence_s
            ends = [view.heard_s + limit_s for view in cluster.fleet.views.values() if view.is_connected]
            if ends:  # workers beyond the limit are abandoned; their late attempts are checked again
                ahead = [at_s for at_s in ends if at_s > cluster.now_s]
                timers.silence_at_s = min(ahead, default=cluster.now_s + max(0.25 * limit_s, SHORTEST_WAKE_S))
        alarms = (timers.retry_at_s, timers.silence_at_s, timers.deadlines.next_at_s, timers.backoffs.next_at_s)
        due = [at_s for at_s in alarms if at_s is not None]
        if due:
            at_s = max(min(due), cluster.now_s + SHORTEST_WAKE_S)
            if timers.wake_at_s is None or at_s < timers.wake_at_s:
                timers.wake_at_s = at_s
                cluster.out.append(WakeAt(at_s=at_s))


def _is_due(at_s: float | None, now_s: float) -> bool:
    return at_s is not None and at_s <= now_s


def _on_arrived(cluster: ClusterState, event: RequestArrived) -> None:
    if event.request_id in cluster.requests:
        if cluster.settings.is_strict:
            raise IllegalMove(event.request_id, cluster.requests[event.request_id].stage, Move.ARRIVED)
        cluster.counters["illegal"] += 1
        return
    deadline_at_s = None
    if event.deadline_s is not None and "deadline-drop" in cluster.rules:
        deadline_at_s = cluster.now_s + event.deadline_s
    cluster.serial += 1
    cluster.explanations.forget(event.request_id)
    request = Request(
        facts=event,
        arrived_s=cluster.now_s - event.spent_s,
        deadline_at_s=deadline_at_s,
        serial=cluster.serial,
        cached_blocks=dict(event.cached_blocks),
    )
    looked_up_s = min(max(event.lookup_s, 0.0), event.spent_s)
    request.timeline.close(Phase.PREPARE, cluster.now_s - looked_up_s, 0, is_rest_reported=True)
    request.timeline.close(Phase.PREFIX_LOOKUP, cluster.now_s, 0, is_rest_reported=True)
    cluster.requests[event.request_id] = request
    cluster.enqueue(request)
    cluster.note_demand(request)
    if cluster.is_closing:
        ending.turn_away(cluster, request, FailKind.UNAVAILABLE, "the router is shutting down", retry_after_s=1.0)
    elif deadline_at_s is not None and deadline_at_s <= cluster.now_s:
        ending.expire(cluster, request)
    elif deadline_at_s is not None:
        cluster.timers.deadlines.set(event.request_id, deadline_at_s)


def _on_client_left(cluster: ClusterState, event: ClientLeft) -> None:
    request = cluster.requests.get(event.request_id)
    if request is not None and event.request_id not in cluster.ended:
        ending.cancel(cluster, request)
        cluster.is_placing_due = True


def _on_stop_matched(cluster: ClusterState, event: StopMatched) -> None:
    request = cluster.requests.get(event.request_id)
    if request is not None and event.request_id not in cluster.ended:
        ending.finish(cluster, request, FinishReason.STOP, event.num_output_tokens, cancel=True)
        cluster.is_placing_due = True


def _on_load(cluster: ClusterState, event: Load) -> None:
    view = cluster.fleet.connected(event.worker_id)
    if view is None:
        cluster.counters["late"] += 1
        return
    if event.is_draining is not view.report.is_draining:
        cluster.fleet.changed()
    view.reported(event, cluster.now_s)
    cluster.is_placing_due = cluster.is_placing_due or len(cluster.queue) + cluster.num_bound > 0


def _on_batch_timed(cluster: ClusterState, event: BatchTimed) -> None:
    view = cluster.fleet.connected(event.worker_id)
    if view is None:
        cluster.counters["late"] += 1
        return
    if not view.timed(event):
        cluster.counters["odd_batch_times"] += 1


def _on_drain(cluster: ClusterState, event: DrainRequested) -> None:
    view = cluster.fleet.connected(event.worker_id)
    if view is not None:
        view.is_drain_requested = True
        cluster.fleet.changed()
        cluster.shrunk_s = cluster.now_s
        cluster.is_placing_due = True
        cluster.out.append(DrainWorker(worker_id=event.worker_id))


def _on_undrain(cluster: ClusterState, event: UndrainRequested) -> None:
    view = cluster.fleet.connected(event.worker_id)
    if view is not None:
        view.is_drain_requested = False
        cluster.fleet.changed()
        cluster.is_placing_due = True
        cluster.out.append(UndrainWorker(worker_id=event.worker_id))


def _on_closing(cluster: ClusterState, event: RouterClosing) -> None:
    cluster.is_closing = True


def _on_time(cluster: ClusterState, event: TimePassed) -> None:
    """Everything that is due is done before and after every event. The alarm may be slightly early."""
    cluster.timers.wake_at_s = None


def _heard(handler: Callable[[ClusterState, Any], None]) -> Callable[[ClusterState, Any], None]:
    """Any message of a worker ends its silence."""

    def hear(cluster: ClusterState, event: Any) -> None:
        view = cluster.fleet.connected(event.worker_id)
        if view is not None:
            cluster.fleet.heard(view, cluster.now_s)
        handler(cluster, event)

    return hear


_HANDLERS: Final[Mapping[type, Callable[[ClusterState, Any], None]]] = {
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

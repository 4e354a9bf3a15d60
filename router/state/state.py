"""The router's decisions: `RouterState.handle(event, now_s) -> list[Command]`. Pure.

It uses no clock, socket, thread or randomness, so equal events at equal times give equal commands. A recording can be
replayed (router/recording/replay.py), and the simulator runs the same class. Modules of this room:

    lifecycle.py    the legal events of each stage, and the next stages
    attempts.py     worker messages about an attempt; workers that connect or are lost
    endings.py      ends of requests and of attempts, with all consequences
    queue.py        the order of waiting requests, and fairness between tenants
    placing.py      when the policy is asked, and what its decision causes
    migration.py    which answers leave a draining decode worker
    rejection.py    which new, waiting or late requests are rejected, by the predicted starts of forecast.py
    history.py      explanations of placements, and ended requests
    sessions.py     which requests are turns of one conversation, and when the next turn is expected
    turns.py        what is learned of turns, and the targets of the turns of a task
    cluster_state.py  the data that these modules share; the state for operators, and frames of the live view

`handle` runs five parts in order: what is due by now, the event's handler, the endings that it returns, migration, and
placing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

from pdserve.core.live import LiveFrame
from pdserve.core.protocol import (
    AttemptFailed,
    BatchTimed,
    DrainWorker,
    FirstToken,
    Granted,
    Load,
    PullEnded,
    Refused,
    Released,
    TokensArrived,
    TransferEnded,
    UndrainWorker,
)
from pdserve.core.results import Phase
from pdserve.core.types import FinishReason, Role, Slo
from router.policy.interface import Decision
from router.state import attempts, migration, placing
from router.state.cluster_state import MAX_IN_PROGRESS, ClusterSnapshot, ClusterState, live_frame, take_snapshot
from router.state.endings import APPLY, Disconnect, Ending, Expire, Fail, Finish, Reject, apply_ending
from router.state.history import DecisionRecord
from router.state.interface import (
    AdaptersChanged,
    ClientLeft,
    Command,
    DrainEnded,
    DrainRequested,
    Event,
    FailKind,
    RequestArrived,
    RouterClosing,
    RouterSettings,
    SessionEnded,
    StopMatched,
    TimePassed,
    UndrainRequested,
    WakeAt,
    WorkerConnected,
    WorkerForgotten,
    WorkerLost,
)
from router.state.lifecycle import ENDED, NEEDS_SENDER, WITH_WORKERS, IllegalMove, Move, SenderEnd, Stage
from router.state.request import Request
from router.state.sessions import Sessions

# --- invariants -----------------------------------------------------------------------------------------------
# Tests call `check` after every event.


def check(cluster: ClusterState) -> None:
    """Raises AssertionError, naming the violated invariant."""
    cluster.queue.check()
    cluster.sessions.check()
    cluster.fleet.check(cluster.now_s)
    queued = list(cluster.queue)
    assert len(queued) == len(set(queued)), "a request is queued twice"
    assert not cluster.parked & set(queued), "a request is queued and in backoff"
    bound = [request_id for view in cluster.fleet.workers.values() for request_id in view.queue]
    assert len(bound) == cluster.num_bound, "bound requests are miscounted"
    assert len(bound) == len(set(bound)), "a request is in the queues of two workers"
    assert not set(bound) & (cluster.parked | set(queued)), "a request is in a worker's queue and elsewhere"
    for view in cluster.fleet.workers.values():
        for request_id in view.queue:
            assert cluster.requests[request_id].bound_to == view.worker_id, (
                f"{request_id} is in the queue of another worker"
            )
    waiting = cluster.parked | set(queued) | set(bound)
    assert waiting <= cluster.requests.keys(), "a forgotten request is queued"
    assert cluster.ended <= cluster.requests.keys(), "a forgotten request is among the ended ones"
    assert cluster.migrating <= cluster.requests.keys() - cluster.ended, "an ended request is migrating"
    for request_id, request in cluster.requests.items():
        assert request.request_id == request_id
        assert (request.stage is Stage.QUEUED) is (request_id in waiting), f"{request_id}: {request.stage} and queue"
        assert (request.stage in ENDED) is (request_id in cluster.ended), f"{request_id}: {request.stage} and ended"
        assert request.stage is not Stage.FORGOTTEN, f"{request_id} is forgotten and remembered"
        assert not request.bound_to or request_id in bound, f"{request_id} is bound and in no worker's queue"
        if request.stage in ENDED:
            assert request.reservations, f"{request_id} has ended and has no reservations, but is not forgotten"
        if request.stage in WITH_WORKERS:
            placement = request.placement
            assert placement is not None, f"{request_id}: {request.stage} without a placement"
            assert (placement.decode_worker, request.attempt) in request.reservations, (
                f"{request_id}: no decode reservation"
            )
            present = placement.workers if request.stage in NEEDS_SENDER[SenderEnd.RELEASED] else placement.workers[-1:]
            for worker_id in present:
                assert cluster.fleet.workers[worker_id].hello.weights == request.weights, f"{request_id}: other weights"
            if request.stage in NEEDS_SENDER[SenderEnd.RELEASED]:
                assert (placement.prefill_worker, request.attempt) in request.reservations, (
                    f"{request_id}: no prefill reservation"
                )
        if request.stage is Stage.QUEUED:
            assert request.placement is None, f"{request_id} is queued and placed"
            for worker_id, attempt in request.reservations:
                reservation = cluster.reservation(worker_id, request_id, attempt)
                assert reservation is not None, f"{request_id}: no reservation on the worker"
                assert reservation.is_cancelled, f"{request_id} is queued, and {worker_id} was not asked to free it"
        for worker_id, attempt in request.reservations:
            assert cluster.reservation(worker_id, request_id, attempt) is not None, (
                f"{request_id}: no reservation on the worker"
            )
    for view in cluster.fleet.workers.values():
        view.check()
        for request_id, attempt in view.reservations:
            holder = cluster.requests.get(request_id)
            assert holder is not None, f"{view.worker_id} is reserved for {request_id}, which is forgotten"
            assert (view.worker_id, attempt) in holder.reservations, f"{request_id}: no reservation of the request"
    timers = cluster.timers
    for alarms, of in ((timers.deadlines, cluster.requests.keys() - cluster.ended), (timers.releases, cluster.ended)):
        alarms.check()
        assert all(request_id in of for request_id in alarms), "an alarm outlives its request"
    timers.backoffs.check()
    assert set(timers.backoffs) == cluster.parked, "a backoff without its alarm, or the reverse"
    assert len(cluster.explanations) <= cluster.settings.explain_capacity, "explanations are not bounded"


# --- handling of events ---------------------------------------------------------------------------------------

RETRY_S: Final = 1.0  # after which clients of a closing router retry
SHORTEST_WAKE_S: Final = 0.001  # lower limit of the time to WakeAt

_CLOSING: Final = "the router is shutting down"


@final
class RouterState:
    def __init__(self, settings: RouterSettings | None = None) -> None:
        """Raises ConfigError on an unknown policy."""
        self.settings = settings or RouterSettings()
        self._cluster = ClusterState(self.settings)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Handles one event and returns the commands to execute, in order. `now_s` is from any monotonic clock."""
        cluster = self._cluster
        commands = self._due(now_s)
        commands += _apply_endings(cluster, _HANDLERS[type(event)](cluster, event))
        newcomer = cluster.requests.get(event.request_id) if isinstance(event, RequestArrived) else None
        commands += migration.migrate(cluster)
        commands += placing.place(cluster, newcomer)
        self._set_alarm(commands)
        return commands

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
        """Whether no request is known, not even one that waits for Released."""
        return not self._cluster.requests

    def role_of(self, worker_id: str) -> Role | None:
        """None if it has never attached, or was forgotten."""
        view = self._cluster.fleet.workers.get(worker_id)
        return None if view is None else view.role

    def revision_of(self, worker_id: str) -> str:
        """Of its weights; empty: that of the cluster's start, or an unknown worker."""
        view = self._cluster.fleet.workers.get(worker_id)
        return "" if view is None else view.hello.revision

    def knows(self, request_id: str) -> bool:
        """Whether the id is in use. True until all workers sent Released, because the id must not be reused before."""
        return request_id in self._cluster.requests

    def stage_of(self, request_id: str) -> Stage | None:
        request = self._cluster.requests.get(request_id)
        return None if request is None else request.stage

    def cached_blocks(self, request_id: str) -> Mapping[str, int]:
        """Worker id -> number of leading blocks of the request that its pool may have. It lacks workers that have some
        of them in other tiers, and is empty for an unknown request."""
        request = self._cluster.requests.get(request_id)
        if request is None:
            return {}
        return {name: count for name, count in request.cached_blocks.items() if name not in request.cached_tiers}

    def explain(self, request_id: str) -> DecisionRecord | None:
        """The explanation of a recent placement; None if it is no longer kept."""
        cluster = self._cluster
        request = cluster.requests.get(request_id)
        if request is None or request_id in cluster.ended:
            return cluster.explanations.last(request_id)
        return cluster.explanations.live(request, cluster.now_s)

    def targets(self, facts: RequestArrived, stated: frozenset[str], now_s: float) -> Slo:
        """Those that a request should arrive with: `facts.slo`, or what its task's deadline makes of them. The request
        itself states those in `stated` (names of fields)."""
        return self._cluster.targets(facts, stated, now_s)

    @property
    def sessions(self) -> Sessions:
        """For inspection only."""
        return self._cluster.sessions

    def block_size_of(self, worker_id: str) -> int:
        """0: an unknown worker."""
        view = self._cluster.fleet.workers.get(worker_id)
        return 0 if view is None else view.hello.block_size

    @property
    def next_weights(self) -> str:
        """Those that a new request should get; empty: any."""
        return self._cluster.fleet.next_weights(self._cluster.now_s)

    def snapshot(self) -> ClusterSnapshot:
        return take_snapshot(self._cluster)

    @property
    def has_undrained_decode(self) -> bool:
        """Whether a decode worker is connected that no operator has drained."""
        return self._cluster.fleet.has_undrained_decode()

    @property
    def num_ended(self) -> int:
        """Requests that have ended since the start."""
        return self._cluster.live_log.num_ended

    def live_frame(self, now_s: float, after: int, most: int = MAX_IN_PROGRESS) -> LiveFrame:
        """The state at `now_s`: at most `most` requests in progress, and those that ended after the first `after` ones,
        if they are still kept."""
        return live_frame(self._cluster, now_s, after, most)

    def check(self) -> None:
        """Raises AssertionError unless all invariants hold."""
        check(self._cluster)

    # -- time ----------------------------------------------------------------------------------------------------

    def _due(self, now_s: float) -> list[Command]:
        """Handles what has become due by `now_s`: silent workers, deadlines, releases and backoffs."""
        cluster, timers = self._cluster, self._cluster.timers
        commands: list[Command] = []
        if not cluster.has_started:
            cluster.has_started = True
            cluster.now_s = cluster.started_s = cluster.last_placement_s = now_s
        gap_s = now_s - cluster.now_s
        if gap_s > self.settings.worker_silence_s:
            # While workers are connected, alarms are at most half of this apart, so this process was suspended.
            cluster.fleet.excuse_silence(gap_s)
        if now_s > cluster.now_s:
            cluster.now_s = now_s
        now_s = cluster.now_s
        if timers.wake_at_s is not None and timers.wake_at_s <= now_s:
            timers.wake_at_s = None
        if timers.silence_at_s is not None and timers.silence_at_s <= now_s:
            timers.silence_at_s = None
            commands += attempts.on_silence(cluster)
        while (request_id := timers.deadlines.pop_due(now_s)) is not None:
            commands += apply_ending(cluster, Expire(cluster.requests[request_id]))
            cluster.is_placing_due = True
        cluster.forget_overdue()
        cluster.sessions.advance(now_s)
        backoff_at_s = timers.backoffs.next_at_s
        if backoff_at_s is not None and backoff_at_s <= now_s:
            cluster.is_placing_due = True
        return commands

    def _set_alarm(self, commands: list[Command]) -> None:
        """Requests TimePassed for the earliest due time, unless that was requested already."""
        cluster, timers = self._cluster, self._cluster.timers
        if timers.silence_at_s is None:
            limit_s = 2.0 * self.settings.worker_silence_s
            ends = [view.heard_s + limit_s for view in cluster.fleet.workers.values() if view.is_connected]
            if ends:  # if all workers are beyond the limit, attempts that were placed late are checked again
                ahead = [at_s for at_s in ends if at_s > cluster.now_s]
                timers.silence_at_s = min(ahead, default=cluster.now_s + max(0.25 * limit_s, SHORTEST_WAKE_S))
        wake_at_s = math.inf if timers.wake_at_s is None else timers.wake_at_s
        first_s = wake_at_s
        for at_s in (timers.retry_at_s, timers.silence_at_s, timers.deadlines.next_at_s, timers.backoffs.next_at_s):
            if at_s is not None and at_s < first_s:
                first_s = at_s
        if first_s < wake_at_s:
            at_s = max(first_s, cluster.now_s + SHORTEST_WAKE_S)
            if at_s < wake_at_s:
                timers.wake_at_s = at_s
                commands.append(WakeAt(at_s=at_s))


def _apply_endings(cluster: ClusterState, results: Iterable[Command | Ending]) -> list[Command]:
    """Applies the endings among a handler's results, and returns all commands in order."""
    commands: list[Command] = []
    for one in results:
        apply = APPLY.get(type(one))
        if apply is None:
            commands.append(one)  # type: ignore[arg-type]  # the other results are commands
        else:
            commands += apply(cluster, one)
    return commands


def _on_arrived(cluster: ClusterState, event: RequestArrived) -> Iterable[Command | Ending]:
    if event.request_id in cluster.requests:
        if cluster.settings.is_strict:
            raise IllegalMove(event.request_id, cluster.requests[event.request_id].stage, Move.ARRIVED)
        cluster.counters["illegal"] += 1
        return ()
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
        weights=event.weights,
        cached_blocks=dict(event.cached_blocks),
        cached_tiers=dict(event.cached_tiers),
    )
    hinted = 0 if event.reuse_within_s is None else cluster.fleet.kv_tokens
    request.conversation = cluster.sessions.arrived(event, hinted, cluster.now_s)
    if request.conversation is not None:
        request.reuse_within_s = request.conversation.reuse_within_s
    cluster.fleet.assigned[event.weights] += 1
    if event.output_ids:
        request.resume(cluster.now_s)
    looked_up_s = min(max(event.lookup_s, 0.0), event.spent_s)
    request.timeline.close(Phase.PREPARE, cluster.now_s - looked_up_s, 0)
    request.timeline.close(Phase.PREFIX_LOOKUP, cluster.now_s, 0)
    cluster.requests[event.request_id] = request
    cluster.enqueue(request)
    cluster.note_demand(request)
    if cluster.is_closing:
        return (Reject(request, FailKind.SHUTTING_DOWN, _CLOSING, retry_after_s=RETRY_S),)
    if deadline_at_s is not None and deadline_at_s <= cluster.now_s:
        return (Expire(request),)
    if event.finish is not None:
        return (Finish(request, event.finish, cancel=False),)
    if deadline_at_s is not None:
        cluster.timers.deadlines.set(event.request_id, deadline_at_s)
    return ()


def _on_client_left(cluster: ClusterState, event: ClientLeft) -> Iterable[Command | Ending]:
    request = cluster.requests.get(event.request_id)
    if request is None or event.request_id in cluster.ended:
        return ()
    cluster.is_placing_due = True
    return (Disconnect(request),)


def _on_stop_matched(cluster: ClusterState, event: StopMatched) -> Iterable[Command | Ending]:
    request = cluster.requests.get(event.request_id)
    if request is None or event.request_id in cluster.ended:
        return ()
    cluster.is_placing_due = True
    return (Finish(request, FinishReason.STOP, cancel=True, num_output_tokens=event.num_output_tokens),)


def _on_load(cluster: ClusterState, event: Load) -> Iterable[Command | Ending]:
    view = cluster.fleet.connected(event.worker_id)
    if view is None:
        cluster.counters["late"] += 1
        return ()
    if event.is_draining is not view.report.is_draining:
        cluster.fleet.changed()
    view.reported(event, cluster.now_s)
    cluster.is_placing_due = cluster.is_placing_due or len(cluster.queue) + cluster.num_bound > 0
    return ()


def _on_batch_timed(cluster: ClusterState, event: BatchTimed) -> Iterable[Command | Ending]:
    view = cluster.fleet.connected(event.worker_id)
    if view is None:
        cluster.counters["late"] += 1
    elif not view.timed(event):
        cluster.counters["invalid_batch_times"] += 1
    return ()


def _on_session_ended(cluster: ClusterState, event: SessionEnded) -> Iterable[Command | Ending]:
    session = cluster.sessions.find(event.tenant, event.session_id)
    over = [] if session is None else cluster.sessions.end(session, cluster.now_s)
    return [command for one, hashes in over for command in cluster.end_text(one, hashes)]


def _on_drain(cluster: ClusterState, event: DrainRequested) -> Iterable[Command | Ending]:
    view = cluster.fleet.connected(event.worker_id)
    if view is None:
        return ()
    view.is_drain_requested = True
    cluster.fleet.changed()
    cluster.shrunk_s = cluster.now_s
    cluster.is_placing_due = True
    return (DrainWorker(worker_id=event.worker_id),)


def _on_undrain(cluster: ClusterState, event: UndrainRequested) -> Iterable[Command | Ending]:
    view = cluster.fleet.connected(event.worker_id)
    if view is None:
        return ()
    view.is_drain_requested = False
    cluster.fleet.changed()
    cluster.is_placing_due = True
    return (UndrainWorker(worker_id=event.worker_id),)


def _on_closing(cluster: ClusterState, event: RouterClosing) -> Iterable[Command | Ending]:
    cluster.is_closing = True
    return ()


def _on_drain_ended(cluster: ClusterState, event: DrainEnded) -> Iterable[Command | Ending]:
    cluster.is_closing = True
    return [
        Fail(request, FailKind.SHUTTING_DOWN, _CLOSING, retry_after_s=RETRY_S)
        for request in cluster.requests.values()
        if request.request_id not in cluster.ended
    ]


def _on_time(cluster: ClusterState, event: TimePassed) -> Iterable[Command | Ending]:
    """Nothing is left to do: `handle` runs everything that is due for every event. The alarm may be slightly early."""
    cluster.timers.wake_at_s = None
    return ()


Handler = Callable[[ClusterState, Any], Iterable[Command | Ending]]


def _heard(handler: Handler) -> Handler:
    """Notes that the worker is not silent. Any of its messages counts."""

    def hear(cluster: ClusterState, event: Any) -> Iterable[Command | Ending]:
        view = cluster.fleet.connected(event.worker_id)
        if view is not None:
            cluster.fleet.heard(view, cluster.now_s)
        return handler(cluster, event)

    return hear


_HANDLERS: Final[Mapping[type, Handler]] = {
    RequestArrived: _on_arrived,
    ClientLeft: _on_client_left,
    StopMatched: _on_stop_matched,
    WorkerConnected: attempts.on_worker_connected,
    AdaptersChanged: attempts.on_adapters_changed,
    WorkerLost: attempts.on_worker_lost,
    WorkerForgotten: attempts.on_worker_forgotten,
    Load: _heard(_on_load),
    BatchTimed: _heard(_on_batch_timed),
    Granted: _heard(attempts.on_granted),
    Refused: _heard(attempts.on_refused),
    FirstToken: _heard(attempts.on_first_token),
    TransferEnded: _heard(attempts.on_transfer_ended),
    PullEnded: _heard(attempts.on_pull_ended),
    TokensArrived: _heard(attempts.on_tokens),
    AttemptFailed: _heard(attempts.on_attempt_failed),
    Released: _heard(attempts.on_released),
    SessionEnded: _on_session_ended,
    DrainRequested: _on_drain,
    UndrainRequested: _on_undrain,
    RouterClosing: _on_closing,
    DrainEnded: _on_drain_ended,
    TimePassed: _on_time,
}

__all__ = ["ClusterSnapshot", "Decision", "DecisionRecord", "RouterState"]

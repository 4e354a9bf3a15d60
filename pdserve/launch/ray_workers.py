"""The workers of a cluster of Ray, which are actors: they are placed, started, watched and ended, until they are those
that the launcher wants. Imports no ray, and has no clock: `ActorApi` carries out what it decides.

The launcher writes what it wants into a file, and reads events from the driver's output. So a driver that is started
again begins with what is wanted then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, final

from pdserve.core.errors import PdserveError
from pdserve.launch.actor_api import (
    Actor,
    ActorApi,
    ActorGone,
    ActorUnreachable,
    Bundles,
    Call,
    NameTaken,
    Place,
    RayTrouble,
)
from pdserve.launch.child import StartFailed
from pdserve.launch.spec import PlacedWorker, choose_node, needs_text, why_not_placed
from pdserve.launch.with_ray import (
    BEGINS,
    NOW,
    PLACING,
    WORKER_START_S,
    ActorHealth,
    ActorStart,
    Phase,
    WantedCluster,
    WantedWorker,
    WorkerState,
)

# --- workers --------------------------------------------------------------------------------------------------

PATIENCE_S: Final = 1.0  # after which a worker that waits for a node is reported
WATCH_S: Final = 0.5  # between the questions to two workers
HEALTH_S: Final = 2.0  # for the answer of one
DRAIN_MARGIN_S: Final = 2.0  # in addition to a worker's own time limit
GONE_S: Final = 10.0  # until an actor that was killed is gone
FREE_S: Final = 5.0  # until what was released is free
QUIET_S: Final = 10.0  # between two reports that Ray does not answer


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    worker_id: str
    target: WantedWorker | None  # None: it ends, and its place is released
    now: WantedWorker | None = None  # what it is, or becomes
    phase: Phase = Phase.ENDED
    bundles: Bundles = ()
    place: Place | None = None
    is_placed: bool = False
    planned_node: str = ""
    actor: Actor | None = None
    ranks: Any = None
    call: Call | None = None
    must_kill: bool = False  # a call that was to kill its actor or its ranks has failed
    is_killed: bool = False  # of an actor that ends
    resumed: int | None = None  # the revision that a driver before this one had; no command waits for its start
    is_told: bool = False  # that it waits for a node
    start: ActorStart | None = None
    since_s: float = 0.0  # when its phase, or its call, began
    last: ActorHealth | None = None
    error: str = ""

    @property
    def wanted(self) -> WantedWorker:
        assert self.now is not None
        return self.now

    @property
    def is_resumed(self) -> bool:
        return self.resumed == self.wanted.revision


@final
class RayWorkers:
    """`want`, and `tick` several times a second. Times are of one clock."""

    def __init__(self, api: ActorApi, say: Callable[[str, str], None]) -> None:
        """`say`: events for the launcher, each with a worker's name."""
        self._api, self._say = api, say
        self._cluster: WantedCluster | None = None
        self._workers: dict[str, _Worker] = {}
        self._is_first = True  # start of the cluster: no worker starts before all are placed
        self._is_arranged = False
        self._has_placed_again = False  # in this tick
        self._turn: Iterator[_Worker] = iter(())
        self._turn_s = 0.0
        self._told_s: float | None = None

    @property
    def states(self) -> dict[str, WorkerState]:
        return {
            name: WorkerState(revision=one.wanted.revision, phase=one.phase, error=one.error)
            for name, one in self._workers.items()
            if one.now is not None
        }

    @property
    def are_placed(self) -> bool:
        """Those that are wanted."""
        return all(one.is_placed for one in self._wanted)

    @property
    def are_up(self) -> bool:
        return all(one.phase is Phase.UP for one in self._wanted)

    @property
    def is_starting(self) -> bool:
        """Whether this is the first start of the cluster, and a worker is not up yet. Raises StartFailed for the first
        worker that fails then. Later a worker that fails ends nothing: the others serve."""
        if not self._is_first:
            return False
        for one in self._workers.values():
            if one.phase is Phase.FAILED:
                raise StartFailed(one.error)
        return not self.are_up

    @property
    def _wanted(self) -> list[_Worker]:
        return [one for one in self._workers.values() if one.target is not None and not one.target.is_ended]

    @property
    def actors(self) -> list[Actor]:
        return [one.actor for one in self._workers.values() if one.actor is not None]

    def want(self, cluster: WantedCluster) -> None:
        """`tick` then starts and ends workers accordingly."""
        is_resuming = self._cluster is None and cluster.has_started
        self._cluster = cluster
        self._is_first = self._is_first and not cluster.has_started
        named = {one.worker_id: one for one in cluster.workers}
        for name, one in named.items():
            resumed = one.revision if is_resuming else None
            self._workers.setdefault(name, _Worker(worker_id=name, target=one, resumed=resumed))
        for name, worker in self._workers.items():
            worker.target = named.get(name)

    def tick(self, now_s: float) -> None:
        self._has_placed_again = False
        for worker in list(self._workers.values()):
            try:
                self._step(worker, now_s)
            except PdserveError as error:
                self._fail(worker, error.message)
            except RayTrouble as error:
                is_starting = worker.phase in (Phase.PLACING, Phase.STARTING)
                if is_starting and worker.is_resumed:
                    self._complain(f"{worker.worker_id} has not started again ({error}); trying again", now_s)
                elif is_starting:
                    self._fail(worker, f"{worker.worker_id}: {error}")
                elif worker.phase is Phase.UP and not worker.must_kill:
                    self._complain_of_silence(worker, str(error), now_s)
                else:
                    self._complain(f"{worker.worker_id} has not ended ({error}); trying again", now_s)
        self._watch(now_s)

    def give_up(self) -> None:
        """Kills everything, and releases all places."""
        for worker in self._workers.values():
            for end in (self._kill, self._release):
                with contextlib.suppress(RayTrouble):
                    end(worker)

    # -- steps of one worker -------------------------------------------------------------------------------------

    def _step(self, worker: _Worker, now_s: float) -> None:
        revision = None if worker.target is None else worker.target.revision
        is_at_target = worker.now is not None and worker.now.revision == revision
        if not is_at_target and worker.phase not in (Phase.ENDING, Phase.ENDED):
            self._begin_end(worker, now_s)
        if worker.must_kill and worker.phase is not Phase.ENDING:
            self._kill(worker)
        if worker.phase in (Phase.FAILED, Phase.ENDED) and not worker.is_placed:
            self._release(worker)
        match worker.phase:
            case Phase.PLACING:
                self._place_step(worker, now_s)
            case Phase.STARTING:
                self._start_step(worker, now_s)
            case Phase.UP:
                self._up_step(worker, now_s)
            case Phase.ENDING:
                self._end_step(worker, now_s)
            case Phase.ENDED if worker.target is None:
                self._release(worker)
                del self._workers[worker.worker_id]
            case Phase.ENDED if not is_at_target and worker.target.is_ended:  # type: ignore[union-attr]
                worker.now = worker.target
            case Phase.ENDED if not is_at_target:
                self._begin_start(worker, now_s)

    def _begin_start(self, worker: _Worker, now_s: float) -> None:
        worker.now, worker.error = worker.target, ""
        worker.phase, worker.since_s, worker.is_told = Phase.PLACING, now_s, False
        self._say(worker.worker_id, BEGINS)
        bundles = self._api.bundles(worker.wanted.config)
        if worker.place is not None and worker.bundles != bundles:
            self._release(worker)
        if worker.place is None:
            worker.bundles = bundles
            others = [one for one in self._workers.values() if one.place is not None and one.now is not None]
            worker.planned_node = self._node_for(worker, map(self._placed, others))
            self._place(worker)
        if self._is_first:
            self._tell_wait(worker)

    def _place(self, worker: _Worker) -> None:
        assert self._cluster is not None
        name = f"pdserve-{self._cluster.cluster}-{worker.worker_id}"
        worker.place = self._api.place(name, worker.bundles, self._strategy(worker), worker.planned_node)

    def _strategy(self, worker: _Worker) -> str:
        assert self._cluster is not None
        if self._cluster.strategy != "auto":
            return self._cluster.strategy
        return "pack" if any("GPU" in one for one in worker.bundles) else "spread"

    def _node_for(self, worker: _Worker, others: Iterable[PlacedWorker]) -> str:
        if len(worker.bundles) > 1:
            return ""
        packs = self._strategy(worker) == "pack"
        return choose_node(
            self._api.nodes(worker.wanted.config), list(others), worker.wanted.role, worker.bundles[0], packs=packs
        )

    def _placed(self, worker: _Worker) -> PlacedWorker:
        node = self._api.node_of(worker.place) if worker.is_placed else worker.planned_node
        return PlacedWorker(role=worker.wanted.role, node=node, needs=worker.bundles[0])

    def _rearrange(self, now_s: float) -> None:
        """At the start, once all are placed: nodes may have joined one after another, and Ray has filled the first
        ones. Those that would be elsewhere now are placed again when their resources are free."""
        self._is_arranged = True
        others: list[PlacedWorker] = []
        for worker in self._wanted:
            here, wished = self._placed(worker), self._node_for(worker, others)
            if wished and wished != here.node:
                bundles = worker.bundles
                self._release(worker)
                worker.bundles, worker.planned_node, worker.since_s = bundles, wished, now_s
                here = replace(here, node=wished)
            others.append(here)

    def _place_again(self, now_s: float) -> None:
        """All that move, because together they need what is free."""
        moving = [one for one in self._wanted if one.phase is Phase.PLACING and one.place is None]
        free, _ = self._api.resources()
        needs = [bundle for one in moving for bundle in one.bundles]
        is_free = all(free.get(kind, 0.0) >= sum(one.get(kind, 0.0) for one in needs) for one in needs for kind in one)
        if is_free or any(now_s - one.since_s > FREE_S for one in moving):
            for one in moving:
                self._place(one)

    def _tell_wait(self, worker: _Worker) -> None:
        if not worker.is_told:
            worker.is_told = True
            self._say(worker.worker_id, f"{NOW}{PLACING} {needs_text(worker.bundles)}")

    def _place_step(self, worker: _Worker, now_s: float) -> None:
        assert self._cluster is not None
        if worker.place is None:
            if not self._has_placed_again:
                self._place_again(now_s)
                self._has_placed_again = True
            return
        if not worker.is_placed and not self._api.is_placed(worker.place):
            if now_s - worker.since_s > PATIENCE_S:
                self._tell_wait(worker)
            has_limit = not worker.is_resumed  # nodes may come back later than the driver
            if has_limit and now_s - worker.since_s > self._cluster.wait_s:
                raise StartFailed(self._why_not_placed(worker, self._cluster.wait_s))
            return
        worker.is_placed = True
        if self._is_first and self.are_placed and not self._is_arranged:
            self._rearrange(now_s)
        if self._is_first and not self.are_placed:
            return
        if worker.call is None:
            worker.call = self._api.check(worker.wanted, worker.place)
        if worker.call is not None:
            complaint = self._api.complaint(worker.call)
            if complaint is None:
                return
            worker.call = None
            if complaint:
                raise StartFailed(f"{worker.worker_id}, on its node: {complaint}")
        worker.phase, worker.since_s = Phase.STARTING, now_s
        worker.start = ActorStart(worker.worker_id, now_s, WORKER_START_S)

    def _why_not_placed(self, worker: _Worker, wait_s: float) -> str:
        """At the start of the cluster, of all workers: what some of them have is free without this cluster."""
        starting = list(self._workers.values()) if self._is_first else [worker]
        free, total = self._api.resources()
        held = [bundle for one in starting if one.is_placed for bundle in one.bundles]
        free = {kind: free.get(kind, 0.0) + sum(one.get(kind, 0.0) for one in held) for kind in total}
        return why_not_placed([bundle for one in starting for bundle in one.bundles], free, total, wait_s)

    def _start_step(self, worker: _Worker, now_s: float) -> None:
        start = worker.start
        assert start is not None
        self._create(worker)
        health: ActorHealth | None = None
        if worker.actor is not None:
            try:
                health = self._ask(worker)
            except ActorUnreachable as error:
                start.lost(str(error))
            except ActorGone as error:
                raise StartFailed(f"{worker.worker_id}: {error}") from None
        for text in start.observe(health, now_s):
            self._say(worker.worker_id, text)
        if health is not None and health.address:
            worker.phase = Phase.UP
            self._note(worker, health)

    def _begin_end(self, worker: _Worker, now_s: float) -> None:
        was_up, worker.call, worker.error = worker.phase is Phase.UP, None, ""
        worker.phase, worker.since_s = Phase.ENDING, now_s
        worker.start = worker.last = None
        worker.is_killed = False
        if worker.actor is None and worker.ranks is None:
            self._ended(worker)
        elif was_up and worker.actor is not None:
            worker.call = self._api.drain(worker.actor, worker.wanted.config.drain_s)

    def _end_step(self, worker: _Worker, now_s: float) -> None:
        """A worker that has not started is not drained."""
        limit_s = worker.wanted.config.drain_s + DRAIN_MARGIN_S
        if not worker.is_killed:
            if worker.call is not None and now_s - worker.since_s <= limit_s and not self._api.is_over(worker.call):
                return
            actor = worker.actor
            try:
                self._kill(worker)
            finally:
                worker.actor = actor  # until it is gone
            worker.is_killed, worker.since_s = True, now_s
        if worker.actor is not None and now_s - worker.since_s <= GONE_S:
            try:
                self._ask(worker)
            except ActorGone:
                pass
            except RayTrouble:
                return
            else:
                return
        worker.actor = worker.call = None
        self._ended(worker)

    def _ended(self, worker: _Worker) -> None:
        worker.phase = Phase.ENDED
        if not worker.is_placed:
            self._release(worker)

    def _fail(self, worker: _Worker, error: str) -> None:
        """Nothing of it runs any more, and no node is sought for it."""
        worker.phase, worker.error = Phase.FAILED, error
        if worker.is_resumed:
            self._say(
                worker.worker_id, f"has not started again: {error}; `pdserve restart {worker.worker_id}` tries again"
            )
        worker.call = worker.start = None
        try:
            self._kill(worker)
            if not worker.is_placed:
                self._release(worker)
        except RayTrouble as trouble:
            worker.error += f"; Ray has not ended it yet: {trouble}"

    # -- workers that run ----------------------------------------------------------------------------------------

    def _watch(self, now_s: float) -> None:
        """Asks one worker after another for its health."""
        if now_s - self._turn_s < WATCH_S:
            return
        self._turn_s = now_s
        for worker in self._turn:
            if worker.phase is Phase.UP and worker.actor is not None and worker.call is None:
                try:
                    worker.ranks = self._with_ranks(worker)
                    worker.call, worker.since_s = self._api.ask(worker.actor), now_s
                except RayTrouble as error:
                    self._complain_of_silence(worker, str(error), now_s)
                return
        self._turn = iter(list(self._workers.values()))

    def _up_step(self, worker: _Worker, now_s: float) -> None:
        """Replaces an actor only after Ray itself has given it up, or if it cannot start."""
        name = worker.worker_id
        self._create(worker)
        if worker.call is None:
            return
        try:
            health = self._ask(worker)
        except ActorUnreachable:  # it is being started again
            self._lost(worker)
        except ActorGone as error:
            self._lost(worker)
            self._say(name, f"Ray has given it up ({error}); it is created again")
            worker.actor = None
            self._kill(worker)
        else:
            if health is None:
                if now_s - worker.since_s > HEALTH_S:
                    worker.call = None
                    self._complain_of_silence(worker, f"no answer within {HEALTH_S:g} s", now_s)
            elif health.error:
                self._say(name, f"did not come back: {health.error}; it is created again")
                self._kill(worker)
            elif not health.address:  # it is being started again
                self._lost(worker)
            else:
                self._note(worker, health)

    def _create(self, worker: _Worker) -> None:
        """Unless it has an actor, or the name is still that of the actor before."""
        if worker.actor is None:
            assert self._cluster is not None
            with contextlib.suppress(NameTaken):
                worker.actor = self._api.create(worker.wanted, self._cluster.cluster, worker.place, worker.bundles)
                worker.ranks = self._with_ranks(worker)

    def _with_ranks(self, worker: _Worker) -> Any:
        return self._api.with_ranks(worker.wanted, worker.place, worker.bundles, worker.ranks)

    def _ask(self, worker: _Worker) -> ActorHealth | None:
        """The next answer, when it is there."""
        if worker.call is None:
            worker.call = self._api.ask(worker.actor)
        try:
            health = self._api.answer(worker.call)
        except RayTrouble:
            worker.call = None
            raise
        if health is not None:
            worker.call = None
        return health

    def _lost(self, worker: _Worker) -> None:
        health, worker.last = worker.last, None
        if health is not None:
            self._say(worker.worker_id, f"pid {health.pid} was lost; Ray starts it again")

    def _note(self, worker: _Worker, health: ActorHealth) -> None:
        if worker.last is not None and worker.last.pid != health.pid:
            self._lost(worker)
        if worker.last is None:
            self._say(worker.worker_id, f"pid {health.pid} listens on {health.address}")
            if health.memory:
                self._say(worker.worker_id, f"memory {health.memory}")
        worker.last = health

    def _kill(self, worker: _Worker) -> None:
        """Its actor and its ranks. If one call fails, both are tried, and `must_kill` stays for the next tick."""
        worker.must_kill, worker.call = True, None
        try:
            if worker.ranks is not None:
                self._api.kill_ranks(worker.ranks)
                worker.ranks = None
        finally:
            if worker.actor is not None:
                self._api.kill(worker.actor)
                worker.actor = None
        worker.must_kill = False

    def _release(self, worker: _Worker) -> None:
        """If the call fails, the place is still the worker's."""
        if worker.place is not None:
            self._api.release(worker.place)
        worker.place, worker.is_placed = None, False
        worker.bundles, worker.planned_node = (), ""

    def _complain_of_silence(self, worker: _Worker, why: str, now_s: float) -> None:
        self._complain(f"{worker.worker_id} does not report ({why}); requests continue", now_s)

    def _complain(self, text: str, now_s: float) -> None:
        if self._told_s is None or now_s - self._told_s > QUIET_S:
            self._told_s = now_s
            self._say("ray", text)

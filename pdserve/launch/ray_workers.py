"""The workers of a cluster of Ray, which are actors: they are placed, started, watched and ended, until they are those
that the launcher wants. Imports no ray, and has no clock: `ActorApi` carries out what it decides.

The launcher writes what it wants into a file, and reads events from the driver's output. So a driver that is started
again begins with what is wanted then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from pdserve.config import WorkerConfig
from pdserve.core.errors import PdserveError
from pdserve.core.types import Role
from pdserve.launch.spec import needs_text, why_not_placed
from pdserve.launch.supervisor import StartFailed
from pdserve.launch.with_ray import (
    BEGINS,
    NOW,
    PLACING,
    WORKER_START_S,
    ActorHealth,
    ActorStarts,
    Phase,
    WantedCluster,
    WantedWorker,
    WorkerState,
)

# --- nodes ----------------------------------------------------------------------------------------------------

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    role: Role
    node: str
    needs: Resources


def choose_node(
    nodes: Mapping[str, Resources], placed: Sequence[PlacedWorker], role: Role, needs: Resources, *, packs: bool
) -> str:
    """The node for one more worker, from what its nodes have and what our workers take; empty: Ray chooses. Spread:
    the node with the fewest workers of that role, so that the loss of a node leaves workers of both roles. Packed: the
    one with the most workers, because KV needs no network there. Pure.

    Others may use the node, so Ray may choose another one nevertheless.
    """
    best: tuple[tuple[Any, ...], str] | None = None
    for node, total in nodes.items():
        own = [one for one in placed if one.node == node]
        left = {kind: total.get(kind, 0.0) - sum(one.needs.get(kind, 0.0) for one in own) for kind in needs}
        if any(left[kind] < wanted for kind, wanted in needs.items()):
            continue
        of_role = sum(one.role is role for one in own)
        free = tuple(-left[kind] for kind in sorted(needs, reverse=True))
        rank = ((-len(own),) if packs else (of_role, len(own))) + free
        best = min(best, (rank, node)) if best is not None else (rank, node)
    return "" if best is None else best[1]


# --- workers --------------------------------------------------------------------------------------------------

PATIENCE_S: Final = 1.0  # after which a worker that waits for a node is reported
WATCH_S: Final = 0.5  # between the questions to two workers
HEALTH_S: Final = 2.0  # for the answer of one
DRAIN_MARGIN_S: Final = 2.0  # in addition to a worker's own time limit
GONE_S: Final = 10.0  # until an actor that was killed is gone
QUIET_S: Final = 10.0  # between two reports that Ray does not answer


class RayTrouble(Exception):
    """Ray does not do what was asked, for example because its control plane is lost."""


class ActorUnreachable(RayTrouble):
    """It is being started, perhaps again."""


class ActorGone(RayTrouble):
    """Ray has given it up, or it was killed."""


class NameTaken(RayTrouble):
    """An actor of that name exists, perhaps because Ray has not ended it yet."""


Bundles = tuple[Resources, ...]
Place = Any  # a placement group
Actor = Any
Call = Any


class ActorApi(Protocol):
    """What the driver does with Ray. Nothing waits. Everything may raise RayTrouble."""

    def bundles(self, config: WorkerConfig) -> Bundles:
        """What the worker needs: on its first node, then on each further one."""

    def nodes(self) -> Mapping[str, Resources]: ...

    def resources(self) -> tuple[Resources, Resources]:
        """Those that are free, and all."""

    def place(self, name: str, bundles: Bundles, strategy: str, node: str) -> Place:
        """On `node` if possible. Empty: Ray chooses."""

    def is_placed(self, place: Place) -> bool: ...

    def node_of(self, place: Place) -> str: ...

    def release(self, place: Place) -> None: ...

    def check(self, one: WantedWorker, place: Place) -> Call | None:
        """Begins the checks of the worker's node. Raises StartFailed."""

    def complaint(self, call: Call) -> str | None:
        """Their result, empty if the worker can start there; None: it is not known yet."""

    def create(self, one: WantedWorker, cluster: str, place: Place) -> Actor:
        """Raises NameTaken."""

    def with_ranks(self, one: WantedWorker, place: Place, before: Any) -> Any:
        """Starts the worker's ranks on other nodes; again if the address of the first rank is not as `before`."""

    def kill_ranks(self, ranks: Any) -> None: ...

    def ask(self, actor: Actor) -> Call: ...

    def answer(self, call: Call) -> ActorHealth | None:
        """None: not yet. Raises ActorUnreachable and ActorGone."""

    def drain(self, actor: Actor, limit_s: float) -> Call: ...

    def is_over(self, call: Call) -> bool:
        """Whether it has ended, in any way."""

    def kill(self, actor: Actor) -> None: ...


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
    is_killed: bool = False  # of an actor that ends
    is_told: bool = False  # that it waits for a node
    starts: ActorStarts | None = None
    since_s: float = 0.0  # when its phase, or its call, began
    last: ActorHealth | None = None
    error: str = ""

    @property
    def wanted(self) -> WantedWorker:
        assert self.now is not None
        return self.now


@final
class RayWorkers:
    """`want`, and `tick` several times a second. Times are of one clock."""

    def __init__(self, api: ActorApi, say: Callable[[str, str], None]) -> None:
        """`say`: events for the launcher, each with a worker's name."""
        self._api, self._say = api, say
        self._cluster: WantedCluster | None = None
        self._workers: dict[str, _Worker] = {}
        self._is_first = True  # at the start of the cluster, no worker starts before all are placed
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
    def _wanted(self) -> list[_Worker]:
        return [one for one in self._workers.values() if one.target is not None and not one.target.is_ended]

    @property
    def actors(self) -> list[Actor]:
        return [one.actor for one in self._workers.values() if one.actor is not None]

    def want(self, cluster: WantedCluster) -> None:
        """`tick` then starts and ends workers accordingly."""
        self._cluster = cluster
        named = {one.worker_id: one for one in cluster.workers}
        for name, one in named.items():
            self._workers.setdefault(name, _Worker(worker_id=name, target=one))
        for name, worker in self._workers.items():
            worker.target = named.get(name)

    def first_started(self) -> None:
        """From now on, each worker starts by itself."""
        self._is_first = False

    def tick(self, now_s: float) -> None:
        for worker in list(self._workers.values()):
            try:
                self._step(worker, now_s)
            except PdserveError as error:
                self._fail(worker, error.message)
            except RayTrouble as error:
                if worker.phase in (Phase.PLACING, Phase.STARTING):
                    self._fail(worker, f"{worker.worker_id}: {error}")
                else:
                    self._complain(worker, str(error), now_s)
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
            assert self._cluster is not None
            strategy = self._cluster.strategy
            if strategy == "auto":
                strategy = "pack" if any("GPU" in one for one in bundles) else "spread"
            worker.planned_node = self._node_for(worker, bundles, packs=strategy == "pack")
            worker.bundles = bundles
            name = f"pdserve-{self._cluster.cluster}-{worker.worker_id}"
            worker.place = self._api.place(name, bundles, strategy, worker.planned_node)
        if self._is_first:
            self._tell_wait(worker)

    def _node_for(self, worker: _Worker, bundles: Bundles, *, packs: bool) -> str:
        if len(bundles) > 1:
            return ""
        placed = []
        for one in self._workers.values():
            if one.place is not None and one.now is not None:
                node = self._api.node_of(one.place) if one.is_placed else one.planned_node
                placed += [PlacedWorker(role=one.now.role, node=node, needs=needs) for needs in one.bundles[:1]]
        return choose_node(self._api.nodes(), placed, worker.wanted.role, bundles[0], packs=packs)

    def _tell_wait(self, worker: _Worker) -> None:
        if not worker.is_told:
            worker.is_told = True
            self._say(worker.worker_id, f"{NOW}{PLACING} {needs_text(worker.bundles)}")

    def _place_step(self, worker: _Worker, now_s: float) -> None:
        assert self._cluster is not None
        if not worker.is_placed and not self._api.is_placed(worker.place):
            if now_s - worker.since_s > PATIENCE_S:
                self._tell_wait(worker)
            if now_s - worker.since_s > self._cluster.wait_s:
                raise StartFailed(self._why_not_placed(worker, self._cluster.wait_s))
            return
        worker.is_placed = True
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
        worker.starts = ActorStarts([worker.worker_id], now_s, WORKER_START_S)

    def _why_not_placed(self, worker: _Worker, wait_s: float) -> str:
        """At the start of the cluster, of all workers: what some of them have is free without this cluster."""
        starting = list(self._workers.values()) if self._is_first else [worker]
        free, total = self._api.resources()
        held = [bundle for one in starting if one.is_placed for bundle in one.bundles]
        free = {kind: free.get(kind, 0.0) + sum(one.get(kind, 0.0) for one in held) for kind in total}
        return why_not_placed([bundle for one in starting for bundle in one.bundles], free, total, wait_s)

    def _start_step(self, worker: _Worker, now_s: float) -> None:
        starts = worker.starts
        assert starts is not None
        self._create(worker)
        health: ActorHealth | None = None
        if worker.actor is not None:
            try:
                health = self._ask(worker)
            except ActorUnreachable as error:
                starts.lost(worker.worker_id, str(error))
            except ActorGone as error:
                raise StartFailed(f"{worker.worker_id}: {error}") from None
        for text in starts.observe(worker.worker_id, health, now_s):
            self._say(worker.worker_id, text)
        if health is not None and health.address:
            worker.phase = Phase.UP
            self._note(worker, health)

    def _begin_end(self, worker: _Worker, now_s: float) -> None:
        was_up, worker.call, worker.error = worker.phase is Phase.UP, None, ""
        worker.phase, worker.since_s = Phase.ENDING, now_s
        worker.starts = worker.last = None
        worker.is_killed = False
        if worker.actor is None:
            self._ended(worker)
        elif was_up:
            worker.call = self._api.drain(worker.actor, worker.wanted.config.drain_s)

    def _end_step(self, worker: _Worker, now_s: float) -> None:
        """A worker that has not started is not drained."""
        limit_s = worker.wanted.config.drain_s + DRAIN_MARGIN_S
        if not worker.is_killed:
            if worker.call is not None and not self._api.is_over(worker.call) and now_s - worker.since_s <= limit_s:
                return
            actor, worker.is_killed, worker.since_s = worker.actor, True, now_s
            try:
                self._kill(worker)
            finally:
                worker.actor = actor  # until it is gone
        if now_s - worker.since_s <= GONE_S:
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
        worker.call = worker.starts = None
        try:
            self._kill(worker)
            if not worker.is_placed:
                self._release(worker)
        except RayTrouble as trouble:
            worker.error += f"; and Ray did not end it: {trouble}"

    # -- workers that run ----------------------------------------------------------------------------------------

    def _watch(self, now_s: float) -> None:
        """Asks one worker after another for its health."""
        if now_s - self._turn_s < WATCH_S:
            return
        self._turn_s = now_s
        for worker in self._turn:
            if worker.phase is Phase.UP and worker.actor is not None and worker.call is None:
                try:
                    worker.ranks = self._api.with_ranks(worker.wanted, worker.place, worker.ranks)
                    worker.call, worker.since_s = self._api.ask(worker.actor), now_s
                except RayTrouble as error:
                    self._complain(worker, str(error), now_s)
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
            self._kill(worker)
        else:
            if health is None:
                if now_s - worker.since_s > HEALTH_S:
                    worker.call = None
                    self._complain(worker, f"no answer within {HEALTH_S:g} s", now_s)
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
                worker.actor = self._api.create(worker.wanted, self._cluster.cluster, worker.place)
                worker.ranks = self._api.with_ranks(worker.wanted, worker.place, worker.ranks)

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
        actor, ranks = worker.actor, worker.ranks
        worker.actor = worker.call = worker.ranks = None
        if ranks is not None:
            self._api.kill_ranks(ranks)
        if actor is not None:
            self._api.kill(actor)

    def _release(self, worker: _Worker) -> None:
        place, worker.place, worker.is_placed = worker.place, None, False
        worker.bundles, worker.planned_node = (), ""
        if place is not None:
            self._api.release(place)

    def _complain(self, worker: _Worker, why: str, now_s: float) -> None:
        if self._told_s is None or now_s - self._told_s > QUIET_S:
            self._told_s = now_s
            self._say("ray", f"{worker.worker_id} does not report ({why}); requests continue")

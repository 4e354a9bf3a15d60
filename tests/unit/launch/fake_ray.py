"""What stands in for Ray in tests: nodes, placement groups and actors, as the real one behaves towards its driver.

Nothing takes effect before `advance`: Ray works beside its driver. A name stays taken, and resources stay reserved,
until a killed actor has ended.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.config import WorkerConfig
from pdserve.launch.actor_api import ActorApi, ActorGone, ActorUnreachable, Bundles, NameTaken, RayTrouble
from pdserve.launch.spec import Resources
from pdserve.launch.with_ray import LOADING, ActorHealth, WantedWorker

KILL_ADVANCES = 6


@dataclass(eq=False)
class FakeGroup:
    name: str
    bundles: Bundles
    wished: str
    nodes: list[str] = field(default_factory=list)  # of each bundle, once it is placed
    is_removed: bool = False


@dataclass(eq=False)
class FakeActor:
    name: str
    one: WantedWorker
    group: FakeGroup
    pid: int = 0  # 0: its process has not started
    state: str = "pending"  # then starting, alive, restarting, dead
    kill_in: int | None = None  # advances until a kill takes effect
    is_drained: bool = False
    error: str = ""

    @property
    def is_dead(self) -> bool:
        return self.state == "dead"


@dataclass(eq=False)
class FakeRanks:
    """Those of a worker on other nodes."""

    worker_id: str
    is_killed: bool = False


class FakeRay(ActorApi):
    """Workers need a CPU for each thread. `loads`: advances until a worker that has a process listens."""

    def __init__(self, nodes: Mapping[str, float], loads: int = 1) -> None:
        self.all_nodes: dict[str, Resources] = {name: {"CPU": cpus} for name, cpus in nodes.items()}
        self.groups: list[FakeGroup] = []
        self.actors: list[FakeActor] = []
        self.loads = loads
        self.errors: dict[str, str] = {}  # by worker: why it cannot start
        self.failing: Counter[str] = Counter()  # by method: how many of the next calls fail
        self.calls: Counter[str] = Counter()  # by method
        self.has_ranks = False  # whether workers have ranks on other nodes
        self.ranks: list[FakeRanks] = []
        self.is_lost = False  # the control plane; actors still answer
        self.drains = True  # whether workers end when they are told to drain
        self._pids = itertools.count(100)
        self._loaded: dict[int, int] = {}

    # -- what a test does ----------------------------------------------------------------------------------------

    def advance(self) -> None:
        if self.is_lost:
            return
        for actor in self.actors:
            if actor.kill_in is None and actor.group.is_removed:
                actor.kill_in = KILL_ADVANCES
            if actor.kill_in is not None:
                actor.kill_in -= 1
                if actor.kill_in <= 0:
                    actor.state = "dead"
        self.groups = [
            one
            for one in self.groups
            if not one.is_removed or any(actor.group is one and not actor.is_dead for actor in self.actors)
        ]
        for group in self.groups:
            if not group.nodes and not group.is_removed:
                self._try_to_place(group)
        for actor in self.actors:
            match actor.state:
                case "pending" if actor.group.nodes:
                    actor.state, actor.pid = "starting", next(self._pids)
                case "restarting":
                    actor.state, actor.pid = "starting", next(self._pids)
                case "starting":
                    self._loaded[actor.pid] = self._loaded.get(actor.pid, 0) + 1
                    actor.error = self.errors.get(actor.one.worker_id, "")
                    if not actor.error and self._loaded[actor.pid] >= self.loads:
                        actor.state = "alive"

    def living(self, worker_id: str) -> FakeActor:
        [found] = [one for one in self.actors if one.one.worker_id == worker_id and not one.is_dead]
        return found

    def crash(self, worker_id: str) -> None:
        """Its process ends, and Ray starts it again."""
        actor = self.living(worker_id)
        assert actor.pid
        actor.state = "restarting"

    def give_up(self, worker_id: str) -> None:
        self.living(worker_id).state = "dead"

    def free(self) -> dict[str, float]:
        free = {name: one["CPU"] for name, one in self.all_nodes.items()}
        for group in self.groups:
            for node, bundle in zip(group.nodes, group.bundles, strict=False):
                free[node] -= bundle["CPU"]
        return free

    def running(self) -> dict[str, int]:
        """The pid of each worker that serves."""
        return {one.one.worker_id: one.pid for one in self.actors if one.state == "alive" and not one.is_drained}

    def _try_to_place(self, group: FakeGroup) -> None:
        left, nodes = self.free(), []
        for bundle in group.bundles:
            fits = [name for name in left if left[name] >= bundle["CPU"]]
            if not fits:
                return
            nodes.append(group.wished if group.wished in fits else max(fits, key=lambda name: left[name]))
            left[nodes[-1]] -= bundle["CPU"]
        group.nodes = nodes

    # -- ActorApi ------------------------------------------------------------------------------------------------

    def bundles(self, config: WorkerConfig) -> Bundles:
        self._reach("bundles")
        return ({"CPU": float(config.threads)},)

    def nodes(self, config: WorkerConfig) -> Mapping[str, Resources]:
        self._reach()
        return self.all_nodes

    def resources(self) -> tuple[Resources, Resources]:
        self._reach("resources")
        return {"CPU": sum(self.free().values())}, {"CPU": sum(one["CPU"] for one in self.all_nodes.values())}

    def place(self, name: str, bundles: Bundles, strategy: str, node: str) -> FakeGroup:
        return FakeGroup(name, bundles, node)

    def is_placed(self, place: FakeGroup) -> bool:
        if place.is_removed:
            raise RayTrouble("the placement group was removed")
        if place not in self.groups:
            self._reach("place")
            if any(one.name == place.name and not one.is_removed for one in self.groups):
                raise RayTrouble(f"a placement group {place.name} exists")
            self.groups.append(place)
            self._reach("place halfway")
        return bool(place.nodes)

    def node_of(self, place: FakeGroup) -> str:
        self._reach("node_of")
        return place.nodes[0] if place.nodes else ""

    def release(self, place: FakeGroup) -> None:
        self._reach("release")
        place.is_removed = True

    def check(self, one: WantedWorker, place: FakeGroup) -> None:
        assert place.nodes, "the node is not known yet"

    def complaint(self, call: Any) -> str | None:
        raise AssertionError("nothing was asked")

    def create(self, one: WantedWorker, cluster: str, place: FakeGroup, bundles: Bundles) -> FakeActor:
        self._reach("create")
        assert bundles == place.bundles
        name = f"{cluster}-{one.worker_id}"
        if any(actor.name == name and not actor.is_dead for actor in self.actors):
            raise NameTaken(name)
        if place.is_removed:
            raise RayTrouble("the placement group was removed")
        taken = [actor for actor in self.actors if actor.group is place and not actor.is_dead]
        assert not taken, "an actor takes the whole bundle"
        self.actors.append(FakeActor(name, one, place))
        return self.actors[-1]

    def with_ranks(self, one: WantedWorker, place: FakeGroup, bundles: Bundles, before: Any) -> Any:
        assert bundles == place.bundles
        if before is not None or not self.has_ranks:
            return before
        self._reach("with_ranks")
        self.ranks.append(FakeRanks(one.worker_id))
        return self.ranks[-1]

    def kill_ranks(self, ranks: FakeRanks) -> None:
        self._reach("kill_ranks")
        ranks.is_killed = True

    def ask(self, actor: FakeActor) -> FakeActor:
        return actor

    def answer(self, call: FakeActor) -> ActorHealth | None:
        match call.state:
            case "pending":
                return None
            case "restarting":
                raise ActorUnreachable("it is being started again")
            case "dead":
                raise ActorGone("it has ended")
        address = f"127.0.0.1:{call.pid}" if call.state == "alive" else ""
        return ActorHealth(pid=call.pid, address=address, error=call.error, stage=LOADING)

    def drain(self, actor: FakeActor, limit_s: float) -> FakeActor:
        actor.is_drained = True
        return actor

    def is_over(self, call: FakeActor) -> bool:
        """A call to an actor that restarts ends with an error."""
        return call.state in ("restarting", "dead") or (self.drains and call.state == "alive")

    def kill(self, actor: FakeActor) -> None:
        self._reach("kill")
        if actor.kill_in is None:
            actor.kill_in = KILL_ADVANCES

    def _reach(self, method: str = "") -> None:
        self.calls[method] += 1
        if self.is_lost or self.failing[method] > 0:
            self.failing[method] -= 1
            raise RayTrouble("the control plane does not answer")

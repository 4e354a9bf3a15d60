"""How the workers of a cluster of Ray become those that are wanted, and that nothing of others is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.client.request import scale_request
from pdserve.config import REDIS_ENV, SECRET_ENV, WorkerConfig
from pdserve.core.errors import ChangeFailed, ConfigError
from pdserve.core.types import Role
from pdserve.launch.changes.server import ChangeServer
from pdserve.launch.child import StartFailed
from pdserve.launch.keys import Settings
from pdserve.launch.ray_workers import RayWorkers
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec, PlacedWorker, choose_node, needs_text
from pdserve.launch.with_ray import STATE, Phase, RayCluster, WantedCluster, WantedFile, WantedWorker, states_to_json
from router.service.cluster import LauncherLink
from tests.unit.launch.fake_ray import KILL_ADVANCES, FakeGroup, FakeRay

WAIT_S = 5.0
DRAIN_S = 3.0
LIMIT_S = 60.0  # of a test with the launcher, so that it fails instead of waiting for ever


class Driver:
    """RayWorkers beside a Ray. Each step takes a tenth of a second of its clock."""

    def __init__(self, ray: FakeRay, **workers: dict[str, Any]) -> None:
        self.ray = ray
        self.said: list[tuple[str, str]] = []
        self.now_s = 100.0
        self.revision = 0
        self.has_started = False
        self.wanted: dict[str, WantedWorker] = {}
        self.restart()
        for name, changes in workers.items():
            self.start(name, **changes)

    def restart(self) -> None:
        self.workers = RayWorkers(self.ray, lambda name, text: self.said.append((name, text)))

    def restart_with(self, ray: FakeRay) -> None:
        """What a driver has started ends with it."""
        self.ray = ray
        self.restart()
        self.step()

    def start(self, name: str, threads: int = 1, **changes: Any) -> None:
        config = WorkerConfig(
            model="toy", worker_id=name, cluster_secret="s" * 16, threads=threads, drain_s=DRAIN_S, **changes
        )
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        self.revision += 1
        self.wanted[name] = WantedWorker(worker_id=name, role=role, revision=self.revision, config=config)

    def end(self, name: str) -> None:
        self.revision += 1
        former = self.wanted[name]
        self.wanted[name] = WantedWorker(
            worker_id=name, role=former.role, revision=self.revision, config=former.config, is_ended=True
        )

    def forget(self, name: str) -> None:
        del self.wanted[name]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            workers = tuple(self.wanted.values())
            wanted = WantedCluster(
                cluster="c", strategy="auto", wait_s=WAIT_S, workers=workers, has_started=self.has_started
            )
            self.workers.want(wanted)
            self.workers.tick(self.now_s)
            self.ray.advance()
            self.now_s += 0.1

    def until(self, name: str, phase: Phase, within_s: float = 60.0) -> str:
        """The error of the worker in that phase."""
        end_s = self.now_s + within_s
        while True:
            state = self.workers.states.get(name)
            if state is not None and (state.revision, state.phase) == (self.wanted[name].revision, phase):
                return state.error
            assert self.now_s < end_s, f"{name} is {state}"
            self.step()

    def up(self, *names: str) -> None:
        for name in names or self.wanted:
            self.until(name, Phase.UP)
        self.has_started = True

    def texts(self, name: str) -> list[str]:
        return [text for about, text in self.said if about == name]

    def group(self, name: str) -> FakeGroup:
        [found] = [one for one in self.ray.groups if one.name.endswith(f"-{name}") and not one.is_removed]
        return found


def driver(cpus: float = 4.0, *names: str, **options: Any) -> Driver:
    found = Driver(FakeRay({"a": cpus}, **options), **{name: {} for name in names or ("p0", "d0")})
    found.up()
    return found


# --- nodes ----------------------------------------------------------------------------------------------------

NODES = {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}, "c": {"CPU": 2.0}}


def fill(roles: str, needs: dict[str, float], *, packs: bool) -> dict[str, str]:
    placed: list[PlacedWorker] = []
    for letter in roles:
        role = Role.PREFILL if letter == "p" else Role.DECODE
        node = choose_node(NODES, placed, role, needs, packs=packs)
        if node:
            placed.append(PlacedWorker(role=role, node=node, needs=needs))
    return {node: "".join(sorted(one.role.value[0] for one in placed if one.node == node)) for node in NODES}


def test_the_loss_of_a_node_leaves_workers_of_both_roles() -> None:
    assert fill("pppddd", {"CPU": 1.0}, packs=False) == {"a": "dp", "b": "dp", "c": "dp"}
    assert fill("pd", {"CPU": 1.0}, packs=False) == {"a": "p", "b": "d", "c": ""}


def test_packed_workers_fill_a_node_before_the_next_one() -> None:
    assert fill("pdd", {"CPU": 1.0}, packs=True) == {"a": "dp", "b": "d", "c": ""}
    assert fill("pdd", {"CPU": 2.0}, packs=True) == {"a": "p", "b": "d", "c": "d"}


def test_ray_chooses_if_no_node_has_enough() -> None:
    assert fill("pd", {"CPU": 3.0}, packs=False) == {"a": "", "b": "", "c": ""}
    assert choose_node(NODES, [], Role.DECODE, {"CPU": 1.0, "GPU": 1.0}, packs=True) == ""


def test_what_a_worker_needs_is_listed() -> None:
    assert needs_text([{"CPU": 1.0}]) == "with 1 CPU"
    assert needs_text([{"CPU": 4.0, "GPU": 2.0}, {"GPU": 1.0}]) == "with 4 CPUs and 2 GPUs, and for one with 1 GPU"


# --- start of a cluster ---------------------------------------------------------------------------------------


def test_no_worker_starts_before_all_are_placed() -> None:
    found = Driver(FakeRay({"a": 1.0}), p0={}, d0={})
    found.step(20)
    assert not found.ray.actors
    found.ray.all_nodes["b"] = {"CPU": 1.0}
    found.up()
    assert {found.group(name).nodes[0] for name in ("p0", "d0")} == {"a", "b"}
    assert found.texts("p0")[:2] == ["begins", "now waits for a node with 1 CPU"]


def test_workers_are_spread_over_nodes_that_join_one_after_another() -> None:
    found = Driver(FakeRay({}), **{name: {} for name in ("p0", "p1", "p2", "d0", "d1", "d2")})
    for node in "abc":
        found.step(5)
        found.ray.all_nodes[node] = {"CPU": 2.0}
    found.up()
    roles: dict[str, str] = {}
    for group in found.ray.groups:
        roles[group.nodes[0]] = roles.get(group.nodes[0], "") + group.name[-2]
    assert {node: "".join(sorted(each)) for node, each in roles.items()} == dict.fromkeys("abc", "dp")
    assert len(found.ray.groups) == 6


def test_ray_is_asked_once_a_tick_for_all_workers_that_move() -> None:
    found = Driver(FakeRay({"a": 2.0}), **{name: {} for name in ("p0", "p1", "d0", "d1")})
    found.step(5)
    found.ray.all_nodes |= {"b": {"CPU": 1.0}, "c": {"CPU": 1.0}}
    while len(found.ray.groups) == 4:
        assert found.now_s < 110.0, "none moves"
        found.step()
    nodes = dict(found.ray.all_nodes)
    found.ray.all_nodes |= {name: {"CPU": 0.0} for name in nodes}  # others are faster
    before = found.ray.calls["resources"]
    found.step(10)
    assert found.ray.calls["resources"] - before == 10
    found.ray.all_nodes |= nodes
    found.up()
    assert found.ray.running().keys() == {"p0", "p1", "d0", "d1"}


def test_a_cluster_that_does_not_fit_names_all_that_it_needs() -> None:
    found = Driver(FakeRay({"a": 3.0}), p0={}, d0={"threads": 4})
    error = found.until("d0", Phase.FAILED)
    assert "within 5 s. They need 5 CPUs (1, 4) of which 3 of 3 are free" in error
    with pytest.raises(StartFailed, match="They need 5 CPUs"):
        _ = found.workers.is_starting


def test_the_first_worker_that_fails_ends_the_first_start() -> None:
    found = Driver(FakeRay({"a": 2.0}, loads=10**6), p0={}, d0={})
    found.until("p0", Phase.STARTING)
    assert found.workers.is_starting
    found.ray.errors["d0"] = "a wrong value"
    found.until("d0", Phase.FAILED)
    with pytest.raises(StartFailed, match="d0: a wrong value"):
        _ = found.workers.is_starting


def test_the_first_start_is_over_once_all_are_up() -> None:
    found = Driver(FakeRay({"a": 2.0}), p0={}, d0={})
    found.until("p0", Phase.STARTING)
    assert found.workers.is_starting
    found.up()
    assert not found.workers.is_starting


# --- drivers that start again ---------------------------------------------------------------------------------


def test_a_failed_worker_ends_no_driver_that_starts_again() -> None:
    found = driver()
    found.ray.errors["d1"] = "a wrong value"
    found.start("d1")
    found.until("d1", Phase.FAILED)
    found.restart_with(FakeRay({"a": 4.0}))
    found.ray.errors["d1"] = "a wrong value"
    assert not found.workers.is_starting
    found.until("d1", Phase.FAILED)
    found.up("p0", "d0")
    found.step(50)
    assert not found.workers.is_starting
    assert found.ray.running().keys() == {"p0", "d0"}
    assert found.workers.states["d1"].phase is Phase.FAILED
    said = "has not started again: d1: a wrong value; `pdserve restart d1` tries again"
    assert found.texts("d1").count(said) == 1
    found.ray.errors.clear()
    found.start("d1")
    found.up()


def test_a_driver_that_starts_again_lets_no_worker_wait_for_others() -> None:
    """Nodes may come back later than the driver, and no command waits for the workers."""
    found = driver()
    found.restart_with(FakeRay({"a": 1.0}))
    found.up("p0")
    found.step(int(20 * WAIT_S))
    assert found.workers.states["d0"].phase is Phase.PLACING
    assert not found.workers.is_starting
    found.ray.all_nodes["b"] = {"CPU": 1.0}
    found.up("d0")
    found.start("d1")
    assert "did not place" in found.until("d1", Phase.FAILED), "a command waits for this one"


# --- workers that are added -----------------------------------------------------------------------------------


def test_an_added_worker_waits_for_a_node() -> None:
    found = driver(2.0)
    before = found.ray.running()
    found.start("d1", threads=2)
    found.step(20)
    assert found.texts("d1") == ["begins", "now waits for a node with 2 CPUs"]
    found.ray.all_nodes["b"] = {"CPU": 2.0}  # Ray's autoscaler has started it
    found.up("d1")
    assert found.texts("d1")[-1] == f"pid {found.ray.living('d1').pid} listens on 127.0.0.1:102"
    assert found.ray.running() == {**before, "d1": 102}


def test_a_worker_that_is_not_placed_leaves_nothing() -> None:
    found = driver(2.0)
    found.start("d1")
    error = found.until("d1", Phase.FAILED)
    assert error.startswith("Ray did not place the workers within 5 s. They need 1 CPUs (1) of which 0 of 2 are free")
    found.step(2)
    assert [one.name for one in found.ray.groups] == ["pdserve-c-p0", "pdserve-c-d0"]
    found.ray.all_nodes["b"] = {"CPU": 2.0}
    found.step(50)
    assert found.workers.states["d1"].phase is Phase.FAILED, "only the launcher tries again"
    assert found.ray.free()["b"] == 2.0
    found.forget("d1")
    found.step()
    assert found.workers.states.keys() == {"p0", "d0"}


def test_a_worker_that_is_not_wanted_any_more_waits_for_no_node() -> None:
    found = driver(2.0)
    found.start("d1")
    found.step(3)
    found.end("d1")
    found.until("d1", Phase.ENDED, 1.0)
    found.step()
    assert [one.name for one in found.ray.groups] == ["pdserve-c-p0", "pdserve-c-d0"]


def test_a_worker_that_does_not_start_gives_its_place_back_when_it_is_forgotten() -> None:
    found = driver()
    found.ray.errors["d1"] = "worker.kv_blocks: got 1"
    found.start("d1")
    assert found.until("d1", Phase.FAILED) == "d1: worker.kv_blocks: got 1"
    found.step(8)
    assert found.ray.actors[-1].is_dead
    assert found.ray.free() == {"a": 1.0}, "it may be started as before"
    found.end("d1")
    found.until("d1", Phase.ENDED)
    found.forget("d1")
    found.step(2)
    assert found.ray.free() == {"a": 2.0}


def test_a_worker_that_did_not_start_is_started_as_before() -> None:
    """At once, although the name of its actor is not free yet."""
    found = driver()
    found.end("d0")
    found.until("d0", Phase.ENDED)
    found.ray.errors["d0"] = "a wrong value"
    found.start("d0")
    found.until("d0", Phase.FAILED)
    found.ray.errors.clear()
    found.end("d0")
    found.until("d0", Phase.ENDED)
    found.start("d0")
    found.up("d0")
    assert not found.texts("ray"), "no complaint"


def test_a_worker_that_is_killed_while_it_starts_has_failed() -> None:
    found = driver(loads=10)
    found.start("d1")
    found.until("d1", Phase.STARTING)
    found.step(5)
    assert any(text.endswith(LOADS) for text in found.texts("d1"))
    found.ray.crash("d1")
    assert "d1: its process ended while it loads the model" in found.until("d1", Phase.FAILED)
    found.step(8)
    assert found.ray.actors[-1].is_dead


LOADS = "loads the model"


# --- workers that end -----------------------------------------------------------------------------------------


def test_a_worker_that_ends_keeps_its_place_until_it_is_forgotten() -> None:
    found = driver()
    actor, group = found.ray.living("d0"), found.group("d0")
    found.end("d0")
    found.until("d0", Phase.ENDED)
    assert actor.is_drained
    assert actor.is_dead
    assert found.ray.free() == {"a": 2.0}
    found.start("d0")
    found.up("d0")
    assert found.group("d0") is group
    found.end("d0")
    found.until("d0", Phase.ENDED)
    found.forget("d0")
    found.step(2)
    assert found.ray.free() == {"a": 3.0}
    assert "d0" not in found.workers.states


def test_a_worker_with_other_needs_is_placed_anew() -> None:
    found = driver(3.0)
    found.end("d0")
    found.until("d0", Phase.ENDED)
    found.start("d0", threads=2)
    found.up("d0")
    assert found.ray.free() == {"a": 0.0}


def test_a_worker_that_does_not_drain_ends_after_its_limit() -> None:
    found = driver()
    found.ray.drains = False
    began_s = found.now_s
    found.end("d0")
    found.until("d0", Phase.ENDED)
    assert DRAIN_S <= found.now_s - began_s < DRAIN_S + 4.0


def test_a_worker_that_is_killed_while_it_drains_ends() -> None:
    found = driver()
    found.ray.drains = False
    found.end("d0")
    found.step(2)
    found.ray.crash("d0")
    found.until("d0", Phase.ENDED, 1.0)
    found.step(8)
    assert found.ray.running().keys() == {"p0"}


# --- calls that fail ------------------------------------------------------------------------------------------


def test_a_kill_that_fails_is_tried_again_at_the_end_of_a_worker() -> None:
    found = driver()
    actor = found.ray.living("d0")
    found.ray.failing["kill"] = 200
    found.end("d0")
    found.step(150)
    assert found.workers.states["d0"].phase is Phase.ENDING, "it has not ended"
    assert "d0 has not ended (the control plane does not answer); trying again" in found.texts("ray")
    found.until("d0", Phase.ENDED)
    assert actor.is_dead
    assert found.ray.running().keys() == {"p0"}


def test_a_kill_that_fails_is_tried_again_after_a_failed_start() -> None:
    found = driver()
    found.ray.errors["d1"] = "a wrong value"
    found.ray.failing["kill"] = 5
    found.start("d1")
    error = found.until("d1", Phase.FAILED)
    assert error == "d1: a wrong value; Ray has not ended it yet: the control plane does not answer"
    actor = found.ray.living("d1")
    found.step(20)
    assert actor.is_dead
    assert found.workers.states["d1"].phase is Phase.FAILED


def test_a_kill_that_fails_is_tried_again_before_the_worker_is_created_again() -> None:
    found = driver()
    found.ray.errors["d0"] = "the disk is full"
    found.ray.failing["kill"] = 5
    found.ray.crash("d0")
    found.step(60)
    assert found.ray.failing["kill"] <= 0
    found.ray.errors.clear()
    found.step(60)
    assert found.ray.running().keys() == {"p0", "d0"}
    assert found.workers.states["d0"].phase is Phase.UP


@pytest.mark.parametrize("how", ["end", "fail", "lost"])
def test_ranks_whose_kill_fails_are_killed_later(how: str) -> None:
    found = driver()
    found.ray.has_ranks = True
    found.start("d1")
    if how == "fail":
        found.ray.errors["d1"] = "a wrong value"
        found.ray.failing["kill_ranks"] = 5
        found.until("d1", Phase.FAILED)
        actor = found.ray.actors[-1]
        found.step(20)
        assert found.workers.states["d1"].phase is Phase.FAILED
    else:
        found.up("d1")
        actor = found.ray.living("d1")
        found.ray.failing["kill_ranks"] = 5
        if how == "end":
            found.end("d1")
            found.until("d1", Phase.ENDED)
        else:
            found.ray.give_up("d1")
            found.step(60)
            assert "d1" in found.ray.running()
    assert actor.is_dead
    expected = [True, False] if how == "lost" else [True]  # the actor that is created again has new ones
    assert [one.is_killed for one in found.ray.ranks if one.worker_id == "d1"] == expected


def test_a_placement_group_that_is_created_by_a_failed_call_is_removed() -> None:
    found = driver()
    found.ray.failing["place halfway"] = 1
    found.ray.failing["release"] = 5
    found.start("d1")
    assert found.until("d1", Phase.FAILED).startswith("d1: the control plane does not answer")
    found.step(20)
    assert [one.name for one in found.ray.groups] == ["pdserve-c-p0", "pdserve-c-d0"]


@pytest.mark.parametrize("how", ["forget", "not placed", "not wanted"])
def test_a_release_that_fails_is_tried_again(how: str) -> None:
    found = driver(2.0 if how != "forget" else 3.0)
    found.start("d1")
    if how == "forget":
        found.up("d1")
        found.end("d1")
        found.until("d1", Phase.ENDED)
        found.forget("d1")
        found.ray.failing["release"] = 5
        found.step()
        assert "d1" in found.workers.states, "its placement group is known"
    elif how == "not placed":
        found.ray.failing["release"] = 5
        found.until("d1", Phase.FAILED)
    else:
        found.step(3)
        found.ray.failing["release"] = 5
        found.end("d1")
    found.step(20)
    assert found.ray.failing["release"] <= 0
    assert {one.name for one in found.ray.groups} == {"pdserve-c-p0", "pdserve-c-d0"}
    assert ("d1" in found.workers.states) is (how != "forget")


# --- workers that run -----------------------------------------------------------------------------------------


def test_ray_starts_a_killed_worker_again() -> None:
    found = driver()
    found.ray.crash("d0")
    pids = [found.ray.living("d0").pid]
    found.step(60)
    pids.append(found.ray.living("d0").pid)
    assert pids[0] != pids[1]
    assert found.texts("d0")[-2:] == [
        f"pid {pids[0]} was lost; Ray starts it again",
        f"pid {pids[1]} listens on 127.0.0.1:{pids[1]}",
    ]
    assert len(found.ray.actors) == 2, "the driver made no other one"


def test_a_worker_that_ray_gives_up_is_created_again() -> None:
    found = driver()
    found.ray.give_up("d0")
    found.step(60)
    assert "d0" in found.ray.running()
    assert found.group("d0").nodes == ["a"], "at its place"


def test_a_worker_that_does_not_come_back_is_created_again() -> None:
    """The name of its actor is free only once that has ended."""
    found = driver()
    found.ray.errors["d0"] = "the disk is full"
    found.ray.crash("d0")
    found.step(60)
    assert "did not come back: the disk is full; it is created again" in found.texts("d0")
    found.ray.errors.clear()
    found.step(60)
    assert "d0" in found.ray.running()
    assert found.workers.states["d0"].phase is Phase.UP


def test_a_name_that_is_taken_asks_ray_nothing_else() -> None:
    found = driver()
    found.ray.errors["d0"] = "the disk is full"
    before = found.ray.calls.copy()
    found.ray.crash("d0")
    found.step(60)
    calls = found.ray.calls - before
    assert calls["create"] > KILL_ADVANCES, "it is created again once its name is free"
    assert calls["bundles"] == 0, "its place has the same ones"


def test_without_its_control_plane_workers_stay_and_changes_fail() -> None:
    found = driver()
    before = found.ray.running()
    found.ray.is_lost = True
    found.start("d1")
    assert found.until("d1", Phase.FAILED) == "d1: the control plane does not answer"
    found.step(50)
    assert found.ray.running() == before
    assert {name: one.phase for name, one in found.workers.states.items()} == {
        "p0": Phase.UP,
        "d0": Phase.UP,
        "d1": Phase.FAILED,
    }


def test_a_driver_that_starts_again_makes_what_is_wanted_then() -> None:
    found = driver()
    found.end("d0")
    found.start("d1")
    found.restart_with(FakeRay({"a": 4.0}))
    found.up("d1", "p0")
    assert found.until("d0", Phase.ENDED) == ""
    assert found.ray.running().keys() == {"p0", "d1"}
    assert found.workers.are_up


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_left_after_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    found = driver(3.0, "p0", "d0", loads=3)
    found.ray.has_ranks = seed % 2 == 1
    names = ["p0", "p1", "d0", "d1", "d2"]
    for _ in range(60):
        name = rng.choice(names)
        match rng.choice(["start", "end", "forget", "crash", "give up", "error", "node", "wait", "trouble"]):
            case "trouble":
                for method in ("kill", "kill_ranks", "with_ranks", "release", "place", "place halfway", "create"):
                    found.ray.failing[method] = rng.choice([0, 1, 30])
            case "start":
                found.start(name, threads=rng.choice([1, 1, 2]))
            case "end" if name in found.wanted:
                found.end(name)
            case "forget" if name in found.wanted:
                found.forget(name)
            case "crash" | "give up" as how:
                for actor in found.ray.actors:
                    if actor.one.worker_id == name and actor.state in ("starting", "alive"):
                        actor.state = "restarting" if how == "crash" else "dead"
            case "error":
                found.ray.errors = rng.choice([{}, {name: "it cannot start"}])
            case "node":
                found.ray.all_nodes["b"] = (
                    {"CPU": rng.choice([1.0, 2.0])} if "b" not in found.ray.all_nodes else {"CPU": 4.0}
                )
            case "wait":
                found.step(rng.randrange(40))
        found.step(rng.randrange(4))
    found.ray.errors = {}
    found.ray.failing.clear()
    found.step(300)
    for name, one in found.wanted.items():
        state = found.workers.states[name]
        assert state.revision == one.revision
        assert state.phase in ({Phase.ENDED} if one.is_ended else {Phase.UP, Phase.FAILED}), name
    assert found.workers.states.keys() == found.wanted.keys()
    up = {name for name, one in found.workers.states.items() if one.phase is Phase.UP}
    assert found.ray.running().keys() == up
    assert {one.one.worker_id for one in found.ray.actors if not one.is_dead} == up
    groups = [one.name.removeprefix("pdserve-c-") for one in found.ray.groups]
    assert len(groups) == len(set(groups))
    assert up <= set(groups) <= found.wanted.keys()
    for name in list(found.wanted):
        found.forget(name)
    found.step(100)
    assert not found.workers.states
    assert not found.ray.groups
    assert all(one.is_dead for one in found.ray.actors)
    assert all(one.is_killed for one in found.ray.ranks)


def test_everything_is_given_back_at_the_end() -> None:
    found = driver()
    found.start("d1")
    found.step()
    found.workers.give_up()
    for _ in range(2 * KILL_ADVANCES):
        found.ray.advance()
    assert not found.ray.groups
    assert all(one.is_dead for one in found.ray.actors)


# --- launcher -------------------------------------------------------------------------------------------------


class Launched:
    """The launcher's part, which tells RayWorkers by its file what it wants, and reads their states."""

    def __init__(self, ray: FakeRay) -> None:
        spec = ClusterSpec(model="toy", port=0, redis="redis://127.0.0.1:1/0", cluster_secret="s" * 16, ray_wait_s=1.0)
        self.cluster = RayCluster(spec, "", LauncherReport())
        self.ray = ray
        self.said: list[str] = []

        self.cluster._write()
        self._file = WantedFile(str(self.cluster._file), {SECRET_ENV: "s" * 16, REDIS_ENV: "redis://127.0.0.1:1/0"})
        self.workers = RayWorkers(self.ray, lambda name, text: self.cluster._on_line(f"@{name} {text}"))

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.001)

    async def run(self) -> None:
        now_s = 0.0
        while True:
            self.workers.want(self._file.read())
            self.workers.tick(now_s)
            self.cluster._on_line(f"@ray {STATE}{states_to_json(self.workers.states)}")
            self.ray.advance()
            now_s += 0.1
            await asyncio.sleep(0.001)

    def say(self, name: str, text: str) -> None:
        self.said.append(f"{name} {text}")


@contextlib.asynccontextmanager
async def launched(cpus: float) -> AsyncIterator[Launched]:
    """An error of the driver's part ends the test."""
    found = Launched(FakeRay({"a": cpus}))
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            running = group.create_task(found.run())
            await found.until(lambda: bool(found.workers.states) and found.workers.are_up)
            found.cluster._has_started = True
            found.cluster._write()
            yield found
            running.cancel()
    finally:
        await found.cluster.stop(is_graceful=False)


async def test_the_launcher_starts_and_ends_workers() -> None:
    async with launched(4.0) as found:
        cluster = found.cluster
        cluster._take_slot("d1", Role.DECODE, cluster.spec.settings)
        await cluster._start_worker("d1", {"worker": {"drain_s": 77.0}}, found.say)
        assert found.ray.running().keys() == {"p0", "d0", "d1"}
        assert found.ray.living("d1").one.config.drain_s == cluster._drain_s("d1") == 77.0
        assert found.said[-1] == "d1 loads the model"
        await cluster._end_worker("d1")
        assert found.ray.running().keys() == {"p0", "d0"}
        cluster._forget("d1")
        await found.until(lambda: len(found.ray.groups) == 2)
        assert cluster.spec.worker_ids == ("p0", "d0")


async def test_a_new_launcher_starts_workers_that_the_former_one_had_not() -> None:
    """It was killed while it replaced d0, or after it had taken a slot for d1."""
    async with launched(4.0) as found:
        cluster = found.cluster
        before = cluster._wanted["p0"]
        await cluster._end_worker("d0")
        overlay: Settings = {"worker": {"drain_s": 77.0}}
        cluster._take_slot("d1", Role.DECODE, overlay)
        again = RayCluster(cluster.spec, "", LauncherReport(), saved=cluster.saved())
        again._want_all()
        await found.until(lambda: found.ray.running().keys() == {"p0", "d0", "d1"})
        assert again._drain_s("d1") == 77.0
        assert again._wanted["p0"] == before
        await again.leave()


async def test_the_first_start_says_how_long_the_next_one_may_take() -> None:
    """Ray may have started nodes for the workers, as it does for those that are added."""
    async with launched(4.0) as found:
        for line in ("@placement took 90.50 s", "@p0 took 2.00 s", "@d0 took 3.00 s"):
            found.cluster._on_line(line)
        assert found.cluster._first_start_s() == 93.5


async def test_the_launcher_tells_what_an_added_worker_waits_for() -> None:
    threads = {"worker": {"threads": 1}}
    async with launched(float(2 * ClusterSpec(model="toy").cores)) as found:
        cluster = found.cluster
        cluster._take_slot("d1", Role.DECODE, threads)
        with pytest.raises(StartFailed, match=r"did not place the workers within 1 s. They need 1 CPUs \(1\)"):
            await cluster._start_worker("d1", threads, found.say)
        assert found.said == ["d1 waits for a node with 1 CPU"]
        await cluster._end_worker("d1")
        cluster._forget("d1")
        await found.until(lambda: found.workers.states.keys() == {"p0", "d0"})


async def test_settings_that_cannot_be_used_start_nothing() -> None:
    async with launched(4.0) as found:
        cluster = found.cluster
        cluster._take_slot("d1", Role.DECODE, cluster.spec.settings)
        with pytest.raises(ConfigError):
            await cluster._start_worker("d1", {"worker": {"threads": -1}}, found.say)
        await cluster._end_worker("d1")
        cluster._forget("d1")
        assert found.workers.states.keys() == {"p0", "d0"}


async def test_a_worker_that_does_not_start_fails_the_change(tmp_path: Path) -> None:
    """An operator's command would show another error as one of the launcher itself."""

    class Cluster:
        async def scale(self, prefill: int | None, decode: int | None, say: Any) -> None:
            raise StartFailed("d1: no node has a GPU")

        def say(self, name: str, text: str) -> None:
            pass

    server = ChangeServer(Cluster(), tmp_path / "socket", "")  # type: ignore[arg-type]
    await server.start()
    server.is_ready = True
    try:
        link = LauncherLink(str(tmp_path / "socket"), "")
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ChangeFailed, match="d1: no node has a GPU"):
                async for _ in link.change(scale_request(None, 2)):
                    pass
    finally:
        await server.close()

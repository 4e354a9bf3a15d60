"""What the launcher passes to the driver of Ray, and how workers start under Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.config import REDIS_ENV, SECRET_ENV
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.progress import PhaseProgress
from pdserve.launch import ray_cluster
from pdserve.launch.actor_api import NameTaken, RayTrouble
from pdserve.launch.child import StartFailed
from pdserve.launch.detached.keeper import MAX_LINE_BYTES
from pdserve.launch.ports import free_ports
from pdserve.launch.ray_cluster import RayApi
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec, ClusterTls, worker_config
from pdserve.launch.with_ray import (
    IMPORTING,
    LOADING,
    MAX_ERROR_CHARS,
    STATE,
    WARMING,
    ActorHealth,
    ActorStart,
    Phase,
    WantedCluster,
    WantedFile,
    WantedWorker,
    WorkerState,
    check_redis,
    states_from_json,
    states_to_json,
)
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.progress import PhaseReport


def wanted(**settings: Any) -> WantedCluster:
    spec = ClusterSpec(
        model="toy",
        prefill=2,
        cluster_secret="hidden as well",
        redis="redis://:hidden@127.0.0.1:1/0",
        tls=ClusterTls(folder="/certs", peer_name="a.example"),
        settings={"worker": {"kv_blocks": 3, **settings}, "router": {"token": "hidden"}},
    )
    configs = [worker_config(spec, index) for index in range(3)]
    workers = tuple(
        WantedWorker(worker_id=config.worker_id, role=role, revision=at, config=config, is_ended=at == 2)
        for at, (role, config) in enumerate(configs)
    )
    return WantedCluster(cluster="c", strategy="pack", wait_s=5.0, workers=workers, has_started=True)


def test_no_secret_is_in_the_file_for_the_driver() -> None:
    assert "hidden" not in wanted().to_json()


def test_the_driver_reads_what_the_launcher_wrote(tmp_path: Path) -> None:
    path = tmp_path / "wanted"
    file = WantedFile(str(path), {SECRET_ENV: "hidden as well", REDIS_ENV: "redis://:hidden@127.0.0.1:1/0"})
    path.write_text(wanted().to_json())
    assert file.read() == wanted()
    assert file.read() is file.read(), "nothing has changed"
    path.write_text(wanted(max_batch=4).to_json())
    assert file.read() == wanted(max_batch=4)


def test_the_states_of_any_number_of_workers_fit_into_a_line() -> None:
    states = {
        f"d{number}": WorkerState(revision=10**6, phase=Phase.FAILED, error="\u20ac\n" * 1000) for number in range(512)
    }
    line = f"@ray {STATE}{states_to_json(states)}"
    assert len(line) < MAX_LINE_BYTES
    assert "\n" not in line
    found = states_from_json(states_to_json(states))
    assert {name: (one.revision, one.phase) for name, one in found.items()} == dict.fromkeys(
        states, (10**6, Phase.FAILED)
    )
    assert found["d0"].error == states["d0"].error[:MAX_ERROR_CHARS]


async def test_a_redis_that_does_not_answer_ends_the_start_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    spec = ClusterSpec(model="toy", redis=f"redis://:hidden@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.* does not answer .*failed.*--ray"):
        await check_redis(spec, LauncherReport(), 0.3)
    err = capsys.readouterr().err
    assert "does not answer" in err
    assert "hidden" not in err


async def test_a_database_that_redis_lacks_is_named(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / "socket") as redis, pytest.raises(ConfigError, match="DB index"):
        await check_redis(ClusterSpec(model="toy", redis=f"{redis.url}?db=99"), LauncherReport(), 0.3)


def health(pid: int = 7, **facts: Any) -> ActorHealth:
    return ActorHealth(**{"pid": pid, "address": "", "error": "", **facts})


def test_each_stage_of_a_worker_is_told_once() -> None:
    start, other = (ActorStart(name, 100.0, 600.0) for name in ("p0", "d0"))
    begun, over = "progress {begun}", "progress {over}"
    told = [
        start.observe(one, 101.0)
        for one in (
            None,
            None,
            health(stage=IMPORTING),
            None,
            health(stage=LOADING, phases=(begun,)),
            health(stage=LOADING, phases=(over,)),
            health(stage=WARMING, phases=(over, begun)),
            health(stage=WARMING, phases=(over, over), address="h:1"),
        )
    ]
    assert told == [
        ["now waits for its process"],
        [],
        ["now imports its modules"],
        [],
        ["now loads the model", begun],
        [over],
        ["now warms up"],
        ["took 1.00 s"],
    ]
    assert other.observe(None, 101.0) == ["now waits for its process"]


def test_a_worker_that_cannot_start_ends_the_start_with_its_cause() -> None:
    def after(*before: ActorHealth) -> ActorStart:
        start = ActorStart("p0", 100.0, 600.0)
        for one in before:
            start.observe(one, 100.0)
        return start

    loading = health(stage=LOADING)
    with pytest.raises(StartFailed, match=r"^p0: kv_memory_bytes: got 1"):
        after(loading).observe(health(error="kv_memory_bytes: got 1"), 101.0)
    with pytest.raises(StartFailed, match=r"^p0: its process ended while it loads the model; the logs of Ray"):
        after(loading).observe(health(pid=8, stage=IMPORTING), 101.0)
    with pytest.raises(StartFailed, match=r"^p0: its process ended while it loads the model: out of memory; "):
        after(loading).lost("out of memory")
    with pytest.raises(StartFailed, match="600 s: p0 loads the model; "):
        after(loading).observe(None, 700.1)
    with pytest.raises(StartFailed, match="600 s: p0 waits for its process; "):
        after().observe(None, 700.1)
    start = after()
    start.lost("not there yet")
    assert start.observe(None, 700.0) == ["now waits for its process"]


def test_phases_reach_a_listener(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[PhaseProgress] = []
    monkeypatch.setattr(PhaseReport, "listener", heard.append)
    PhaseReport("d0", "weights", "bytes", clock=lambda: 5.0)(1, 4)
    assert heard == [PhaseProgress(phase="weights", done=1, total=4, unit="bytes", seconds=0.0)]
    assert capsys.readouterr().err == ""


# --- calls of Ray that fail halfway ---------------------------------------------------------------------------


class HalfRay:
    """The functions of Ray that RayApi calls. `failing` names those that fail once they have done their work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: dict[str, Any] = {}
        self.actors: dict[str, Any] = {}
        self.failing: list[str] = []
        self.most_actors = 10
        self.name = ""
        ray = SimpleNamespace(
            exceptions=ray_cluster.ray.exceptions,
            wait=lambda objects, timeout: (objects, []),
            get=lambda one: one,
            nodes=lambda: [
                {"NodeID": node, "Alive": True, "Resources": {}, "NodeManagerAddress": f"10.0.0.{at}"}
                for at, node in enumerate("ab")
            ],
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"),
            util=SimpleNamespace(placement_group_table=lambda group: {"bundles_to_node_id": {0: "b"}}),
            remote=lambda *args, **options: self if args else lambda kind: self,
            get_actor=self.get_actor,
            kill=self.kill,
        )
        monkeypatch.setattr(ray_cluster, "ray", ray)
        for name in ("placement_group", "get_placement_group", "remove_placement_group"):
            monkeypatch.setattr(ray_cluster, name, getattr(self, name))

    def done(self, call: str) -> None:
        if call in self.failing:
            self.failing.remove(call)
            raise RuntimeError(f"{call} failed")

    def placement_group(self, bundles: Any, *, name: str, **options: Any) -> Any:
        assert name not in self.groups
        self.groups[name] = group = SimpleNamespace(name=name, ready=lambda: self.done("ready") or "placed")
        self.done("placement_group")
        return group

    def get_placement_group(self, name: str) -> Any:
        if name not in self.groups:
            raise ValueError(name)
        return self.groups[name]

    def remove_placement_group(self, group: Any) -> None:
        self.done("remove")
        del self.groups[group.name]

    def options(self, *, name: str = "", **options: Any) -> HalfRay:
        self.name = name
        return self

    def remote(self, *args: Any) -> Any:
        if self.name in self.actors:
            raise ray_cluster.ray.exceptions.ActorAlreadyExistsError("it exists")
        if len(self.actors) == self.most_actors:
            raise RuntimeError("no room")
        self.actors[self.name or f"rank {len(self.actors)}"] = actor = SimpleNamespace()
        self.done("create")
        return actor

    def get_actor(self, name: str) -> Any:
        return self.actors[name]

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.actors = {name: one for name, one in self.actors.items() if one is not actor}


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> HalfRay:
    return HalfRay(monkeypatch)


@pytest.mark.parametrize("failing", [["placement_group"], ["ready"], ["placement_group", "remove"]])
@pytest.mark.parametrize("follows", ["release", "again"])
def test_a_placement_group_of_a_failed_call_is_removed_or_replaced(
    failing: list[str], follows: str, half: HalfRay
) -> None:
    api = RayApi("head:6379", "redis://10.0.0.1/0")
    place = api.place("pdserve-c-d0", ({"CPU": 1.0},), "spread", "")
    assert not half.groups, "nothing is asked yet"
    half.failing = list(failing)
    with pytest.raises(RayTrouble, match="failed"):
        api.is_placed(place)
    assert len(half.groups) == 1
    if "remove" in failing:
        with pytest.raises(RayTrouble, match="remove failed"):
            api.release(place)
    if follows == "again":
        assert api.is_placed(place)
        assert list(half.groups) == [place.name]
    api.release(place)
    assert not half.groups


def test_placement_groups_of_two_launchers_have_different_names(half: HalfRay) -> None:
    places = [RayApi("head:6379", "").place("pdserve-c-d0", ({"CPU": 1.0},), "spread", "") for _ in range(2)]
    assert all(RayApi("head:6379", "").is_placed(one) for one in places)
    assert len(half.groups) == 2


def test_an_actor_of_a_failed_call_is_ended_before_the_next_one(half: HalfRay) -> None:
    """Nobody else's: its name may be that of another launcher's."""
    [one, *_] = wanted().workers
    api, needs = RayApi("", ""), ({"CPU": 1.0},)
    place = api.place("pdserve-c-p0", needs, "spread", "")
    half.actors["pdserve-c-p0"] = theirs = SimpleNamespace()
    with pytest.raises(NameTaken):
        api.create(one, "c", place, needs)
    assert half.actors["pdserve-c-p0"] is theirs
    half.actors.clear()
    half.failing = ["create"]
    with pytest.raises(RayTrouble, match="create failed"):
        api.create(one, "c", place, needs)
    assert half.actors
    with pytest.raises(NameTaken):
        api.create(one, "c", place, needs)
    assert not half.actors
    assert api.create(one, "c", place, needs) is half.actors["pdserve-c-p0"]


def test_ranks_of_a_failed_call_are_ended(half: HalfRay) -> None:
    [one, *_] = wanted().workers
    config = replace(one.config, tensor_parallel=3, local_ranks=1, rendezvous="10.0.0.9:7000", host="10.0.0.9")
    one, needs = replace(one, config=config), ({"CPU": 1.0},) * 3
    api = RayApi("", "")
    place = api.place("pdserve-c-p0", needs, "pack", "")
    half.most_actors = 1
    with pytest.raises(RayTrouble, match="no room"):
        api.with_ranks(one, place, needs, None)
    assert not half.actors
    half.most_actors = 2
    ranks = api.with_ranks(one, place, needs, None)
    assert ranks is not None
    assert (ranks[0], len(ranks[1]), len(half.actors)) == ("10.0.0.1:7000", 2, 2)
    assert api.with_ranks(one, place, needs, ranks) is ranks, "the address is the same"
    api.kill_ranks(ranks)
    assert not half.actors
    assert api.with_ranks(one, place, needs, ranks) is not ranks, "they were killed"


@pytest.mark.parametrize(
    ("address", "redis", "settings", "nodes"),
    [
        ("", "redis://10.0.0.1/0", {"insecure": True}, ["a"]),
        ("head:6379", "redis://10.0.0.1/0", {}, ["a"]),
        ("head:6379", "unix:/tmp/redis", {"insecure": True}, ["a"]),
        ("head:6379", "redis://:p@127.0.0.1/0", {"insecure": True}, ["a"]),
        ("head:6379", "redis://10.0.0.1/0", {"insecure": True}, ["a", "b"]),
        ("head:6379", "redis://10.0.0.1/0", {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}, ["a", "b"]),
    ],
)
def test_settings_decide_whether_workers_may_be_on_other_hosts(
    address: str, redis: str, settings: dict[str, Any], nodes: list[str], half: HalfRay
) -> None:
    """The nodes that are there do not: others may join later."""
    [one, *_] = wanted().workers
    config = replace(one.config, tls_cert="", tls_key="", tls_ca="", tls_peer_name="")
    one = replace(one, config=replace(config, **settings))
    api = RayApi(address, redis)
    assert list(api.nodes(one.config)) == nodes
    place = api.place("pdserve-c-p0", ({"CPU": 1.0},), "spread", "")
    assert api.is_placed(place)
    if "b" in nodes:
        assert api.check(one, place) is None
    else:
        with pytest.raises(ConfigError, match="redis: got" if "10.0.0.1" not in redis else "tls: got nothing"):
            api.check(one, place)

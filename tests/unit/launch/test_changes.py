"""What a changed cluster keeps of its settings and ports. No process is started."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.errors import ChangeFailed, ConfigError, InvalidRequest, NotFound, PdserveError
from pdserve.core.live import LiveFrame
from pdserve.core.types import Role
from pdserve.launch.changes.local_cluster import LocalCluster
from pdserve.launch.changes.plans import RollTarget, index_of, vacate
from pdserve.launch.changes.weights import with_revision
from pdserve.launch.detached.saved import SavedCluster
from pdserve.launch.ports import free_ports, is_free
from pdserve.launch.report import LauncherReport
from pdserve.launch.settings import bundled_model
from pdserve.launch.spec import ClusterSpec, processes
from router.recording.replay import decode_value, encode_value
from tests.unit.top import given


def free_range(count: int) -> int:
    """The first of so many free ports in a row."""
    return next(
        first
        for first in (free_ports(1)[0] for _ in range(100))
        if all(is_free("127.0.0.1", port) for port in range(first, first + count))
    )


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    monkeypatch.setenv("PDSERVE_LOG_LEVEL", "info")
    settings: Any = {"worker": {"drain_s": 3.0}}
    spec = ClusterSpec(model="toy", port=0, decode=2, cores=2, metrics=free_range(12), settings=settings)
    one = LocalCluster(spec, LauncherReport())
    yield one
    await one.stop(is_graceful=False)


def of_workers(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return {one.name: getattr(one.config, name) for one in cluster._processes()[:-1]}


def roll(cluster: LocalCluster, overlay: Mapping[Any, Any], *worker_ids: str) -> None:
    """The end of a roll-out of these workers."""
    cluster._overlays |= dict.fromkeys(worker_ids, overlay)


# --- settings -------------------------------------------------------------------------------------------------


def test_sighup_changes_what_roll_outs_have_not_set(cluster: LocalCluster) -> None:
    roll(cluster, {"worker": {"drain_s": 9.0, "max_batch": 8}}, "d0")
    cluster.reload({"worker": {"drain_s": 5.0, "stall_s": 50.0}, "router": {"slo_ttft_s": 7.0}}, "info")
    assert of_workers(cluster, "drain_s") == {"p0": 5.0, "d0": 9.0, "d1": 5.0}
    assert of_workers(cluster, "stall_s") == dict.fromkeys(("p0", "d0", "d1"), 50.0)
    assert of_workers(cluster, "max_batch") == {"p0": 0, "d0": 8, "d1": 0}
    roll(cluster, {}, "d0")
    assert of_workers(cluster, "drain_s") == dict.fromkeys(("p0", "d0", "d1"), 5.0), "after an undo"
    assert cluster._processes()[-1] == processes(cluster.spec)[-1]
    assert cluster._processes()[-1].config.slo_ttft_s == 7.0  # type: ignore[union-attr]


@pytest.mark.parametrize("table", ["worker", "decode_worker"])
async def test_settings_that_up_would_reject_start_no_roll_out(cluster: LocalCluster, table: str) -> None:
    with pytest.raises(ConfigError, match=r"heartbeat_s: got 5.0, expected less than router.worker_silence_s"):
        await cluster.roll([], 1, f"[{table}]\nheartbeat_s = 5.0", "", is_undo=False, say=print)
    with pytest.raises(NotFound):
        await cluster.roll(["d7"], 1, "", "", is_undo=False, say=print)


async def test_a_roll_out_cannot_divide_the_gpus_again(cluster: LocalCluster) -> None:
    slots = tuple(replace(one, gpus=(str(number),)) for number, one in enumerate(cluster.spec.slots))
    cluster.spec = replace(cluster.spec, gpus=("0", "1", "2"), slots=slots)
    with pytest.raises(ConfigError, match=r"worker\.device: got 0 GPUs, expected 1 for p0, as now"):
        await cluster.roll([], 1, "[prefill_worker]\ndevice = 'cpu'", "", is_undo=False, say=print)


async def test_weights_that_cannot_be_served_start_no_roll_out(cluster: LocalCluster) -> None:
    for model, text in (
        ("relative/folder", "an absolute path"),
        ("/nowhere", "model: got /nowhere"),
        ("toy", "all workers serve this one"),
        (str(bundled_model()), "a tokenizer as of the weights that are served"),
    ):
        with pytest.raises(PdserveError, match=text):
            await cluster.roll([], 1, "", model, is_undo=False, say=print)
    with pytest.raises(InvalidRequest, match="one model"):
        await cluster.roll(["d0"], 1, "", "toy-other", is_undo=False, say=print)
    with pytest.raises(InvalidRequest, match="nothing beside it"):
        await cluster.roll([], 1, "", "toy-other", is_undo=True, say=print)


def test_each_worker_loads_the_weights_of_its_revision(cluster: LocalCluster) -> None:
    cluster.spec, overlay = with_revision(cluster.spec, {"worker": {"drain_s": 9.0}}, "toy-other")
    roll(cluster, overlay, "d0")
    assert of_workers(cluster, "model") == {"p0": "toy", "d0": "toy-other", "d1": "toy"}
    assert of_workers(cluster, "revision") == {"p0": "", "d0": "toy-other", "d1": ""}
    assert of_workers(cluster, "drain_s") == {"p0": 3.0, "d0": 9.0, "d1": 3.0}
    assert cluster._processes()[-1].config.model == "toy", "routers keep their folder"
    cluster.reload({"worker": {"stall_s": 50.0}}, "info")
    assert of_workers(cluster, "model")["d0"] == "toy-other", "after SIGHUP"


class NoRouters:
    """They see no worker."""

    def __init__(self, *unused: object) -> None: ...

    async def __aenter__(self) -> NoRouters:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def frames(self) -> list[LiveFrame]:
        return []


async def test_an_undo_concerns_the_last_roll_out_alone(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[str] = []

    async def follow(steps: object, routers: object, target: RollTarget, *unused: object) -> None:
        assert target.overlay is not None
        roll(cluster, target.overlay, *replaced)
        if len(replaced) < 3:
            raise ChangeFailed("it stopped")

    monkeypatch.setattr("pdserve.launch.changes.cluster.Routers", NoRouters)
    monkeypatch.setattr(cluster, "_follow", follow)
    replaced = ["p0", "d0", "d1"]
    await cluster.roll([], 1, "[worker]\nmax_batch = 8", "", is_undo=False, say=print)
    replaced = []
    with pytest.raises(ChangeFailed):
        await cluster.roll([], 1, "", "toy-other", is_undo=False, say=print)
    with pytest.raises(ConfigError, match="undo: got no roll-out"):
        await cluster.roll([], 1, "", "", is_undo=True, say=print)
    assert of_workers(cluster, "max_batch") == dict.fromkeys(("p0", "d0", "d1"), 8), "the one before is not undone"
    replaced = ["d0"]
    with pytest.raises(ChangeFailed):
        await cluster.roll([], 1, "[worker]\nmax_batch = 16", "toy-other", is_undo=False, say=print)
    assert of_workers(cluster, "model") == {"p0": "toy", "d0": "toy-other", "d1": "toy"}
    replaced = ["p0", "d0", "d1"]
    await cluster.roll([], 1, "", "", is_undo=True, say=print)
    assert of_workers(cluster, "model") == dict.fromkeys(("p0", "d0", "d1"), "toy")
    assert of_workers(cluster, "max_batch") == dict.fromkeys(("p0", "d0", "d1"), 8)


# --- ports ----------------------------------------------------------------------------------------------------


def test_a_slot_whose_ports_are_in_use_keeps_none(cluster: LocalCluster) -> None:
    held, before = cluster._held.ports, cluster.spec
    assert before.metrics is not None
    with socket.create_server(("127.0.0.1", before.metrics + 6)), pytest.raises(ConfigError, match=r"metrics \+ 6"):
        cluster._take_slot("d2", Role.DECODE, {})
    assert (cluster._held.ports, cluster.spec) == (held, before)


def test_a_worker_that_did_not_start_leaves_no_port(cluster: LocalCluster) -> None:
    held = set(cluster._held.ports)
    cluster._take_slot("d2", Role.DECODE, {})
    port = cluster.spec.slots[-1].port
    assert set(cluster._held.ports) - held == {port, cluster.spec.metrics + 6}  # type: ignore[operator]
    cluster._forget("d2", keeps_ports=False)
    assert set(cluster._held.ports) == held
    assert is_free("127.0.0.1", port)
    cluster._take_slot("d2", Role.DECODE, {})
    assert cluster.spec.slots[index_of(cluster.spec, "d2")].port in cluster._held.ports
    assert len(cluster.spec.slots) == 4
    assert vacate(cluster.spec, "d2").slots[-1].port, "one that has served keeps it"


# --- a former launcher ----------------------------------------------------------------------------------------


class SeenRouters:
    """Of a cluster whose launcher was killed in the middle of a change."""

    def __init__(self, seen: Mapping[str, Role]) -> None:
        self._seen = seen
        self.undrained: list[str] = []

    def __call__(self, spec: ClusterSpec, address: str) -> SeenRouters:
        return self

    async def __aenter__(self) -> SeenRouters:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def frames(self) -> list[LiveFrame]:
        workers = tuple(given.worker(worker_id, role=role) for worker_id, role in self._seen.items())
        return [given.frame(0.0, workers=workers)]

    async def undrain(self, worker_id: str) -> None:
        self.undrained.append(worker_id)

    async def drain(self, worker_id: str) -> None:
        raise NotFound("worker", worker_id)

    async def wait_for_all(self, *arguments: object) -> bool:
        return True


async def test_a_new_launcher_ends_the_change_of_the_former_one(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster._take_slot("d2", Role.DECODE, {"worker": {"max_batch": 8}}, is_surge=True)
    roll(cluster, {"worker": {"max_batch": 8}}, "d1")
    cluster._draining = ("d0",)
    for one in cluster._all_processes("127.0.0.1:1"):
        cluster._supervisor.adopt(one, None, "", 0.0)
    seen = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.PREFILL, "d2": Role.DECODE}
    routers = SeenRouters(seen)
    monkeypatch.setattr("pdserve.launch.changes.cluster.Routers", routers)
    await cluster._finish_former_change()
    assert routers.undrained == ["d0"]
    assert {one.worker_id: one.role for one in cluster.spec.slots if not one.is_vacant} == {
        "p0": Role.PREFILL,
        "d0": Role.DECODE,
        "d1": Role.PREFILL,  # its process has taken it
    }
    assert cluster._supervisor._processes["d1"].program[0] == "prefill_worker"
    assert (cluster.spec.prefill, cluster.spec.decode) == (2, 1)
    assert cluster._former == {}, "`roll --undo` returns to it"
    saved = cluster.saved()
    assert (saved.draining, saved.overlays.keys()) == ((), {"p0", "d0", "d1"})


async def test_a_new_launcher_has_the_same_workers(cluster: LocalCluster) -> None:
    cluster._take_slot("d2", Role.DECODE, {"worker": {"max_batch": 8}})
    roll(cluster, {"worker": {"drain_s": 9.0}}, "d0")
    cluster._forget("d1")
    saved = decode_value(SavedCluster, json.loads(json.dumps(encode_value(cluster.saved()))))
    again = LocalCluster(saved.spec, LauncherReport(), saved=saved)
    assert again._processes() == cluster._processes()
    assert again.saved() == saved
    await again.leave()
    assert again.folder.exists(), "it is still the other's"

"""Which workers a change of the cluster ends, in which order it replaces them, and when a roll-out stops."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.client.results import Worker
from pdserve.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PdserveError,
    Unauthenticated,
    Unavailable,
)
from pdserve.core.live import LiveTotals, LiveWorker
from pdserve.core.types import Role
from pdserve.launch.changes import Routers
from pdserve.launch.scaling import (
    FailureCount,
    RollStep,
    ScalePlan,
    add_worker,
    check_serving,
    free_id,
    index_of,
    plan_roll,
    plan_scale,
    read_settings,
    stopped_text,
    vacate,
    with_role,
    with_slots,
)
from pdserve.launch.spec import ClusterSpec, ports, processes, worker_process


def spec(**changes: Any) -> ClusterSpec:
    base: dict[str, Any] = {"model": "toy", "port": 50051, "redis": "redis://127.0.0.1:7/0", "cores": 8, **changes}
    workers = base.get("prefill", 1) + base.get("decode", 1)
    base.setdefault("worker_ports", tuple(range(20_001, 20_001 + workers)))
    return with_slots(ClusterSpec(**base))


def live(worker_id: str, **changes: Any) -> LiveWorker:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    facts: dict[str, Any] = dict.fromkeys(LiveWorker.__dataclass_fields__, 0)
    facts |= {"worker_id": worker_id, "role": role, "endpoint": "h:1", "version": "", "is_connected": True}
    return LiveWorker(**{**facts, "is_draining": False, "is_drained": False, **changes})


def plan(cluster: ClusterSpec, workers: list[LiveWorker], prefill: int | None, decode: int | None) -> ScalePlan:
    return plan_scale(cluster.slots, workers, prefill, decode)


# --- numbers of workers ---------------------------------------------------------------------------------------


def test_new_workers_get_free_names() -> None:
    cluster = vacate(spec(prefill=1, decode=3), "d1")
    found = plan(cluster, [], 2, 4)
    assert found == ScalePlan(add=(("p1", Role.PREFILL), ("d1", Role.DECODE), ("d3", Role.DECODE)), remove=())
    assert free_id(Role.DECODE, {"p0"}) == "d0"


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        ({"is_connected": False}, {}),
        ({"is_drained": True, "context_tokens": 900, "running": 1}, {}),
        ({}, {"running": 1, "context_tokens": 5}),
        ({"cached_blocks": 90}, {"booked": 1}),
        ({"running": 3, "context_tokens": 50}, {"running": 1, "context_tokens": 500}),
        ({"running": 1, "pending_prefill_tokens": 20}, {"running": 1, "pending_prefill_tokens": 30}),
        ({"cached_blocks": 3}, {"cached_blocks": 4}),
    ],
)
def test_the_worker_whose_end_costs_least_ends(cheap: dict[str, Any], dear: dict[str, Any]) -> None:
    cluster = spec(decode=2)
    assert plan(cluster, [live("d0", **cheap), live("d1", **dear)], None, 1).remove == ("d0",)
    assert plan(cluster, [live("d0", **dear), live("d1", **cheap)], None, 1).remove == ("d1",)


def test_of_equal_workers_the_last_ends() -> None:
    cluster = spec(decode=12)
    workers = [live(f"d{number}") for number in range(12)]
    assert plan(cluster, workers, None, 9).remove == ("d11", "d10", "d9")


def test_a_worker_that_no_router_knows_ends_first() -> None:
    assert plan(spec(decode=3), [live("d0"), live("d2")], None, 1).remove == ("d1", "d2")


def test_both_roles_change_at_once() -> None:
    found = plan(spec(prefill=2, decode=1), [live("p0", cached_blocks=1), live("p1"), live("d0")], 0, 2)
    assert found == ScalePlan(add=(("d1", Role.DECODE),), remove=("p1", "p0"))


@pytest.mark.parametrize(("prefill", "decode"), [(None, 0), (None, 257), (257, None), (None, None)])
def test_numbers_are_bounded(prefill: int | None, decode: int | None) -> None:
    with pytest.raises(InvalidRequest):
        plan(spec(), [], prefill, decode)


# --- slots ----------------------------------------------------------------------------------------------------


def test_slots_describe_the_same_processes() -> None:
    plain = ClusterSpec(model="toy", prefill=2, decode=2, cores=8, worker_ports=(1, 2, 3, 4), metrics=9500, http=8000)
    assert [one.config for one in processes(with_slots(plain))] == [one.config for one in processes(plain)]
    assert with_slots(with_slots(plain)) == with_slots(plain)


def test_a_vacant_slot_gives_its_ports_to_the_next_worker() -> None:
    cluster = add_worker(vacate(spec(decode=2, metrics=9500, http=0), "d0"), "p1", Role.PREFILL, 30_000)
    assert cluster.worker_ids == ("p0", "p1", "d1")
    assert (cluster.prefill, cluster.decode) == (2, 1)
    added = worker_process(cluster, index_of(cluster, "p1"))
    assert (added.module, added.config.port) == ("prefill_worker", 20_002)  # type: ignore[union-attr]
    assert added.config.metrics_port == 9503


@pytest.mark.parametrize("routers", [1, 2])
def test_no_port_of_an_added_worker_is_that_of_another_process(routers: int) -> None:
    cluster = spec(metrics=9500, http=8000, routers=routers, group="/run/x" if routers > 1 else "")
    before = ports(cluster, are_workers_here=True)
    for number in range(1, 4):
        cluster = add_worker(cluster, f"d{number}", Role.DECODE, 30_000 + number)
    after = ports(cluster, are_workers_here=True)
    assert set(before) <= set(after), "the ports of running processes stay"
    numbers = [port for _, _, port in after]
    assert len(numbers) == len(set(numbers)) == len(before) + 2 * 3
    assert max(numbers[1:]) >= 9501 + cluster.num_processes - 1


def test_workers_share_the_cores_without_one_that_stands_in() -> None:
    cluster = spec(decode=3)
    wider = add_worker(cluster, "d3", Role.DECODE, 30_000)
    assert worker_process(wider, index_of(wider, "d3")).config.threads == 1  # type: ignore[union-attr]
    surge = add_worker(cluster, "d3", Role.DECODE, 30_000, is_surge=True)
    assert (surge.decode, surge.worker_ids[-1]) == (3, "d3")
    assert {one.config.threads for one in processes(surge)[:-1]} == {2}  # type: ignore[union-attr]


def test_an_added_worker_gets_gpus_that_no_other_has() -> None:
    cluster = spec(decode=2, gpus=("0", "1", "2", "3"))
    wider = add_worker(cluster, "d2", Role.DECODE, 30_000)
    assert wider.slots[-1].gpus == ("3",)
    with pytest.raises(ConfigError, match=r"prefill: got p1, expected 1 GPUs of this host that no worker has, and 0"):
        add_worker(wider, "p1", Role.PREFILL, 30_001)
    reused = add_worker(vacate(wider, "d1"), "p1", Role.PREFILL, 0)
    assert reused.slots[index_of(reused, "p1")].gpus == ("2",)


def test_a_worker_keeps_its_place_in_the_other_role() -> None:
    cluster = spec(decode=2)
    changed = with_role(cluster, "d1", Role.PREFILL)
    assert (changed.prefill, changed.decode) == (2, 1)
    process = worker_process(changed, index_of(changed, "d1"))
    assert (process.name, process.module, process.config.port) == ("d1", "prefill_worker", 20_003)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="decode: got 0"):
        with_role(changed, "d0", Role.PREFILL)
    with pytest.raises(NotFound):
        with_role(cluster, "d7", Role.PREFILL)


def test_the_last_decode_worker_that_serves_is_not_drained() -> None:
    workers = [live("p0"), live("d0"), live("d1", is_drained=True), live("d2", is_connected=False)]
    with pytest.raises(ConfigError, match="d0: got the only decode worker that serves"):
        check_serving(workers, "d0")
    check_serving(workers, "d1")
    check_serving([*workers, live("d3")], "d0")


# --- roll-outs ------------------------------------------------------------------------------------------------


def steps(found: list[RollStep]) -> list[str]:
    return [f"{one.kind} {one.worker_id}" for one in found]


def test_a_worker_of_each_role_stands_in_for_the_others() -> None:
    cluster = spec(prefill=1, decode=2)
    workers = [live("p0"), live("d0", running=1, context_tokens=9), live("d1")]
    expected = ["add p1", "replace p0", "end p1", "add d2", "replace d1", "replace d0", "end d2"]
    assert steps(plan_roll(cluster.slots, workers, (), 1)) == expected
    assert steps(plan_roll(cluster.slots, workers, (), 0)) == ["replace p0", "replace d1", "replace d0"]
    undone = plan_roll(cluster.slots, workers, (), 0, is_undo=True)
    assert steps(undone) == ["replace d1", "replace d0", "replace p0"]


def test_only_chosen_workers_are_replaced() -> None:
    cluster = vacate(spec(prefill=0, decode=3), "d1")
    assert steps(plan_roll(cluster.slots, [], ["d2"], 1)) == ["add d1", "replace d2", "end d1"]
    with pytest.raises(NotFound):
        plan_roll(cluster.slots, [], ["d1"], 1)
    with pytest.raises(InvalidRequest):
        plan_roll(cluster.slots, [], [], 2)


def test_failed_requests_stop_a_roll_out() -> None:
    count = FailureCount()
    for failed in (7, 7, 7):
        count.observe(LiveTotals(failed=failed))
        assert count.why_to_stop == ""
    count.observe(LiveTotals(failed=0))  # a router has started again
    assert count.why_to_stop == ""
    count.observe(LiveTotals(failed=1))
    assert count.why_to_stop == "1 request failed since it began"
    count.observe(LiveTotals(failed=3))
    assert count.why_to_stop == "3 requests failed since it began"


def test_a_stopped_roll_out_says_how_to_undo_it() -> None:
    undo = "`pdserve roll --undo` returns to the settings from before"
    assert stopped_text("why", ["d0"], ["d1"], has_settings=True).endswith(f"not replaced: d1); {undo}")
    assert "all workers have the settings from before" in stopped_text("why", [], ["d1"], has_settings=True)
    assert stopped_text("why", ["d0"], [], has_settings=False).endswith("(replaced: d0; not replaced: none)")


def test_settings_of_a_roll_out_replace_those_of_its_tables() -> None:
    running: Any = {"worker": {"max_batch": 8, "drain_s": 3.0}, "router": {"max_queue": 4}}
    found = read_settings("[worker]\nmax_batch = 16\n[decode_worker]\nmax_drafts = 2\n", running)
    assert found == {
        "worker": {"max_batch": 16, "drain_s": 3.0},
        "router": {"max_queue": 4},
        "decode_worker": {"max_drafts": 2},
    }
    assert running["worker"] == {"max_batch": 8, "drain_s": 3.0}


@pytest.mark.parametrize(
    "text",
    [
        "[worker]\nengine_python = '/bin/sh'",
        "[decode_worker]\nlora_folders = ['/']",
        "[worker]\ntls_key = '/k'",
        "[worker]\nmax_batch = -1",
        "[worker]\nport = 7",
        "[worker]\nunheard_of = 7",
        "[router]\nmax_queue = 7",
        "max_batch = 7",
        "worker = 7",
    ],
)
def test_a_roll_out_takes_no_other_settings(text: str) -> None:
    with pytest.raises(ConfigError):
        read_settings(text, {})


@pytest.mark.parametrize("text", ["[worker", "x = " + "[" * 5000, "#" * 70_000])
def test_a_text_that_is_no_toml_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_settings(text, {})


# --- routers --------------------------------------------------------------------------------------------------


class SlowRouter:
    """Its first calls exceed their time limit."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.failures: list[PdserveError] = [DeadlineExceeded("too late"), Unavailable("restarts")]
        self._workers = tuple(workers)

    async def topology(self) -> SimpleNamespace:
        if self.failures:
            raise self.failures.pop()
        return SimpleNamespace(workers=self._workers)


async def test_a_slow_router_is_asked_again() -> None:
    routers = object.__new__(Routers)
    routers._clients = [SlowRouter([]), SlowRouter([])]  # type: ignore[list-item]
    assert await routers.wait_for_all("d0", lambda one: one is None, limit_s=60.0)
    assert not any(one.failures for one in routers._clients)  # type: ignore[attr-defined]
    routers._clients[0].failures.append(Unauthenticated("no token"))  # type: ignore[attr-defined]
    with pytest.raises(Unauthenticated):
        await routers.wait_for_all("d0", lambda one: one is None, limit_s=60.0)

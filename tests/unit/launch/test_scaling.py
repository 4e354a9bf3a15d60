"""Which workers a change of the cluster ends, in which order it replaces them, and when a roll-out stops."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import cache
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
from pdserve.core.live import LiveFrame, LiveRequest, LiveTotals, LiveWorker
from pdserve.core.types import Role
from pdserve.launch.changes.plans import (
    FALSE_STOP,
    MIN_BURST,
    MIN_REQUESTS,
    Attainment,
    RollCounts,
    RollStep,
    RollTarget,
    ScalePlan,
    add_worker,
    burst_of,
    check_serving,
    free_id,
    index_of,
    misses_more,
    overlaid,
    plan_roll,
    plan_scale,
    read_settings,
    roll_target,
    stopped_text,
    vacate,
    why_failed,
    with_role,
    with_slots,
    workers_of,
)
from pdserve.launch.changes.routers import Routers
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


def wide_decode(**changes: Any) -> ClusterSpec:
    """Decode workers have two GPUs, prefill workers one."""
    return spec(model="m", settings={"decode_worker": {"tensor_parallel": 2}}, **changes)


def test_the_gpus_of_a_worker_that_has_ended_are_free_for_the_other_role() -> None:
    cluster = vacate(wide_decode(decode=2, gpus=("0", "1", "2", "3", "4")), "d1")
    one = add_worker(cluster, "p1", Role.PREFILL, 0)
    two = add_worker(one, "p2", Role.PREFILL, 30_000)
    assert [(slot.worker_id, slot.port, slot.gpus) for slot in two.slots[2:]] == [
        ("p1", 20_003, ("3",)),
        ("p2", 30_000, ("4",)),
    ]
    with pytest.raises(ConfigError, match="and 0 are free"):
        add_worker(two, "p3", Role.PREFILL, 30_001)


def test_gpus_of_several_vacant_slots_make_a_larger_worker() -> None:
    cluster = wide_decode(prefill=3, decode=1, gpus=("0", "1", "2", "3", "4"))
    vacant = vacate(vacate(cluster, "p1"), "p2")
    wider = add_worker(vacant, "d1", Role.DECODE, 0)
    assert [(one.is_vacant, one.gpus) for one in wider.slots] == [
        (False, ("0",)),
        (False, ("1", "2")),
        (True, ()),
        (False, ("3", "4")),
    ]
    with pytest.raises(ConfigError, match="and 0 are free"):
        add_worker(wider, "p1", Role.PREFILL, 0)
    again = add_worker(vacate(wider, "d1"), "p1", Role.PREFILL, 0)
    assert len({gpu for one in again.slots if not one.is_vacant for gpu in one.gpus}) == 4


def test_a_vacant_slot_without_a_port_gets_another() -> None:
    cluster = vacate(spec(decode=2), "d1", keeps_port=False)
    assert 0 not in [port for _, _, port in ports(cluster, are_workers_here=True)]
    assert add_worker(cluster, "d1", Role.DECODE, 30_000).slots[-1].port == 30_000


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


def test_the_roles_take_turns_for_other_weights() -> None:
    cluster, workers = spec(prefill=1, decode=2), [live("p0"), live("d0"), live("d1")]
    turns = ["add p1", "add d2", "replace d1", "replace p0", "replace d0", "end p1", "end d2"]
    assert steps(plan_roll(cluster.slots, workers, (), 1, by_turns=True)) == turns
    assert steps(plan_roll(cluster.slots, workers, (), 0, by_turns=True)) == ["replace d1", "replace p0", "replace d0"]
    undone = plan_roll(cluster.slots, workers, (), 1, by_turns=True, is_undo=True)
    assert steps(undone) == ["add d2", "add p1", "replace d1", "replace p0", "replace d0", "end d2", "end p1"]
    assert steps(plan_roll(spec(prefill=0).slots, [], (), 1, by_turns=True)) == ["add d1", "replace d0", "end d1"]


def test_a_roll_out_to_another_revision_is_one_of_weights() -> None:
    now: dict[str, Any] = {"p0": {}, "d0": {}}
    new: Any = {"worker": {"revision": "v2"}}
    find = roll_target
    assert find(now, None, ["d0"], None, is_undo=False) == RollTarget(overlay=None, worker_ids=("d0",), what="")
    assert find(now, {"worker": {"max_batch": 8}}, [], None, is_undo=False).what == "settings"
    assert find(now, new, [], None, is_undo=False).what == "weights"
    assert find({**now, "d0": new}, None, [], {}, is_undo=True) == RollTarget(
        overlay={}, worker_ids=("d0",), what="weights"
    )
    with pytest.raises(ConfigError, match="no worker"):
        find(now, None, [], {}, is_undo=True)
    with pytest.raises(ConfigError, match="no roll-out"):
        find(now, None, [], None, is_undo=True)
    with pytest.raises(InvalidRequest):
        find(now, new, ["d0"], None, is_undo=False)
    with pytest.raises(ConfigError, match="revision"):
        read_settings("[worker]\nrevision = 'v2'", {})


def test_only_chosen_workers_are_replaced() -> None:
    cluster = vacate(spec(prefill=0, decode=3), "d1")
    assert steps(plan_roll(cluster.slots, [], ["d2"], 1)) == ["add d1", "replace d2", "end d1"]
    with pytest.raises(NotFound):
        plan_roll(cluster.slots, [], ["d1"], 1)
    with pytest.raises(InvalidRequest):
        plan_roll(cluster.slots, [], [], 2)


@cache
def ended(outcome: str) -> LiveRequest:
    facts: dict[str, Any] = dict.fromkeys(LiveRequest.__dataclass_fields__, 0)
    return LiveRequest(**{**facts, "outcome": outcome})


def frame(
    incarnation: str, outcomes: Sequence[str] = (), workers: Sequence[LiveWorker] = (), **totals: int
) -> LiveFrame:
    """Of one router. `outcomes`: of the requests that ended last."""
    return LiveFrame(
        at_s=0.0,
        queued=0,
        running=0,
        omitted=0,
        totals=LiveTotals(**totals),
        workers=tuple(workers),
        requests=tuple(map(ended, outcomes)),
        incarnation=incarnation,
    )


def test_failed_requests_stop_a_roll_out() -> None:
    counts = RollCounts([frame("a", failed=7), frame("b", failed=3)], 4)
    for _ in range(2):
        counts.observe([frame("a", failed=7), frame("b", failed=3)])
        assert counts.why_to_stop == ""
    counts.observe([frame("a", failed=7), frame("b", failed=4)])
    assert counts.why_to_stop == "1 request failed since it began"
    counts.observe([frame("a", failed=9), frame("b", failed=4)])
    assert counts.why_to_stop == "3 requests failed since it began"


def test_a_router_that_starts_again_neither_stops_a_roll_out_nor_hides_failures() -> None:
    counts = RollCounts([frame("a", failed=7), frame("b", failed=3)], 4)
    counts.observe([frame("a", failed=7), frame("c", failed=0)])
    assert counts.why_to_stop == "", "the sum of both is less, but no request failed"
    counts.observe([frame("a", failed=7), frame("c", failed=2)])
    counts.observe([frame("a", failed=7), frame("d", failed=1)])
    assert counts.why_to_stop == "3 requests failed since it began", "those of a router that has ended count"


def ends(served: int, late: int = 0, rejected: int = 0) -> list[str]:
    return ["served"] * served + ["late"] * late + ["rejected"] * rejected


def test_a_roll_out_stops_if_more_requests_miss_their_targets() -> None:
    counts = RollCounts([frame("a", ends(250, 6), served=9_000, late=800), frame("b", ends(256))], 3)
    counts.observe([frame("a", served=29_290, late=806), frame("b", served=300, late=4)])
    assert counts.why_to_stop == ""
    counts.observe([frame("a", served=29_490, late=1_006, expired=10), frame("b", served=610, rejected=190, late=4)])
    expected = "400 of the last 910 requests missed their targets, and 6 of 512 before it began"
    assert counts.why_to_stop == expected, "the earlier requests do not hide the misses of the last window"


@pytest.mark.parametrize(("requests", "least"), [(300, 65), (1_000, 181)])
def test_the_page_names_how_many_misses_stop_a_roll_out(requests: int, least: int) -> None:
    for late in (least - 1, least):
        counts = RollCounts([frame("a", ends(512))], 6)
        counts.observe([frame("a", served=requests - late, late=late)])
        assert bool(counts.why_to_stop) is (late == least)


def test_few_requests_stop_no_roll_out() -> None:
    counts = RollCounts([frame("a", ends(512))], 1)
    counts.observe([frame("a", late=MIN_REQUESTS - 1)])
    assert counts.why_to_stop == ""
    counts.observe([frame("a", late=MIN_REQUESTS)])
    assert counts.why_to_stop
    unknown = RollCounts([frame("a", ends(0, MIN_REQUESTS - 1))], 1)
    unknown.observe([frame("a", late=10_000)])
    assert unknown.why_to_stop == ""


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.6])
def test_noise_stops_no_roll_out(share: float) -> None:
    """Misses come in bursts of ten, so they vary more than independent ones."""
    draw = random.Random(0)

    def outcomes(requests: int) -> list[str]:
        return [one for _ in range(requests // 10) for one in ["late" if draw.random() < share else "served"] * 10]

    for _ in range(50):
        counts, since = RollCounts([frame("a", outcomes(510))], 20), Counter[str]()
        for _ in range(20):
            since.update(outcomes(draw.choice((10, 100, 1000))))
            counts.observe([frame("a", **since)])
            assert counts.why_to_stop == ""


@pytest.mark.parametrize(
    ("before", "since", "is_more"),
    [
        (Attainment(met=512), Attainment(met=170, missed=30), False),
        (Attainment(met=512), Attainment(met=130, missed=70), True),
        (Attainment(met=512), Attainment(met=1_300, missed=700), True),
        (Attainment(met=51_200), Attainment(met=95_500, missed=4_500), False),  # less than MARGIN
        (Attainment(met=51_200), Attainment(met=93_000, missed=7_000), True),
        (Attainment(met=450, missed=62), Attainment(met=150, missed=50), False),
        (Attainment(met=450, missed=62), Attainment(met=90, missed=110), True),
        (Attainment(missed=512), Attainment(missed=512), False),
    ],
)
def test_a_share_of_misses_is_larger_beyond_the_margin_and_the_noise(
    before: Attainment, since: Attainment, is_more: bool
) -> None:
    assert misses_more(before, since, MIN_BURST, FALSE_STOP) is is_more


def test_requests_that_miss_together_count_as_fewer() -> None:
    assert burst_of([number % 10 == 0 for number in range(640)]) == MIN_BURST
    draw = random.Random(0)
    assert 5.0 < burst_of([is_late for _ in range(512) for is_late in [draw.random() < 0.2] * 10]) < 20.0
    assert burst_of([]) == burst_of([True] * 640) == burst_of([False] * 640) == MIN_BURST


def test_a_worker_counts_with_the_requests_of_all_routers() -> None:
    frames = [
        frame("a", workers=[live("d0", booked=2), live("d1", is_connected=False)]),
        frame("b", workers=[live("d0", booked=3), live("d1", booked=1), live("d2")]),
    ]
    assert workers_of(frames) == [live("d0", booked=5), live("d1", booked=1), live("d2")]


def test_a_stopped_roll_out_says_how_to_undo_it() -> None:
    undo = "`pdserve roll --undo` returns to the settings from before"
    assert stopped_text("why", ["d0"], ["d1"], "settings").endswith(f"not replaced: d1); {undo}")
    assert "all workers keep their weights" in stopped_text("why", [], ["d1"], "weights")
    assert stopped_text("why", ["d0"], [], "").endswith("(replaced: d0; not replaced: none)")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unavailable("a router does not answer"), "a router does not answer"),
        (OSError(12, "Cannot allocate memory"), "OSError: [Errno 12] Cannot allocate memory"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_always_has_a_text(error: Exception, text: str) -> None:
    assert why_failed(error) == text


def test_settings_of_a_roll_out_replace_those_of_its_tables() -> None:
    former: Any = {"worker": {"max_batch": 8, "drain_s": 3.0}}
    found = read_settings("[worker]\nmax_batch = 16\n[decode_worker]\nmax_drafts = 2\n", former)
    assert found == {"worker": {"max_batch": 16, "drain_s": 3.0}, "decode_worker": {"max_drafts": 2}}
    assert former == {"worker": {"max_batch": 8, "drain_s": 3.0}}
    file: Any = {"worker": {"max_batch": 4, "stall_s": 9.0}, "router": {"max_queue": 4}}
    assert overlaid(file, found) == {
        "worker": {"max_batch": 16, "drain_s": 3.0, "stall_s": 9.0},
        "router": {"max_queue": 4},
        "decode_worker": {"max_drafts": 2},
    }


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

    def __init__(self, workers: Sequence[Worker], incarnation: str = "") -> None:
        self._incarnation = incarnation
        self.failures: list[PdserveError] = [DeadlineExceeded("too late"), Unavailable("restarts")]
        self._workers = tuple(workers)

    async def topology(self) -> SimpleNamespace:
        if self.failures:
            raise self.failures.pop()
        return SimpleNamespace(workers=self._workers)

    async def watch(self, *, only_this_router: bool) -> AsyncGenerator[LiveFrame, None]:
        assert only_this_router
        if self.failures:
            raise self.failures.pop()
        yield frame(self._incarnation)


async def test_each_router_sends_its_own_frame() -> None:
    routers = object.__new__(Routers)
    routers._clients = [SlowRouter([], "a"), SlowRouter([], "b")]  # type: ignore[list-item]
    assert [one.incarnation for one in await routers.frames()] == ["a", "b"]


async def test_a_slow_router_is_asked_again() -> None:
    routers = object.__new__(Routers)
    routers._clients = [SlowRouter([]), SlowRouter([])]  # type: ignore[list-item]
    assert await routers.wait_for_all("d0", lambda one: one is None, limit_s=60.0)
    assert not any(one.failures for one in routers._clients)  # type: ignore[attr-defined]
    routers._clients[0].failures.append(Unauthenticated("no token"))  # type: ignore[attr-defined]
    with pytest.raises(Unauthenticated):
        await routers.wait_for_all("d0", lambda one: one is None, limit_s=60.0)

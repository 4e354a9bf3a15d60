"""Properties of every run, for any trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from router.state.interface import RequestArrived
from simulator.cluster.machine import Machine
from simulator.cluster.world import World, simulate
from simulator.model import NetworkLink, RequestRow, SimConfig, TraceRequest, WorkerFault, WorkerFaultKind
from tests.support.slow import slow_except
from tests.unit.simulator.small import EASY, MESSAGE_S, Listed, asked, cluster, run


def workload(seed: int, num: int = 120, rate_rps: float = 15.0, **more: Any) -> list[TraceRequest]:
    rng = random.Random(seed)
    now_s = 0.0
    rows = []
    for _ in range(num):
        now_s += rng.expovariate(rate_rps)
        prompt = min(6000, max(1, round(rng.lognormvariate(6.0, 1.2))))
        rows.append(asked(now_s, prompt, rng.randint(1, 200), **more))
    return rows


def totals(world: World, field: str) -> Any:
    return sum(getattr(station.tally.row, field) for station in world.stations.values())


@pytest.mark.parametrize("policy", ["least-ttft", "round-robin", "colocated", "goodput", "mooncake", "dynamo"])
@pytest.mark.parametrize("noise", slow_except([0.0, 0.1], 0.1))
def test_tokens_are_conserved(policy: str, noise: float) -> None:
    rows = workload(1)
    world, done = run(rows, cluster(2, 2, policy=policy, noise=noise, num_routers=1))
    assert all(row.tokens == row.output_tokens for row in done if row.outcome in ("served", "late"))
    served = [row for row in done if row.outcome in ("served", "late")]
    assert len(served) > 0.7 * len(rows)
    assert totals(world, "preemptions") == 0
    assert totals(world, "prefill_tokens") == sum(row.prompt_tokens for row in served)
    # Every token after the first one is a row of a decode step, and so is a remaining prompt of one token.
    assert totals(world, "decode_tokens") == sum(row.output_tokens - 1 for row in served)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_equal_seeds_give_equal_runs(noise: float) -> None:
    config = cluster(2, 2, noise=noise, num_routers=2, seed=4)
    first, second = (simulate(Listed(workload(2)), config) for _ in range(2))
    assert asdict(first) == asdict(second)
    other = simulate(Listed(workload(2)), replace(config, seed=5))
    assert (asdict(other)["requests"] == asdict(first)["requests"]) is (noise == 0.0)


def test_reports_do_not_change_when_tokens_are_sampled() -> None:
    rows = workload(3, rate_rps=6.0)
    _, seldom = run(rows, cluster(policy="round-robin", report_s=0.25))
    _, always = run(rows, cluster(policy="round-robin", report_s=0.0))
    for one, other in zip(seldom, always, strict=True):
        assert (one.ttft_s, one.tpot_s) == (pytest.approx(other.ttft_s), pytest.approx(other.tpot_s))


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("at_s", slow_except([0.31, 1.7, 3.05], 1.7))
def test_a_workers_death_loses_no_request(victim: str, at_s: float) -> None:
    death = WorkerFault(at_s=at_s, worker_id=victim, kind=WorkerFaultKind.DIE, for_s=2.0)
    world, rows = run(workload(4, rate_rps=30.0), cluster(2, 2, faults=(death,)))
    assert [row.tokens for row in rows] == [row.output_tokens for row in rows]
    assert {row.outcome for row in rows} == {"served"}
    assert max(row.attempts for row in rows) > 1
    assert world.stations[victim].num_lives == 2


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_routers_death_loses_no_request(num_routers: int) -> None:
    config = cluster(2, 2, num_routers=num_routers)
    world = World(Listed(workload(4, rate_rps=30.0)), config)
    world.agenda.at(1.7, world.kill_router, 0)
    rows = world.run().requests
    assert [row.tokens for row in rows] == [row.output_tokens for row in rows]
    assert {row.outcome for row in rows} == {"served"}
    assert 0 not in world.routers
    assert len(world.routers) == num_routers
    assert world.fronts[world.routers[-1]].state.counters["outcome_served"] > 0
    assert totals(world, "decode_tokens") < 1.5 * sum(row.output_tokens for row in rows), "most tokens are made once"


@pytest.mark.parametrize("policy", ["least-ttft", "goodput"])
def test_long_answers_leave_a_drained_worker(policy: str) -> None:
    """Each answer takes more than 20 s; the worker is idle soon after its drain."""
    drain = WorkerFault(at_s=2.0, worker_id="d0", kind=WorkerFaultKind.DRAIN)
    world, rows = run(
        [asked(0.1 * i, 400, 2000) for i in range(6)], cluster(2, 2, policy=policy, num_routers=2, faults=(drain,))
    )
    assert {(row.outcome, row.tokens) for row in rows} == {("served", 2000)}
    assert {row.decode_worker for row in rows} == {"d1"}
    busy_s = {one.worker_id: one.busy_s for one in world.result().workers}
    assert 1.0 < busy_s["d0"] < 4.0
    assert world.result().counters["migrated"] == sum(row.attempts - 1 for row in rows) > 0


def test_all_answers_end_while_workers_drain_in_turn() -> None:
    drains = tuple(
        WorkerFault(at_s=0.5 + 0.7 * i, worker_id=f"d{i % 3}", kind=WorkerFaultKind.DRAIN, for_s=0.9) for i in range(9)
    )
    world, rows = run(workload(8, rate_rps=30.0), cluster(2, 3, faults=drains))
    assert [row.tokens for row in rows] == [row.output_tokens for row in rows]
    assert {row.outcome for row in rows} == {"served"}
    counters = world.result().counters
    assert counters["migrated"] > counters["migrated_with_kv"] > 0, "some are sent, others are faster to compute again"


def test_a_drain_ends_sooner_if_kv_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefill worker computes one answer at a time, and new prompts go first."""
    drain = WorkerFault(at_s=8.0, worker_id="d0", kind=WorkerFaultKind.DRAIN)
    config = cluster(1, 2, policy="round-robin", faults=(drain,))
    link = NetworkLink(latency_s=1e-3, bytes_per_s=1e10)
    config = replace(config, workers=tuple(replace(one, link=link) for one in config.workers))
    rows = [asked(0.5 * i, 3000, 1500) for i in range(12)] + [asked(7.9 + 0.5 * i, 3000, 2) for i in range(8)]

    def drained_s(sends_kv: bool) -> float:
        hello = Machine.hello
        monkeypatch.setattr(Machine, "hello", lambda self: replace(hello(self), sends_kv=sends_kv))
        world = World(Listed(rows), config)
        world.start()
        found = None
        while world.step():
            machine = world.stations["d0"].machine
            assert machine is not None
            if found is None and machine.scheduler.is_draining and machine.is_idle:
                found = world.agenda.now_s - drain.at_s
        assert {row.outcome for row in world.result().requests} == {"served"}
        assert (world.result().counters.get("migrated_with_kv", 0) > 0) is sends_kv
        assert found is not None
        return found

    sent_s, computed_s = drained_s(True), drained_s(False)
    assert sent_s < 0.7 * computed_s


def test_the_cluster_continues_without_a_dead_worker() -> None:
    deaths = tuple(WorkerFault(at_s=1.0, worker_id=name, kind=WorkerFaultKind.DIE) for name in ("p0", "p1", "d1"))
    _, rows = run(workload(5, rate_rps=4.0), cluster(2, 2, faults=deaths))
    assert {row.outcome for row in rows} == {"served"}


def test_without_decode_workers_requests_end_with_an_error() -> None:
    death = WorkerFault(at_s=1.0, worker_id="d0", kind=WorkerFaultKind.DIE)
    _, rows = run(workload(6), cluster(faults=(death,)))
    assert {row.outcome for row in rows} <= {"served", "failed", "rejected"}
    assert any(row.outcome != "served" for row in rows)


@pytest.mark.parametrize("policy", ["least-ttft", "goodput"])
def test_four_routers_with_stale_views_never_over_admit(policy: str) -> None:
    config = cluster(2, 2, policy=policy, num_routers=4)
    small = tuple(replace(one, kv_capacity_tokens=16 * 512, inbox_depth=3) for one in config.workers)
    world = World(Listed(workload(7, rate_rps=40.0)), replace(config, workers=small))
    world.start()
    steps = 0
    while world.step():
        steps += 1
        if steps % 50 == 0:
            for machine in world.machines():
                machine.scheduler.check()  # The held blocks never exceed the pool.
    result = world.result()
    world.check()
    told = sum(one.tokens for one in result.requests if one.outcome in ("served", "late"))
    assert told == sum(one.output_tokens for one in result.requests if one.outcome in ("served", "late"))
    assert any(name.startswith("refused_") for name in result.counters), "the workers have said no"
    assert all(machine.is_idle for machine in world.machines())


def test_waits_of_a_single_server_match_theory() -> None:
    """Each wait follows Lindley's recursion, whose mean is that of M/D/1: rate * service^2 / (2 * (1 - load))."""
    rng, now_s, rows, waits, wait_s = random.Random(1), 0.0, [], [], 0.0
    service_s = 0.01 + 1e-4 * 400
    load = 0.6
    for _ in range(4000):
        gap_s = rng.expovariate(load / service_s)
        now_s += gap_s
        rows.append(asked(now_s, 400, 1))
        wait_s = max(0.0, wait_s + service_s - gap_s) if waits else 0.0
        waits.append(wait_s)
    config = cluster(0, policy="colocated")
    alone = replace(config.workers[0], max_batch_tokens=400, inbox_depth=10_000)
    _, done = run(rows[:1000], replace(config, workers=(alone,)))
    assert [row.ttft_s for row in done] == pytest.approx([one + service_s + 2 * MESSAGE_S for one in waits[:1000]])
    assert sum(waits) / len(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)


def test_disconnects_and_deadlines_free_everything() -> None:
    rows = [replace(one, cancel_after_s=0.3 if i % 3 == 0 else None) for i, one in enumerate(workload(9))]
    _, done = run(rows, cluster(1, 1, deadline_s=1.5))
    outcomes = {row.outcome for row in done}
    assert {"cancelled", "expired", "served"} <= outcomes <= {"cancelled", "expired", "served", "rejected"}
    for row in done:
        if row.outcome == "cancelled":
            assert row.ended_s == pytest.approx(row.arrival_s + 0.3)
        if row.outcome == "expired":
            assert row.ended_s == pytest.approx(row.arrival_s + 1.5, abs=2e-3)


def test_a_busy_workers_prefix_is_pulled_over_a_fast_link() -> None:
    """`run` checks that all blocks return. The first worker has the prefix, and computes a longer text. Routers learn
    the speed of a link by its use, so over a slow one they try it once, and the worker gives up in time."""
    config = cluster(0, 2, policy="goodput")
    prefix = tuple(range(8))
    rows = [
        asked(0.0, 4100, 2, block_ids=(*prefix, 100)),
        asked(10.0, 20_480, 2, block_ids=(*prefix, *range(200, 232))),
        asked(10.1, 4100, 2, block_ids=(*prefix, 101)),
    ]

    def last(pulls_kv: bool, bytes_per_s: float) -> tuple[RequestRow, dict[str, int]]:
        link = NetworkLink(latency_s=1e-3, bytes_per_s=bytes_per_s)
        workers = tuple(replace(one, link=link, pulls_kv=pulls_kv, kv_bytes_per_token=16_384) for one in config.workers)
        world, done = run(rows, replace(config, workers=workers), block_tokens=512)
        assert [row.outcome for row in done] == ["served"] * 3
        return done[-1], world.result().counters

    off, counters = last(False, 1e10)
    assert (off.pulled_tokens, "pulls" in counters, "failed_pulls" in counters) == (0, False, False)
    fast, counters = last(True, 1e10)
    assert (fast.pulled_tokens, fast.cached_tokens, counters["pulls"]) == (4096, 4096, 1)
    assert fast.decode_worker == off.decode_worker
    assert (fast.ttft_s or 0.0) < 0.3 * (off.ttft_s or 0.0)
    slow, counters = last(True, 1e8)
    assert (slow.pulled_tokens, slow.cached_tokens, counters["failed_pulls"]) == (0, 0, 1)
    assert (slow.ttft_s or 0.0) < 2.1 * (off.ttft_s or 0.0)


def test_exhausted_memory_preempts_without_loss() -> None:
    config = cluster(0, policy="colocated")
    tight = replace(config.workers[0], kv_capacity_tokens=8 * 64, max_context_tokens=400)
    rows = [asked(0.01 * i, 60, 200) for i in range(6)]
    world, done = run(rows, replace(config, workers=(tight,), block_size=64))
    assert [row.tokens for row in done] == [200] * 6
    assert sum(row.preemptions for row in done) == totals(world, "preemptions") > 0
    assert [row.attempts for row in done] == [1] * 6
    assert world.network.is_quiet


def test_all_faults_at_once() -> None:
    faults = (
        WorkerFault(at_s=1.0, worker_id="p0", kind=WorkerFaultKind.DIE, for_s=1.0),
        WorkerFault(at_s=1.5, worker_id="d1", kind=WorkerFaultKind.STALL, for_s=0.5),
        WorkerFault(at_s=2.0, worker_id="d0", kind=WorkerFaultKind.SLOW, for_s=2.0, factor=4.0),
        WorkerFault(at_s=2.5, worker_id="d1", kind=WorkerFaultKind.DIE, for_s=0.5),
        WorkerFault(at_s=3.0, worker_id="p1", kind=WorkerFaultKind.STALL, for_s=1.0),
        WorkerFault(at_s=3.3, worker_id="p1", kind=WorkerFaultKind.DIE, for_s=0.2),
        WorkerFault(at_s=3.5, worker_id="d0", kind=WorkerFaultKind.DRAIN, for_s=1.0),
    )
    for seed in range(2):
        rows = [replace(one, cancel_after_s=0.5 if i % 7 == 0 else None) for i, one in enumerate(workload(seed, 200))]
        config = cluster(2, 2, num_routers=3, noise=0.1, deadline_s=8.0, seed=seed, faults=faults)
        tight = tuple(replace(one, kv_capacity_tokens=40 * 512) for one in config.workers)
        _, done = run(rows, replace(config, workers=tight))
        assert "unfinished" not in {row.outcome for row in done}
        assert all(row.tokens == row.output_tokens for row in done if row.outcome in ("served", "late"))


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([asked(1.0, 1, 1), asked(0.5, 1, 1)], "trace[1].arrival_s"),
        ([asked(-1.0, 1, 1)], "trace[0].arrival_s"),
        ([asked(float("nan"), 1, 1)], "trace[0].arrival_s"),
        ([asked(0.0, 0, 1)], "trace[0].prompt_tokens"),
        ([asked(0.0, 1, 0)], "trace[0].output_tokens"),
        ([asked(0.0, 1, 1, cancel_after_s=-1.0)], "trace[0].cancel_after_s"),
        ([asked(0.0, 1, 1, block_ids=(1,))], "trace[0].block_ids"),
    ],
)
def test_an_impossible_trace_row_is_named(rows: list[TraceRequest], field: str) -> None:
    with pytest.raises(ConfigError, match="trace") as raised:
        simulate(Listed(rows), cluster())
    assert raised.value.field == field


def test_an_impossible_config_is_named() -> None:
    with pytest.raises(ConfigError, match="decode"):
        SimConfig(workers=cluster().workers[:1], slo=EASY)
    with pytest.raises(ConfigError, match="block_size"):
        simulate(Listed([], block_tokens=512), cluster(block_size=300))
    lost = WorkerFault(at_s=0.0, worker_id="d7", kind=WorkerFaultKind.DIE)
    with pytest.raises(ConfigError, match="d7"):
        simulate(Listed([]), cluster(faults=(lost,)))
    with pytest.raises(ConfigError, match="one of"):
        simulate(Listed([]), cluster(policy="nonesuch"))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: NetworkLink(bytes_per_s=0.0), "link.bytes_per_s"),
        (lambda: NetworkLink(latency_s=-1.0), "link.latency_s"),
        (lambda: replace(cluster().workers[0], slowness=0.0), "p0.slowness"),
        (lambda: replace(cluster().workers[1], max_batch=0), "d0.max_batch"),
        (lambda: replace(cluster(), block_size=10**6), "p0.kv_capacity_tokens"),
        (lambda: cluster(deadline_s=0.0), "deadline_s"),
        (lambda: cluster(noise=-0.1), "noise"),
        (lambda: WorkerFault(at_s=-1.0, worker_id="d0", kind=WorkerFaultKind.DIE), "fault.at_s"),
        (lambda: WorkerFault(at_s=0.0, worker_id="d0", kind=WorkerFaultKind.SLOW, factor=0.0), "fault.factor"),
    ],
)
def test_an_impossible_worker_is_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.field == field


def test_an_oversized_prompt_is_rejected_at_once() -> None:
    _, [large, small] = run([asked(0.0, 10**6, 5), asked(0.0, 100, 5)], cluster())
    assert (large.outcome, large.ended_s, small.outcome) == ("failed", 0.0, "served")


def test_an_empty_trace_is_an_empty_run() -> None:
    result = simulate(Listed([]), cluster())
    assert (result.requests, result.attainment, result.span_s) == ([], 0.0, 0.0)


def test_rows_can_be_streamed_and_a_run_stopped() -> None:
    seen: list[RequestRow] = []

    def watch(row: RequestRow) -> bool:
        seen.append(row)
        return len(seen) < 10

    result = simulate(Listed(workload(11)), cluster(), watch, keeps_rows=False)
    assert (len(seen), result.requests) == (10, [])
    assert all(row.ended_s is not None and row.outcome == "served" for row in seen)


def test_a_router_does_not_know_the_length_of_answers() -> None:
    rows = [asked(0.0, 10, 7), asked(1.0, 10, 30, max_tokens=64), asked(2.0, 10, 9000)]
    world = World(Listed(rows), cluster())
    state, allowed = world.fronts[0].state, []
    handle = state.handle

    def listened(event: Any, now_s: float) -> Any:
        if isinstance(event, RequestArrived):
            allowed.append(event.sampling.max_tokens)
        return handle(event, now_s)

    state.handle = listened  # type: ignore[method-assign]
    result = world.run()
    assert allowed == [4096, 64, 12288]
    assert [row.tokens for row in result.requests] == [7, 30, 9000]

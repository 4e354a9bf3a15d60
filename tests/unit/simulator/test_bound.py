"""The bound is never below what a policy achieves, and exact where the optimum can be enumerated."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.config import POLICIES
from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Slo
from simulator.cluster.world import simulate
from simulator.model import SimConfig, TraceRequest, WorkerFault, WorkerFaultKind
from simulator.search.bound import Bound, DeadlineJob, PeriodDemand, late_in_periods, most_in_time, upper_bound
from tests.unit.simulator.small import COST, MESSAGE_S, Listed, asked, cluster

BLOCK = 64
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
READING = CostPrior(
    prefill_base_s=1e-3,
    prefill_per_token_s=2e-5,
    prefill_per_token_context_s=1e-8,
    decode_base_s=8e-3,
    decode_per_row_s=5e-4,
    decode_per_context_token_s=4e-6,
)
COMPUTING = replace(READING, prefill_per_token_s=3e-4, decode_base_s=2e-3, decode_per_row_s=1e-4)


@st.composite
def traces(draw: Any) -> Listed:
    now_s, rows = 0.0, []
    for number in range(draw(st.integers(1, 24))):
        now_s += draw(st.sampled_from([0.0, 0.0, 0.01, 0.03, 0.2]))
        prompt = draw(st.sampled_from([1, 40, 64, 100, 300, 900]))
        family, shared = draw(st.integers(0, 2)), draw(st.integers(0, 8))
        ids = [10 * family + at if at < shared else 1000 * (number + 1) + at for at in range(prompt // BLOCK)]
        slo = draw(st.sampled_from([None, None, Slo(ttft_s=0.3, tpot_s=0.015)]))
        rows.append(asked(now_s, prompt, draw(st.sampled_from([1, 2, 5, 40])), block_ids=tuple(ids), slo=slo))
    return Listed(rows, block_tokens=BLOCK)


@st.composite
def faults(draw: Any, names: list[str]) -> WorkerFault:
    return WorkerFault(
        at_s=draw(st.sampled_from([0.0, 0.05, 0.2])),
        worker_id=draw(st.sampled_from(names)),
        kind=draw(st.sampled_from(WorkerFaultKind)),
        for_s=draw(st.sampled_from([0.02, 0.3, 5.0])),
        factor=draw(st.sampled_from([0.5, 3.0])),
    )


@st.composite
def clusters(draw: Any, **more: Any) -> SimConfig:
    config = cluster(
        draw(st.integers(0, 2)),
        draw(st.integers(1, 2)),
        policy=draw(st.sampled_from(POLICIES)),
        noise=draw(st.sampled_from([0.0, 0.0, 0.1])),
        slo=Slo(ttft_s=draw(st.sampled_from([0.02, 0.1, 0.5])), tpot_s=draw(st.sampled_from([0.009, 0.012, 0.05]))),
        block_size=draw(st.sampled_from([16, 64])),
        **more,
    )
    workers = tuple(
        replace(
            one,
            cost=draw(st.sampled_from([COST, READING, COMPUTING])),
            slowness=draw(st.sampled_from([1.0, 1.0, 1.5])),
            kv_capacity_tokens=draw(st.sampled_from([1024, 4096, 400_000])),
            max_batch=draw(st.sampled_from([3, 256])),
            max_batch_tokens=draw(st.sampled_from([64, 2048])),
        )
        for one in config.workers
    )
    found = draw(st.lists(faults([one.worker_id for one in workers]), max_size=3))
    return replace(config, workers=workers, faults=tuple(found))


def met(trace: Listed, config: SimConfig) -> int:
    return sum(row.has_met_slo for row in simulate(trace, config).requests)


@FEW
@given(traces(), clusters())
def test_no_policy_exceeds_it(trace: Listed, config: SimConfig) -> None:
    assert met(trace, config) <= upper_bound(trace, config).most


@FEW
@given(traces(), clusters())
def test_more_capacity_never_lowers_it(trace: Listed, config: SimConfig) -> None:
    calm = replace(config, faults=())
    less = upper_bound(trace, calm).most
    more = [replace(one, slowness=one.slowness / 2) for one in calm.workers]
    assert upper_bound(trace, replace(calm, workers=tuple(more))).most >= less
    added = replace(calm.workers[-1], worker_id="more")
    assert upper_bound(trace, replace(calm, workers=(*calm.workers, added))).most >= less


@FEW
@given(traces(), clusters(), st.sampled_from([1.0, 1.3, 4.0]), st.sampled_from([1.0, 1.3, 4.0]))
def test_looser_targets_never_lower_it(trace: Listed, config: SimConfig, ttft: float, tpot: float) -> None:
    same = Listed([replace(one, slo=None) for one in trace.rows], block_tokens=BLOCK)
    loose = Slo(ttft_s=ttft * config.slo.ttft_s, tpot_s=tpot * config.slo.tpot_s)
    assert upper_bound(same, replace(config, slo=loose)).most >= upper_bound(same, config).most


@FEW
@given(traces(), clusters())
def test_a_lost_worker_never_raises_it(trace: Listed, config: SimConfig) -> None:
    loss = WorkerFault(at_s=0.1, worker_id="d0", kind=WorkerFaultKind.DIE)
    worse, later = (replace(config, faults=(*config.faults, one)) for one in (loss, replace(loss, at_s=1e6)))
    assert upper_bound(trace, worse).most <= upper_bound(trace, later).most


def best_order(jobs: list[DeadlineJob]) -> int:
    """The best number of jobs in time over all orders. Late jobs are skipped."""
    best = 0
    for order in permutations(jobs):
        now, count = 0.0, 0
        for one in order:
            end = max(now, one.release) + one.work
            if end <= one.deadline:
                now, count = end, count + 1
        best = max(best, count)
    return best


@FEW
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), max_size=6), st.integers(3, 12))
def test_the_best_order_of_agreeable_jobs(pairs: list[tuple[int, int]], time: int) -> None:
    jobs = [DeadlineJob(float(release), float(release + time), float(work)) for release, work in pairs]
    assert most_in_time(jobs) == best_order(jobs)


@FEW
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9), st.integers(1, 6)), max_size=6))
def test_no_order_beats_the_relaxations(jobs: list[tuple[int, int, int]]) -> None:
    asked_for = [DeadlineJob(float(release), float(release + time), float(work)) for release, time, work in jobs]
    best = best_order(asked_for)
    demands = [PeriodDemand(one.release, one.deadline, one.deadline, one.work, 0.0) for one in asked_for]
    edges = [0.0, 2.0, 4.0, 8.0, 20.0]
    assert best <= most_in_time(asked_for)
    assert best <= len(jobs) - late_in_periods(edges, [(demands, lambda at_s: at_s)])


def alone(**more: Any) -> SimConfig:
    """One worker that prefills 1000 tokens in 0.11 s."""
    config = cluster(0, 1, policy="colocated", **more)
    return replace(config, workers=tuple(replace(one, max_batch_tokens=10_000) for one in config.workers))


def test_prompts_of_one_worker() -> None:
    """Two of five prompts of 0.1 s fit into 0.25 s. The best order takes those that arrived last."""
    config = alone(slo=Slo(ttft_s=0.25, tpot_s=1.0))
    trace = Listed([asked(0.0, 1000, 1) for _ in range(5)])
    assert upper_bound(trace, config) == Bound(requests=5, alone=5, deadlines=2, periods=2)
    assert met(trace, config) <= 2


def test_requests_that_are_too_large_or_too_slow_are_not_counted() -> None:
    config = alone(slo=Slo(ttft_s=0.25, tpot_s=0.0112))
    shared = [asked(0.1 * at, 4096, 1, block_ids=(1, 2, 3, 4, 5, 6, 7, 7 + at)) for at in range(2)]
    trace = Listed([asked(0.0, 10**6, 1), asked(0.0, 3000, 1), asked(0.0, 500, 9), asked(0.0, 100, 9), *shared])
    trace.block_tokens = 512
    bound = upper_bound(trace, config)
    assert (bound.requests, bound.alone) == (6, 2), "the prompt of 100 tokens, and the one with a cached prefix"


def test_rows_that_fit_into_a_step() -> None:
    """A row takes 1 ms in addition to 10 ms, and 20 ms are allowed: ten answers at a time, of 0.4 s each."""
    cost = replace(COST, prefill_base_s=0.0, prefill_per_token_s=0.0, decode_per_context_token_s=0.0)
    config = alone(slo=Slo(ttft_s=0.1, tpot_s=0.02))
    config = replace(config, workers=tuple(replace(one, cost=cost) for one in config.workers))
    trace = Listed([asked(0.0, 1, 21) for _ in range(40)])
    bound = upper_bound(trace, config)
    assert met(trace, config) <= bound.most < 13, "ten, and what the time before the first tokens is worth"
    narrow = replace(config, workers=tuple(replace(one, max_batch=2) for one in config.workers))
    assert upper_bound(trace, narrow).most == 4, "0.5 s for steps of 12 ms with two rows, 20 rows each"


@pytest.mark.parametrize("limit", ["rows", "tpot", "memory"])
def test_a_full_worker_reaches_it(limit: str) -> None:
    """Eight answers at a time, of 20 steps of 18 ms, and a step of 10 ms for their prompts, for 3.6 s."""
    cost = replace(COST, prefill_base_s=0.0, prefill_per_token_s=0.0, decode_per_context_token_s=0.0)
    config = alone(slo=Slo(ttft_s=3.61, tpot_s=0.01801 if limit == "tpot" else 0.02), block_size=1)
    full = tuple(replace(one, cost=cost, max_batch=8, inbox_depth=500) for one in config.workers)
    trace = Listed([asked(0.0, 1 if limit != "memory" else 400, 21) for _ in range(200)])
    served = met(trace, replace(config, workers=full))
    only = {"rows": {"max_batch": 8}, "tpot": {}, "memory": {"kv_capacity_tokens": 8 * 421}}[limit]
    limited = tuple(replace(one, cost=cost, **only) for one in config.workers)
    most = upper_bound(trace, replace(config, workers=limited)).most
    assert 80 <= served <= most <= 90


def test_memory_for_answers() -> None:
    cost = replace(COST, prefill_base_s=0.0, prefill_per_token_s=0.0, decode_per_context_token_s=0.0)
    config = alone(slo=Slo(ttft_s=0.1, tpot_s=0.02), block_size=16)
    small = tuple(replace(one, cost=cost, kv_capacity_tokens=1024) for one in config.workers)
    config = replace(config, workers=small)
    large = Listed([asked(0.0, 500, 13) for _ in range(20)])
    assert met(large, config) <= upper_bound(large, config).most <= 5
    shared = Listed([asked(0.0, 512, 13, block_ids=(1,)) for _ in range(20)], block_tokens=512)
    assert met(shared, config) <= upper_bound(shared, config).most
    assert upper_bound(shared, config).most > 5, "they share the memory of the prompt"


@pytest.mark.parametrize("kind", [WorkerFaultKind.DIE, WorkerFaultKind.SLOW, WorkerFaultKind.STALL])
def test_a_faulty_worker_computes_less(kind: WorkerFaultKind) -> None:
    config = alone(slo=Slo(ttft_s=1.05, tpot_s=1.0))
    trace = Listed([asked(0.0, 1000, 1) for _ in range(20)])
    whole = upper_bound(trace, config).most
    trouble = WorkerFault(at_s=0.1, worker_id="d0", kind=kind, for_s=0.9, factor=9.0)
    assert met(trace, replace(config, faults=(trouble,))) <= upper_bound(trace, replace(config, faults=(trouble,))).most
    long = WorkerFault(at_s=0.0, worker_id="d0", kind=kind, for_s=10.0, factor=50.0)
    slow = replace(config, slo=Slo(ttft_s=8.0, tpot_s=1.0), faults=(long,))
    many = Listed([asked(0.0, 1000, 1) for _ in range(100)])
    assert upper_bound(many, slow).most < upper_bound(many, replace(slow, faults=())).most
    assert whole == 10


def test_an_empty_trace_has_no_bound_to_miss() -> None:
    bound = upper_bound(Listed([]), cluster())
    assert (bound.most, bound.share(0)) == (0, 1.0)


def test_messages_take_a_part_of_the_target() -> None:
    config = alone(slo=Slo(ttft_s=0.01 + 2 * MESSAGE_S, tpot_s=1.0))
    late = replace(config, slo=Slo(ttft_s=0.0095 + 2 * MESSAGE_S, tpot_s=1.0))
    trace: list[TraceRequest] = [asked(0.0, 1, 1)]
    assert [upper_bound(Listed(trace), one).most for one in (config, late)] == [1, 0]

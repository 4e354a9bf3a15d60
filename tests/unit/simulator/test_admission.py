"""Admission control in simulated clusters that are as hard to predict as live ones.

In the first, steps vary as on a busy machine: the cost model's error is over half of the predicted TTFT. In the second,
steps are exact, but a batch takes a quarter of the TTFT target and decode workers are full, so requests start in waves,
when answers end.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdserve.core.cost.latency import CostPrior
from pdserve.core.results import nearest_rank
from pdserve.core.types import Role, Slo
from router.state.interface import RouterSettings
from simulator.cluster.world import World
from simulator.model import RequestRow, SimConfig, SimResult, WorkerShape
from simulator.traces.workloads import Poisson

NOISE = 0.3  # Relative standard deviation: it gives error bands of 0.6, twice as much.
WARM_S, END_S = 8.0, 14.0
OVERLOAD_RPS, LIGHT_RPS = 150.0, 25.0  # The cluster serves 37 requests/s of this mix.
SLOW_WARM_S, SLOW_END_S = 14.0, 30.0
COST = CostPrior(
    prefill_base_s=4e-3,
    prefill_per_token_s=1e-4,
    prefill_per_token_context_s=1e-8,
    decode_base_s=6e-3,
    decode_per_row_s=2e-4,
    decode_per_context_token_s=1e-6,
)


def prompts(rng: random.Random) -> int:
    return rng.randint(400, 1000) if rng.random() < 0.25 else rng.randint(24, 160)


def one_and_one(cost: CostPrior, *, kv_capacity_tokens: int, max_context_tokens: int) -> tuple[WorkerShape, ...]:
    """A prefill and a decode worker."""
    return tuple(
        WorkerShape(
            worker_id=name,
            role=role,
            cost=cost,
            kv_capacity_tokens=kv_capacity_tokens,
            kv_bytes_per_token=2048,
            max_batch_tokens=512,
            max_context_tokens=max_context_tokens,
        )
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
    )


def config_of(workers: tuple[WorkerShape, ...], **more: Any) -> SimConfig:
    return SimConfig(
        workers=workers,
        slo=Slo(ttft_s=1.0, tpot_s=0.15),
        router=RouterSettings(policy="goodput", is_strict=True),
        block_size=16,
        message_s=1e-3,
        **more,
    )


def world_at(rate_rps: float, seed: int = 0) -> World:
    workers = one_and_one(COST, kv_capacity_tokens=60_000, max_context_tokens=2048)
    trace = Poisson(
        rate_rps=rate_rps,
        duration_s=END_S,
        seed=seed,
        prompts=prompts,
        outputs=lambda rng: rng.randint(16, 64),
        block_tokens=16,
    )
    return World(trace, config_of(workers, noise=NOISE, max_tokens=64))


def measured(result: SimResult) -> list[RequestRow]:
    return [row for row in result.requests if row.arrival_s >= WARM_S]


@pytest.fixture(scope="module")
def overloaded() -> World:
    world = world_at(OVERLOAD_RPS)
    world.run()
    return world


def rejected_after_s(rows: list[RequestRow]) -> list[float]:
    """Sorted."""
    gone = [row for row in rows if row.outcome == "rejected"]
    assert all(row.retry_after_s is not None for row in gone)
    return sorted(row.ended_s - row.arrival_s for row in gone if row.ended_s is not None)


def test_the_simulated_model_error_matches_live_clusters(overloaded: World) -> None:
    views = overloaded.fronts[0].state._cluster.fleet.workers.values()
    assert min(view.cost.prefill_error for view in views) > 0.25


def test_an_uncertain_model_rejects_within_milliseconds(overloaded: World) -> None:
    waits_s = rejected_after_s(measured(overloaded.result()))
    assert len(waits_s) > 300
    assert nearest_rank(waits_s, 0.5) <= 0.02
    # Those that waited gave way to shorter ones.
    assert nearest_rank(waits_s, 0.95) <= 1.0, "before their target"


def test_an_uncertain_model_keeps_the_capacity(overloaded: World) -> None:
    rows = measured(overloaded.result())
    assert sum(row.has_met_slo for row in rows) / (END_S - WARM_S) > 37.0
    assert sum(row.outcome == "late" for row in rows) <= 0.02 * len(rows)


def test_an_uncertain_model_rejects_nothing_below_capacity() -> None:
    result = world_at(LIGHT_RPS).run()
    assert [row for row in result.requests if row.outcome == "rejected"] == []


def slow_world(rate_rps: float, seed: int = 0) -> World:
    """1+1 workers like a live cluster of two cores, where a prompt of 1,000 tokens takes half of its target TTFT."""
    cost = CostPrior(
        prefill_base_s=5e-3,
        prefill_per_token_s=5e-4,
        prefill_per_token_context_s=1.2e-7,
        decode_base_s=8e-3,
        decode_per_row_s=1.2e-3,
        decode_per_context_token_s=1.5e-6,
    )
    workers = one_and_one(cost, kv_capacity_tokens=400_000, max_context_tokens=4096)
    trace = Poisson(
        rate_rps=rate_rps,
        duration_s=SLOW_END_S,
        prompts=lambda rng: rng.choice((40, 60, 90, 120, 160, 400, 700, 1000)),
        outputs=lambda rng: 40,
        block_tokens=16,
        seed=seed,
    )
    return World(trace, config_of(workers, report_s=0.0, max_tokens=40))


def slow_rows(rate_rps: float, seed: int = 0) -> list[RequestRow]:
    return [row for row in slow_world(rate_rps, seed).run().requests if row.arrival_s >= SLOW_WARM_S]


@pytest.mark.parametrize("rate_rps", [16.0, pytest.param(50.0, marks=pytest.mark.slow)])
def test_few_requests_are_late_if_they_start_in_waves(rate_rps: float) -> None:
    """Over several seeds, because one has only 0 to 4 late requests."""
    rows = [row for seed in range(6) for row in slow_rows(rate_rps, seed)]
    assert sum(row.outcome == "late" for row in rows) <= 0.01 * len(rows)


@pytest.mark.parametrize("rate_rps", [pytest.param(16.0, marks=pytest.mark.slow), 50.0])
def test_rejections_are_fast_if_requests_start_in_waves(rate_rps: float) -> None:
    """It serves 12 requests/s of this mix."""
    rows = slow_rows(rate_rps)
    assert sum(row.has_met_slo for row in rows) / (SLOW_END_S - SLOW_WARM_S) > 10.0
    waits_s = rejected_after_s(rows)
    assert len(waits_s) > 50
    assert nearest_rank(waits_s, 0.5) <= 0.2
    assert nearest_rank(waits_s, 0.95) <= 1.0, "before their target"

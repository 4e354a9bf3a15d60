"""Tiny plans, simulated: one that must disaggregate and one that must not."""

from __future__ import annotations

import random

from pdserve.core.cost.latency import CostPrior
from pdserve.core.cost.profile import Profile
from pdserve.core.types import Slo
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.model import TraceRequest
from simulator.search.goodput import TraceWindow
from simulator.search.plan import Plan, Question, demand, first_guess, measure, sweep

# A step has almost no base, so a prompt gains nothing by sharing a step with decode rows.
PROFILE = Profile(
    name="test",
    cost=CostPrior(
        prefill_base_s=1e-3,
        prefill_per_token_s=2e-5,
        prefill_per_token_context_s=0.0,
        decode_base_s=1e-3,
        decode_per_row_s=1e-4,
        decode_per_context_token_s=0.0,
    ),
    kv_bytes_per_token=65_536,
    kv_capacity_tokens=400_000,
    links={"fast": (2e-5, 3e11)},
)


def question(*, prompt: int, output: int, slo: Slo, count: int = 40, workers: int = 3) -> Question:
    rng, at_s, requests = random.Random(1), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(1.0)
        requests.append(TraceRequest(arrival_s=at_s, prompt_tokens=prompt, output_tokens=output))
    window = TraceWindow(name="poisson", block_tokens=0, requests=tuple(requests))
    return Question(
        windows=(window,),
        profile=PROFILE,
        num_workers=workers,
        slo=slo,
        router=RouterSettings(policy="round-robin"),  # It never prefills in a step with rows if that can be avoided.
        block_size=128,
        tolerance=0.06,
    )


def planned(asked: Question) -> Plan:
    return sweep(
        asked.num_workers,
        asked.splits,
        lambda splits, floor: [measure(asked, one, simulate, floor=floor) for one in splits],
    )


def test_long_prompts_with_a_tight_tpot_need_a_prefill_worker() -> None:
    # 600 tokens may take 0.9 s, and need 0.66 s alone. Each prompt that the worker prefills takes 0.08 s of the rest.
    plan = planned(question(prompt=4000, output=600, slo=Slo(ttft_s=0.3, tpot_s=0.0015)))
    assert plan.advice > 0
    assert plan.curve[plan.best].rate_rps > 1.2 * plan.curve[0].rate_rps


def test_short_prompts_with_a_loose_tpot_do_not() -> None:
    plan = planned(question(prompt=64, output=60, slo=Slo(ttft_s=0.3, tpot_s=0.05)))
    assert plan.advice == 0


def test_the_first_estimate_is_below_the_mean_demand() -> None:
    asked = question(prompt=4000, output=60, slo=Slo())
    needed = demand(asked)
    assert 0.08 < needed.prefill_s < 0.084  # Two chunks of 1 ms, and 4,000 tokens of 20 us.
    assert 0.006 < needed.decode_s < 0.007  # 60 rows of 0.1 ms, and a share of 1 ms per step.
    assert first_guess(asked) * asked.windows[0].rate_rps < 3 / (needed.prefill_s + needed.decode_s)

"""The comparison of layouts: on rates that are known, and on tiny simulated clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdserve.core.types import Slo
from simulator.cluster.world import simulate
from simulator.search.goodput import HighestRate, Probe
from simulator.search.layouts import Layout, all_layouts
from simulator.search.plan import LayoutPlan, compare, limiting_target, measure_layout, verdict
from tests.unit.simulator.test_plan import bound, worth
from tests.unit.simulator.test_plan_by_simulation import PROFILE, question

WHOLE = Layout(prefill_degree=1, decode_degree=1, prefill=0, decode=4)
APART = Layout(prefill_degree=2, decode_degree=1, prefill=1, decode=2)


def none() -> HighestRate:
    probe = Probe(scale=1.0, rate_rps=1.0, num_rows=10)
    probe.misses["rejected"] = 10
    return HighestRate(scale=0.0, rate_rps=0.0, held=None, missed=probe, probes=())


@pytest.mark.parametrize("best", range(18))
def test_the_best_of_each_family_is_found(best: int) -> None:
    layouts = all_layouts(6, [1, 2], [1, 2])
    middle = layouts[best % len(layouts)]

    def rate(layout: Layout) -> float:
        """A rate with one peak on each list of equal degrees."""
        own = 10.0 if layout == middle else 5.0
        return own - 0.1 * abs(layout.prefill - middle.prefill)

    def evaluate(asked: Sequence[Layout], floor: float) -> list[HighestRate]:
        return [worth(rate(one)) if rate(one) > floor else bound(floor, rate(one)) for one in asked]

    plan = compare(layouts, evaluate)
    assert plan.best(colocated=middle.is_colocated) == middle == plan.top
    other = [one for one in layouts if one.is_colocated is not middle.is_colocated]
    found = plan.best(colocated=not middle.is_colocated)
    assert found is not None
    assert plan.found[found].rate_rps == max(map(rate, other))


@pytest.mark.parametrize(("gain", "is_advised"), [(0.9, False), (1.02, False), (1.05, True)])
def test_disaggregation_must_gain_more_than_the_margin(gain: float, is_advised: bool) -> None:
    plan = LayoutPlan(found={WHOLE: worth(10.0), APART: worth(10.0 * gain)})
    assert plan.ratio == pytest.approx(gain)
    assert plan.disaggregates is is_advised


def test_the_verdict_is_one_sentence_with_the_limit_of_the_loser() -> None:
    plan = LayoutPlan(found={WHOLE: worth(10.0), APART: worth(15.0)})
    assert verdict(plan, {WHOLE: "tpot", APART: "ttft"}) == (
        "disaggregate: 1 x tp2 prefill + 2 x tp1 decode sustains at least 15 requests/s: so few requests never "
        "overload this cluster, 1.50 times the best colocated layout, 4 x tp1, which the TPOT target limits"
    )
    plan = LayoutPlan(found={WHOLE: worth(10.0), APART: worth(8.0)})
    assert verdict(plan, {WHOLE: "tpot", APART: "both"}).endswith(
        "the best disaggregated layout, 1 x tp2 prefill + 2 x tp1 decode, sustains 0.80 times that, and both targets "
        "limit it"
    )


def test_the_verdict_where_a_family_has_no_rate() -> None:
    assert verdict(LayoutPlan(found={WHOLE: none(), APART: worth(8.0)}), {}).endswith(
        "and no colocated layout meets these targets at any rate"
    )
    assert verdict(LayoutPlan(found={WHOLE: worth(8.0), APART: none()}), {}).endswith(
        "and 1 x tp2 prefill + 2 x tp1 decode meets these targets at no rate"
    )
    assert verdict(LayoutPlan(found={WHOLE: worth(8.0)}), {}).endswith("there is no disaggregated layout of these GPUs")
    unattainable = LayoutPlan(found={WHOLE: none(), APART: none()})
    assert not unattainable.is_attainable
    assert not unattainable.disaggregates
    assert verdict(unattainable, {}).startswith("not attainable")


PROFILES = {1: PROFILE, 2: replace(PROFILE, degree=2, kv_capacity_tokens=900_000)}


def test_long_prompts_with_a_tight_tpot_need_prefill_workers_of_any_degree() -> None:
    asked = question(prompt=4000, output=600, slo=Slo(ttft_s=0.3, tpot_s=0.0015), count=40)
    plan = compare(
        all_layouts(2, [1, 2], [1, 2]),
        lambda layouts, floor: [measure_layout(asked, one, PROFILES, simulate, floor) for one in layouts],
    )
    assert plan.top == Layout(prefill_degree=1, decode_degree=1, prefill=1, decode=1)
    assert plan.disaggregates
    colocated = plan.best(colocated=True)
    assert colocated is not None
    missed = plan.found[colocated].missed
    assert missed is not None
    assert limiting_target(asked, colocated, PROFILES, simulate, missed.scale) == "tpot"


def test_short_prompts_with_a_loose_tpot_need_no_prefill_worker() -> None:
    asked = question(prompt=64, output=60, slo=Slo(ttft_s=0.3, tpot_s=0.05), count=40)
    plan = compare(
        all_layouts(2, [1], [1]),
        lambda layouts, floor: [measure_layout(asked, one, PROFILES, simulate, floor) for one in layouts],
    )
    assert not plan.disaggregates

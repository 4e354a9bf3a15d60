"""Estimates for a request on an unloaded cluster."""

from __future__ import annotations

import random

import pytest

from pdserve.core.cost.latency import CostPrior
from router.policy.availability import unloaded_estimate
from router.state.load import TRUSTED_SAMPLES
from tests.unit.router.test_policy import ask, busy, view


def test_queues_and_running_rows_are_not_counted() -> None:
    one = unloaded_estimate(100, 256.0, {}, [busy(view("p0"), prefill_s=5.0)], [busy(view("d0"), rows=9)])
    assert one.ttft_s == pytest.approx(0.1)
    assert one.tpot_s == pytest.approx(0.011)


def test_the_longest_cached_prefix_counts() -> None:
    cached_tokens = {"p0": 16, "d0": 64}
    assert unloaded_estimate(100, 256.0, cached_tokens, [view("p0")], [view("d0")]).ttft_s == pytest.approx(0.036)


def test_work_is_the_prefill_and_the_share_of_the_decode_steps() -> None:
    assert unloaded_estimate(100, 50.0, {}, [], [view("d0")]).work_s == pytest.approx(0.1 + 50 * 1e-3)


def test_an_estimate_is_sure_only_after_samples() -> None:
    prefill = view("p0")
    first = unloaded_estimate(100, 256.0, {}, [prefill], [view("d0")])
    for _ in range(TRUSTED_SAMPLES):
        prefill.cost.observe(rows=0, prefill_tokens=90, prefill_token_context=0, context_tokens=0, step_s=0.09)
    then = unloaded_estimate(100, 256.0, {}, [prefill], [view("d0", cost=view("p0").hello.cost)])
    assert not first.is_sure
    assert then.is_sure
    assert then.band_s < first.band_s


def test_the_estimate_is_the_minimum_over_workers() -> None:
    dice = random.Random(5)
    for _ in range(200):
        views = [
            view(
                f"w{i}",
                cost=CostPrior(
                    prefill_base_s=dice.uniform(0.0, 0.02),
                    prefill_per_token_s=dice.uniform(0.0, 2e-4),
                    prefill_per_token_context_s=dice.uniform(0.0, 1e-7),
                    decode_base_s=dice.uniform(0.0, 0.02),
                ),
            )
            for i in range(6)
        ]
        tokens = dice.randint(1, 20_000)
        request = ask(tokens, cached_tokens={f"w{dice.randint(0, 5)}": dice.randint(0, 25_000)})
        seen = unloaded_estimate(tokens, 256.0, request.cached_tokens, views[:3], views[3:])
        times_s = [one.prefill_s(tokens - request.cached_on(one), request.cached_on(one)) for one in views]
        assert seen.ttft_s == min(times_s)
        assert seen.tpot_s == min(one.cost.decode_s(1, tokens) for one in views[3:])

"""Figures of a benchmark, by known answers, and against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies

from simulator.bench.server import BenchOutcome
from simulator.bench.statistics import SHARES, compare_turns, distribution, summarise_bench
from tests.unit.bench.given import SLO, answer, turn


def test_times_of_one_request() -> None:
    one = answer(sent_s=2.0, chunks_s=[0.5, 0.6, 0.9], output_tokens=5)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2el_s == pytest.approx(0.9)
    assert one.tpot_s == pytest.approx(0.4 / 4)
    assert one.itl_s == pytest.approx([0.1, 0.3])


def test_a_single_token_has_no_tpot() -> None:
    one = answer(chunks_s=[0.5])
    assert one.tpot_s is None
    assert one.has_met(SLO)


@pytest.mark.parametrize(
    ("chunks_s", "expected"),
    [([1.0, 1.09], True), ([1.01, 1.02], False), ([0.5, 0.61], False), ([], False)],
)
def test_goodput_needs_both_targets(chunks_s: list[float], expected: bool) -> None:
    assert answer(chunks_s=chunks_s).has_met(SLO) is expected


@given(strategies.lists(strategies.floats(0.0, 1e6), min_size=1, max_size=60))
def test_a_distribution_matches_numpy(values: list[float]) -> None:
    found = distribution(values)
    assert found.of == len(values)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert found.std == pytest.approx(np.std(values), rel=1e-6, abs=1e-6)
    assert found.shares == pytest.approx([np.percentile(values, 100 * share) for share in SHARES], rel=1e-9, abs=1e-9)


def test_a_summary_counts_every_outcome() -> None:
    found = summarise_bench(
        [
            turn(
                answer(0, chunks_s=[0.1, 0.2], output_tokens=6),
                answer(1, sent_s=0.1, chunks_s=[2.0, 2.1]),
                answer(2, sent_s=0.2, outcome=BenchOutcome.REJECTED, error="rejected"),
                answer(3, sent_s=0.3, error="timeout", detail="late"),
                answer(4, sent_s=0.4, outcome=BenchOutcome.INTERRUPTED),
                lasted_s=4.0,
            )
        ],
        SLO,
    )
    assert (found.requests, found.completed, found.rejected, found.failed) == (4, 2, 1, 1)
    assert (found.errors, found.details) == ({"timeout": 1}, {"timeout": "late"})
    assert (found.total_input_tokens, found.total_output_tokens) == (20, 8)
    assert (found.met, found.attainment) == (1, 0.25)
    assert found.rate(found.completed) == 0.5
    assert found.ttft_s.mean == pytest.approx(1.05)
    # 6 tokens in two parts and 2 in two parts: the first and the second part of the first request are in second 0.
    assert found.max_output_tokens_per_s == 6.0
    assert found.max_concurrent_requests == 2


def test_without_targets_there_is_no_goodput() -> None:
    found = summarise_bench([turn(answer(chunks_s=[0.1]))], None)
    assert (found.met, found.attainment) == (None, None)


def test_nothing_completed_gives_no_times() -> None:
    found = summarise_bench([turn(answer())], SLO)
    assert math.isnan(found.ttft_s.median)
    assert found.attainment == 0.0
    assert not found.is_generator_late


@pytest.mark.parametrize(
    ("lag_s", "delays_s", "ttft_s", "expected"),
    [(0.009, [0.0], 0.1, False), (0.02, [0.0], 0.1, True), (0.0, [0.02], 0.1, True), (0.02, [0.02], 1.0, False)],
)
def test_a_late_generator_is_named(lag_s: float, delays_s: list[float], ttft_s: float, expected: bool) -> None:
    one = answer(sent_s=1.0 + lag_s, due_s=1.0, chunks_s=[ttft_s])
    assert summarise_bench([turn(one, loop_delays_s=delays_s)], None).is_generator_late is expected


def test_ratios_have_one_value_per_pair_of_turns() -> None:
    def summary(ttft_s: float) -> object:
        return summarise_bench([turn(answer(chunks_s=[ttft_s, ttft_s + 0.1]), lasted_s=2.0)], None)

    pairs = [(summary(0.2), summary(0.1)), (summary(0.3), summary(0.1)), (summary(0.1), summary(0.1))]
    found = {one.metric.name: one for one in compare_turns(pairs)}  # type: ignore[arg-type]
    ttft = found["median_ttft_ms"]
    assert ttft.ratios == pytest.approx((2.0, 3.0, 1.0))
    assert (ttft.median, ttft.least, ttft.most) == pytest.approx((2.0, 1.0, 3.0))
    assert found["request_throughput"].ratios == pytest.approx((1.0, 1.0, 1.0))
    assert "request_goodput" not in found  # there are no targets

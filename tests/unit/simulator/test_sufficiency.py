"""When a run is long enough for a verdict on its rate."""

from __future__ import annotations

import random

import pytest

from simulator.search.goodput import ENOUGH, MARGIN, SPANS, TARGET, HighestRate, Probe, shortage, surely_misses


def test_enough_requests_bound_the_error_of_attainment() -> None:
    """By simulation: in 19 of 20 samples, the share is within the margin."""
    rng = random.Random(1)
    shares = [sum(rng.random() < TARGET for _ in range(ENOUGH)) / ENOUGH for _ in range(1000)]
    assert 0.92 < sum(abs(share - TARGET) <= MARGIN for share in shares) / len(shares) < 0.98


def test_the_required_number_of_requests_is_tight() -> None:
    for rate_rps, stay_s, slo_ttft_s, num_runs in ((10.0, 0.5, 1.0, 1), (7856.0, 0.2, 1.0, 1), (0.5, 30.0, 2.0, 4)):
        facts = {"rate_rps": rate_rps, "stay_s": stay_s, "slo_ttft_s": slo_ttft_s, "num_runs": num_runs}
        lack = shortage(requests=175, **facts)  # type: ignore[arg-type]
        assert lack is not None
        assert shortage(requests=lack.needed_requests, **facts) is None  # type: ignore[arg-type]
        assert shortage(requests=lack.needed_requests * 9 // 10, **facts) is not None  # type: ignore[arg-type]


def test_many_requests_in_a_moment_are_too_short() -> None:
    lack = shortage(requests=175, rate_rps=7856.0, stay_s=0.5, slo_ttft_s=1.0)
    assert lack is not None
    assert lack.needed_s == pytest.approx(SPANS)
    assert lack.needed_requests == 78_560
    assert "175 requests last 0.0223 s at 7.86e+03 requests/s" in lack.text


def test_long_requests_need_a_long_run() -> None:
    assert shortage(requests=1000, rate_rps=10.0, stay_s=9.0, slo_ttft_s=1.0) is None
    assert shortage(requests=1000, rate_rps=10.0, stay_s=11.0, slo_ttft_s=1.0) is not None


def test_few_requests_may_show_that_a_target_cannot_be_met() -> None:
    assert surely_misses(0, 40)
    assert not surely_misses(0, 0)
    assert not surely_misses(34, 40)
    assert surely_misses(340, 400)


def test_a_search_without_a_miss_is_judged_by_its_length() -> None:
    held = Probe(scale=64.0, rate_rps=7856.0, num_rows=175, num_met=175, stayed_s=87.5, num_ended=175)
    found = HighestRate(scale=64.0, rate_rps=7856.0, held=held, missed=None, probes=(held,))
    assert found.shortage(1.0) is not None


def test_a_bound_needs_no_length() -> None:
    missed = Probe(scale=1.0, rate_rps=10.0, num_rows=40, num_met=1)
    found = HighestRate(scale=0.0, rate_rps=0.0, held=None, missed=missed, probes=(missed,), is_bound=True)
    assert found.shortage(1.0) is None

"""Predictions of when waiting work starts: capacity, utilization and demand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.state.forecast import (
    BINS,
    FASTEST,
    HORIZON,
    MEMORY,
    MIN_REQUESTS,
    PRIOR_REQUESTS,
    SLOWEST,
    Capacity,
    RecentDemand,
    Utilization,
)


def test_work_starts_when_the_work_ahead_is_done() -> None:
    capacity = Capacity([(1.0, 1.0), (3.0, 0.5)])
    assert capacity.start_in_s(0.0) == 1.0
    assert capacity.start_in_s(1.0) == 2.0
    assert capacity.start_in_s(2.0 + 1.5) == 4.0


def test_nothing_starts_without_workers() -> None:
    assert Capacity([]).start_in_s(1.0) == math.inf
    assert Capacity([(0.0, 0.0)]).start_in_s(1.0) == math.inf


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.1, 2.0)), min_size=1, max_size=6), st.floats(0.0, 100.0))
def test_workers_do_the_work_ahead_until_a_start(openings: list[tuple[float, float]], work_s: float) -> None:
    start_s = Capacity(openings).start_in_s(work_s)
    done_s = sum(rate * max(start_s - free_in_s, 0.0) for free_in_s, rate in openings)
    assert done_s == pytest.approx(work_s, abs=1e-6)


def test_a_request_ends_on_the_worker_that_finishes_first() -> None:
    capacity = Capacity([(0.0, 0.25), (0.5, 1.0)])
    assert capacity.done_in_s(0.0, 0.1) == pytest.approx(0.4), "by the slow worker, which is free"
    assert capacity.done_in_s(0.0, 0.6) == pytest.approx(1.1), "by the fast worker; the slow one takes 2.4 s"
    assert capacity.done_in_s(0.7, 0.6) == pytest.approx(1.3)
    assert Capacity([]).done_in_s(0.0, 0.1) == math.inf


@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.1, 2.0)), min_size=1, max_size=6),
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
)
def test_no_worker_ends_a_request_sooner(openings: list[tuple[float, float]], start_s: float, own_s: float) -> None:
    fastest = max(rate for _, rate in openings)
    ends_s = [max(start_s, free_in_s) + own_s * fastest / rate for free_in_s, rate in openings]
    assert Capacity(openings).done_in_s(start_s, own_s) == pytest.approx(min(ends_s))


def test_a_standstill_lasts_until_the_next_placement() -> None:
    utilization = Utilization()
    utilization.contended(False, 0.0)
    utilization.contended(True, 5.0)
    utilization.offers(1.0, 7.0)
    assert utilization.standstill_s == 2.0
    utilization.placed(0.1, 8.0)
    assert utilization.standstill_s == 0.0
    utilization.offers(1.0, 8.5)
    assert utilization.standstill_s == 0.5


def test_utilization_starts_at_one() -> None:
    utilization = Utilization()
    assert utilization.share == 1.0
    utilization.placed(1.0, 0.0)
    assert utilization.share == 1.0


def test_utilization_follows_placements_while_requests_wait() -> None:
    utilization = Utilization()
    utilization.offers(4.0, 0.0)
    utilization.contended(True, 0.0)
    for second in range(1, 200):
        utilization.placed(1.0, float(second))
    assert utilization.share == pytest.approx(0.25, abs=0.1)


def test_idle_time_does_not_change_utilization() -> None:
    utilization = Utilization()
    utilization.placed(1.0, 0.0)
    utilization.offers(4.0, 0.0)
    utilization.contended(False, 0.0)
    utilization.placed(1.0, 1000.0)
    assert utilization.share == 1.0


def test_the_drain_rate_error_falls_with_the_number_of_requests() -> None:
    rng, utilization, now_s = random.Random(1), Utilization(), 0.0
    utilization.offers(1.0, now_s)
    utilization.contended(True, now_s)
    assert utilization.error == 1.0
    errors = []
    for _ in range(200):
        predicted_s = rng.uniform(0.1, 0.3)
        now_s += predicted_s * rng.choice([0.5, 1.0, 1.5])  # Each single prediction is wrong by half.
        utilization.placed(predicted_s, now_s)
        errors.append(utilization.error)
    assert errors[1] > 0.5
    assert errors[-1] < 0.15
    assert utilization.share == pytest.approx(1.0, rel=0.2)


def test_short_prompts_that_share_batches_drain_faster_than_predicted() -> None:
    utilization = Utilization()
    utilization.offers(1.0, 0.0)
    utilization.contended(True, 0.0)
    for tenth in range(1, 400):
        utilization.placed(0.2, tenth / 10)
    assert utilization.share == pytest.approx(2.0, rel=0.05)


def test_demand_is_work_per_second_and_decays() -> None:
    demand = RecentDemand()
    for tenth in range(500):
        demand.arrived(0.2, 1.0, tenth / 10)
    assert demand.rate(49.9) == pytest.approx(2.0, rel=0.05)
    assert demand.rate(500.0) < 0.2


def test_a_burst_is_not_lasting_demand() -> None:
    demand = RecentDemand()
    for index in range(8):
        demand.arrived(0.2, 1.0, 0.001 * index)
    assert demand.rate(0.01) == pytest.approx(8 * 0.2 / (HORIZON * 1.0)), "over the horizon, not over 8 ms"


def test_demand_from_few_requests_is_uncertain() -> None:
    assert RecentDemand().error == 1.0
    even, uneven = RecentDemand(), RecentDemand()
    for index in range(500):
        even.arrived(0.2, 1.0, index / 10)
        uneven.arrived(10.0 if index % 50 == 49 else 0.01, 1.0, index / 10)
    assert even.error < 0.1
    assert uneven.error > 0.3


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 1.0)), min_size=1, max_size=400))
def test_memory_of_demand_is_bounded(arrivals: list[tuple[float, float]]) -> None:
    demand, now_s = RecentDemand(), 0.0
    for gap_s, work_s in arrivals:
        now_s += gap_s / 100
        demand.arrived(work_s, 1.0, now_s)
        assert len(demand._bins) <= BINS + MIN_REQUESTS + 2
        assert 0.0 <= demand.error <= 1.0
        assert demand.rate(now_s) >= 0.0


def test_utilization_is_placed_work_over_offered_work() -> None:
    utilization = Utilization()
    utilization.contended(True, 0.0)  # No work is offered yet.
    utilization.offers(4.0, 5.0)
    utilization.placed(2.0, 10.0)
    prior_s = PRIOR_REQUESTS * MEMORY * 2.0
    assert utilization.share == pytest.approx((2.0 + prior_s) / (20.0 + prior_s))
    utilization.placed(1.0, 11.0)
    used_s, offered_s = MEMORY * 2.0 + 1.0, MEMORY * 20.0 + 4.0
    prior_s = PRIOR_REQUESTS * MEMORY**2 * (2.0 + 0.05 * (1.0 - 2.0))
    assert utilization.share == pytest.approx((used_s + prior_s) / (offered_s + prior_s))


def test_utilization_has_limits() -> None:
    slow, fast = Utilization(), Utilization()
    for utilization, rate in ((slow, 1000.0), (fast, 1e-6)):
        utilization.contended(True, 0.0)
        utilization.offers(rate, 0.0)
        for second in range(1, 500):
            utilization.placed(1.0, float(second))
    assert (slow.share, fast.share) == (SLOWEST, FASTEST)


def test_the_error_is_that_of_a_sum_of_requests() -> None:
    utilization = Utilization()
    utilization.offers(1.0, 0.0)
    utilization.contended(True, 0.0)
    utilization.placed(1.0, 2.0)
    utilization.placed(1.0, 2.5)
    prior_s = PRIOR_REQUESTS * MEMORY**2
    used_s, offered_s = MEMORY + 1.0, MEMORY * 2.0 + 0.5
    share = (used_s + prior_s) / (offered_s + prior_s)
    squares = (MEMORY * (1.0 - share * 2.0)) ** 2 + (1.0 - share * 0.5) ** 2
    assert utilization.error == pytest.approx((squares + prior_s**2) ** 0.5 / (used_s + prior_s))


def test_demand_covers_recent_requests() -> None:
    demand = RecentDemand()
    demand.arrived(100.0, 1.0, 0.0)
    for second in range(1, MIN_REQUESTS + 1):
        demand.arrived(2.0, 1.0, float(second))
    # The first request is dropped, and the next one marks the start of the span.
    assert demand.rate(float(MIN_REQUESTS)) == pytest.approx(2.0)


def test_simultaneous_requests_share_a_bin() -> None:
    demand = RecentDemand()
    for index in range(3000):
        demand.arrived(0.01, 1.0, index / 1000)
    assert demand.rate(3.0) == pytest.approx(10.0, rel=0.02)
    assert len(demand._bins) < 200


def test_only_free_workers_supply_capacity() -> None:
    capacity = Capacity([(1.0, 1.0), (3.0, 0.5)])
    assert (capacity.rate, capacity.start_in_s(0.5), capacity.start_in_s(2.0)) == (1.5, 1.5, 3.0)
    assert Capacity([(0.0, 0.0), (1.0, -1.0), (2.0, 1.0)]).start_in_s(1.0) == 3.0


def test_the_mean_request_follows_demand() -> None:
    demand = RecentDemand()
    assert demand.mean_s == 0.0
    for index, prefill_s in enumerate((0.1, 0.2, 0.6)):
        demand.arrived(prefill_s, 1.0, 0.1 * index)
    assert demand.mean_s == pytest.approx(0.3)

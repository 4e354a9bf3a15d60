"""When work that waits will start: the fluid of free capacity, the pace of late, and demand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forecast import MEMORY, PRIOR_REQUESTS, REMEMBERED, SLOWEST, Capacity, Demand, Pace


def test_work_starts_when_the_fluid_has_done_what_is_before_it() -> None:
    fluid = Capacity([(1.0, 1.0), (3.0, 0.5)])
    assert fluid.start_in_s(0.0) == 1.0
    assert fluid.start_in_s(1.0) == 2.0
    assert fluid.start_in_s(2.0 + 1.5) == 4.0
    assert (fluid.done_by(0.5), fluid.done_by(2.0), fluid.done_by(4.0)) == (0.0, 1.0, 3.5)


def test_where_nobody_works_nothing_starts() -> None:
    assert Capacity([]).start_in_s(1.0) == math.inf
    assert Capacity([(0.0, 0.0)]).done_by(10.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.1, 2.0)), min_size=1, max_size=6), st.floats(0.0, 100.0))
def test_start_and_done_are_each_others_inverse(openings: list[tuple[float, float]], work_s: float) -> None:
    fluid = Capacity(openings)
    assert fluid.done_by(fluid.start_in_s(work_s)) == pytest.approx(work_s, abs=1e-6)


def test_pace_is_full_until_something_else_is_measured() -> None:
    pace = Pace()
    assert pace.share == 1.0
    pace.placed(1.0, 0.0)
    assert pace.share == 1.0


def test_pace_follows_what_was_placed_while_requests_waited() -> None:
    pace = Pace()
    pace.offers(4.0, 0.0)
    pace.contended(True, 0.0)
    for second in range(1, 200):
        pace.placed(1.0, float(second))
    assert pace.share == pytest.approx(0.25, abs=0.1)


def test_idle_time_says_nothing_about_the_pace() -> None:
    pace = Pace()
    pace.placed(1.0, 0.0)
    pace.offers(4.0, 0.0)
    pace.contended(False, 0.0)
    pace.placed(1.0, 1000.0)
    assert pace.share == 1.0


def test_demand_is_work_per_second_and_fades_when_nobody_comes() -> None:
    demand = Demand()
    for tenth in range(500):
        demand.arrived(0.2, tenth / 10)
    assert demand.rate(49.9) == pytest.approx(2.0)
    assert demand.rate(500.0) < 0.2


def test_a_single_request_is_no_demand() -> None:
    demand = Demand()
    demand.arrived(5.0, 0.0)
    assert demand.rate(0.0) == demand.rate(1.0) == 0.0


def test_the_pace_is_the_work_that_was_placed_of_the_work_that_was_offered() -> None:
    pace = Pace()
    pace.contended(True, 0.0)  # nothing is offered yet
    pace.offers(4.0, 5.0)
    pace.placed(2.0, 10.0)
    offered_s = 4.0 * 5.0 * MEMORY
    prior_s = PRIOR_REQUESTS * 2.0
    assert pace.share == pytest.approx((2.0 + prior_s) / (offered_s + prior_s))
    pace.placed(1.0, 11.0)
    used_s, offered_s = MEMORY * 2.0 + 1.0, (offered_s + 4.0) * MEMORY
    prior_s = PRIOR_REQUESTS * (2.0 + 0.05 * (1.0 - 2.0))
    assert pace.share == pytest.approx((used_s + prior_s) / (offered_s + prior_s))


def test_a_pace_near_nothing_is_no_pace() -> None:
    pace = Pace()
    pace.contended(True, 0.0)
    pace.offers(1000.0, 0.0)
    pace.placed(1.0, 100.0)
    assert pace.share == SLOWEST


def test_demand_is_that_of_the_last_requests() -> None:
    demand = Demand()
    demand.arrived(100.0, 0.0)
    for second in range(1, REMEMBERED + 1):
        demand.arrived(2.0, float(second))
    # The first is forgotten, and the one after it opens the span.
    assert demand.rate(float(REMEMBERED)) == pytest.approx(2.0)
    assert demand.span_s(float(REMEMBERED)) == REMEMBERED - 1


def test_work_is_done_only_by_workers_that_are_free() -> None:
    fluid = Capacity([(1.0, 1.0), (3.0, 0.5)])
    assert (fluid.rate, fluid.done_by(1.0), fluid.done_by(1.5), fluid.done_by(3.0)) == (1.5, 0.0, 0.5, 2.0)
    assert Capacity([(0.0, 0.0), (1.0, -1.0), (2.0, 1.0)]).start_in_s(1.0) == 3.0

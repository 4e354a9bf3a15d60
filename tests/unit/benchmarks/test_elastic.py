"""benchmarks.elastic: the loads, the baselines' rules, the bars, and a short run of each controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.elastic.__main__ import CLAIRVOYANT, OURS, SLO, Cell, Load, is_ahead, report, run, run_fast, shape
from benchmarks.elastic.approximate import Approximation
from benchmarks.elastic.baselines import Predictive, RoleRule, Threshold
from benchmarks.elastic.workloads import Changing, Repeated, shift, sine, spike, step
from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Role
from router.scaling.demand import true_interval
from router.scaling.interface import Change, ChangeKind, Decision, Observed, ScalingController, Size
from simulator.traces.workloads import uniform
from tests.unit.simulator.small import Listed, asked

#: At the targets of the benchmark a decode step holds 15 rows, and a prompt of 1000 tokens takes 0.1 s.
COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-4,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=1e-3,
    decode_per_context_token_s=0.0,
)
EVERY_S = 5.0


def observed(now_s: float, size: Size, count: int = 50, **more: float) -> Observed:
    """In five seconds, `count` prompts of 1000 tokens with answers of 100."""
    interval = true_interval(now_s - EVERY_S, now_s, [(1000, 0, 100, SLO)] * count)
    return Observed(interval=interval, ready=size, cost=COST, **more)  # type: ignore[arg-type]


def changes(controller: ScalingController, seconds: float, see: Callable[[float], Observed]) -> list[str]:
    found = []
    for number in range(1, int(seconds / EVERY_S) + 1):
        now_s = number * EVERY_S
        decided = controller.decide(see(now_s), now_s)
        found += [f"{now_s:.0f}: {change}" for change in decided.changes]
    return found


def test_threshold_starts_at_once_and_stops_after_300_s() -> None:
    full = changes(
        Threshold(16, Size(1, 1)), 15.0, lambda at: observed(at, Size(1, 2), decode_rows=21.0, prefill_busy=0.7)
    )
    assert full == ["15: start 2 decode"]
    rule = Threshold(16, Size(1, 1))
    seen = changes(
        rule, 400.0, lambda at: observed(at, Size(1, 4), decode_rows=10.5 if at < 60.0 else 2.0, prefill_busy=0.7)
    )
    assert seen
    assert float(seen[0].partition(":")[0]) >= 345.0


def test_predictive_divides_the_load_by_a_profile() -> None:
    """10 requests per second: one prefill worker computes as many, and 1000 tokens per second take 15 rows at 25 ms."""
    assert changes(Predictive(16, Size(1, 1)), 60.0, lambda at: observed(at, Size(2, 1))) == [
        "60: stop 1 prefill",
        "60: start 1 decode",
    ]


def test_role_rule_changes_roles_at_once() -> None:
    late = changes(RoleRule(), 10.0, lambda at: observed(at, Size(1, 4), count=400, decode_rows=2.0))
    assert late == ["10: change 1 from decode to prefill"]
    full = changes(RoleRule(), 10.0, lambda at: observed(at, Size(2, 4), decode_rows=20.0))
    assert full == ["10: change 1 from prefill to decode"]


def test_loads_have_the_rates_and_lengths_that_they_name() -> None:
    def count(trace: Changing, begin_s: float, end_s: float) -> float:
        return sum(begin_s <= one.arrival_s < end_s for one in trace) / (end_s - begin_s)

    assert 20.0 < count(sine(600.0, 600.0, 1.0, 0), 100.0, 200.0) < 26.0
    assert count(sine(600.0, 600.0, 1.0, 0), 400.0, 500.0) < 5.0
    assert 15.0 < count(step(300.0, 1.0, 0), 100.0, 200.0) < 21.0
    assert 12.0 < count(spike(600.0, 1.0, 0), 300.0, 360.0) < 18.0
    before, after = (
        [one for one in shift(200.0, 1.0, 0) if (one.arrival_s >= 100.0) is late] for late in (False, True)
    )
    assert sum(one.prompt_tokens for one in before) > 10 * sum(one.prompt_tokens for one in after)
    assert sum(one.output_tokens for one in after) > 5 * sum(one.output_tokens for one in before)


def test_copies_of_a_trace_come_in_order() -> None:
    trace = Repeated(trace=Listed([asked(2.0 * at, 10, 1) for at in range(20)]), copies=3, until_s=30.0)
    arrivals = [one.arrival_s for one in trace]
    assert len(arrivals) == 3 * 15
    assert arrivals == sorted(arrivals)


CELL = Cell(
    load="step",
    controller=OURS,
    requests=100,
    attainment=0.95,
    worker_s=1100.0,
    changes=1,
    unfinished=0,
    failed=0,
    cpu_s=1.0,
)


def test_a_baseline_is_behind_by_points_or_by_worker_seconds() -> None:
    assert is_ahead(CELL, replace(CELL, attainment=0.84))
    assert not is_ahead(CELL, replace(CELL, attainment=0.90))
    assert is_ahead(CELL, replace(CELL, worker_s=1400.0))
    assert not is_ahead(CELL, replace(CELL, worker_s=1400.0, attainment=0.99))


def test_a_missed_bar_is_shown() -> None:
    bound, dear = replace(CELL, controller=CLAIRVOYANT, worker_s=1000.0), replace(CELL, worker_s=1200.0)
    assert "| met |" in report([bound, CELL])
    assert "**missed**" in report([bound, dear])
    assert "**missed**" in report([bound, replace(CELL, attainment=0.89)])
    assert "**not ahead of it**" in report([CELL, replace(CELL, controller="threshold")])


def test_a_short_load_costs_less_than_a_fixed_cluster() -> None:
    """Half a minute at 4 requests/s, then half a minute at a quarter, with short answers."""
    trace = Changing(
        name="short",
        rate=lambda at_s: 4.0 if at_s < 30.0 else 1.0,
        most_rps=4.0,
        duration_s=60.0,
        prompts=uniform(4000, 8000),
        answers=uniform(20, 60),
    )
    load = Load(trace=trace, slo=SLO, first=Size(0, 5))
    cells = {name: run(load, "short", name)[0] for name in (CLAIRVOYANT, OURS)}
    assert all(one.failed == one.unfinished == 0 for one in cells.values())
    assert len({one.requests for one in cells.values()}) == 1
    for name, one in cells.items():
        assert one.attainment >= 0.9
        assert one.worker_s < 0.8 * 5 * 60.0
        fast = run_fast(load, "short", name)[0]
        assert fast.requests == one.requests
        assert abs(fast.attainment - one.attainment) <= 0.1
        assert 0.8 * one.worker_s < fast.worker_s < 1.25 * one.worker_s


# --- the closed form ------------------------------------------------------------------------------------------


class Scripted:
    """Decides what it is told at that time."""

    def __init__(self, told: dict[float, Change]) -> None:
        self._told = told
        self.seen: list[Observed] = []

    def decide(self, observed: Observed, now_s: float) -> Decision:
        self.seen.append(observed)
        told = self._told.get(now_s)
        return Decision(at_s=now_s, changes=(told,) if told else (), reason="told", size=observed.ready)


def approximate(
    told: dict[float, Change], first: Size, rate_rps: float, tokens: int = 100, seconds: float = 60.0
) -> tuple[float, Scripted]:
    """The attainment. Answers of 100 tokens take 0.6 to 2.5 s."""
    rows = [asked(number / rate_rps, 1000, tokens) for number in range(int(seconds * rate_rps))]
    controller = Scripted(told)
    found = Approximation(Listed(rows), SLO, controller, first, shape(Role.DECODE), start_s=20.0).run()
    assert found.requests == len(rows)
    assert sum(one.interval.met + one.interval.missed for one in controller.seen) == found.requests
    return found.met / found.requests, controller


def test_what_fits_is_admitted() -> None:
    """A worker has 18.9 ms of each step for rows of 52 us, and computes prompts of 19 ms in the time that is left."""
    assert approximate({}, Size(0, 1), 10.0)[0] == 1.0
    crowded = approximate({}, Size(0, 1), 200.0, seconds=10.0)[0]
    assert 0.05 < crowded < 0.5
    assert approximate({}, Size(2, 1), 200.0, seconds=10.0)[0] > crowded
    assert approximate({}, Size(0, 2), 200.0, seconds=10.0)[0] > 1.5 * crowded


def test_workers_start_drain_and_change_their_role_in_their_time() -> None:
    start = Change(kind=ChangeKind.START, role=Role.PREFILL, count=2)
    _, seen = approximate({10.0: start}, Size(0, 2), 4.0)
    assert [one.ready for one in seen.seen][1:7] == [Size(0, 2)] * 4 + [Size(2, 2)] * 2
    assert [one.starting.total for one in seen.seen][1:7] == [0, 2, 2, 2, 0, 0]
    stop = Change(kind=ChangeKind.STOP, role=Role.DECODE, count=1)
    _, seen = approximate({10.0: stop}, Size(0, 2), 4.0, tokens=1500)
    assert seen.seen[2].ready == Size(0, 1)
    assert seen.seen[2].draining == Size(0, 1)  # answers take 9 s at least
    assert seen.seen[-1].draining == Size(0, 0)
    change = Change(kind=ChangeKind.CHANGE_ROLE, role=Role.PREFILL, count=1)
    _, seen = approximate({10.0: change}, Size(0, 2), 4.0)
    assert seen.seen[-1].ready == Size(1, 1)


def test_worker_seconds_count_from_the_order_to_the_end() -> None:
    rows = [asked(number / 4.0, 1000, 1) for number in range(400)]
    start = Scripted({10.0: Change(kind=ChangeKind.START, role=Role.DECODE, count=1)})
    runs = [
        Approximation(Listed(rows), SLO, one, Size(0, 2), shape(Role.DECODE), start_s=20.0).run()
        for one in (Scripted({}), start)
    ]
    end_s = 5.0 * len(start.seen)
    assert end_s >= 100.0
    assert runs[0].worker_s == pytest.approx(2 * end_s)
    assert runs[1].worker_s == pytest.approx(3 * end_s - 10.0)

"""The gate sheds load only if the cluster rejects much or the event loop cannot keep up, and then no more than needed.

Time is simulated. `Front` is a loop that serves its requests one after the other: each turn serves what has arrived
before it, so a turn is as long as there is work.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from pdserve.core.access import gate as rules
from pdserve.core.access.gate import MOST_PACE_S, Gate, Pace
from pdserve.core.access.shares import OPERATOR, caller_of
from pdserve.core.errors import LoadShed

COST_S = 0.004  # of a request that the cluster rejects
TICK_S = 0.02


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.check_state()


def learn_cost(gate: Gate, now_s: float = 0.0) -> float:
    """A second in which the loop spends COST_S on each of 50 requests a second. Returns the time after it."""
    for tick in range(51):
        at_s = now_s + tick * TICK_S
        gate.observe(0.0, COST_S, at_s)
        gate.enter("learned", 0, at_s)
        gate.leave("learned")
    return now_s + 1.0


def reject(gate: Gate, caller: str, count: int, now_s: float, priority: int = 0) -> int:
    """`count` requests that the cluster rejects if the gate does not. Returns how many the gate let pass."""
    passed = 0
    for _ in range(count):
        if gate.check(caller, priority, now_s) is None:
            passed += 1
            gate.enter(caller, priority, now_s)
            gate.leave(caller)
            gate.rejected(caller, priority, 2.0, now_s)
    return passed


# --- the cluster rejects --------------------------------------------------------------------------------------


def test_a_few_rejections_close_nothing(gate: Gate) -> None:
    now_s = learn_cost(gate)
    assert gate.request_s == pytest.approx(COST_S, rel=0.1)
    for _ in range(200):
        now_s += COST_S / rules.REJECTED_SHARE
        assert reject(gate, OPERATOR, 1, now_s) == 1


def test_a_burst_of_rejections_is_let_through(gate: Gate) -> None:
    assert reject(gate, OPERATOR, 50, learn_cost(gate)) == 50


def test_rejected_work_has_a_budget(gate: Gate) -> None:
    now_s, passed = learn_cost(gate), 0
    for _ in range(5000):  # 500 a second
        now_s += 0.002
        passed += reject(gate, OPERATOR, 1, now_s)
    assert passed * COST_S == pytest.approx(rules.BURST_S + 10.0 * rules.REJECTED_SHARE, rel=0.1)


@pytest.mark.parametrize("load", [1.5, 5.0, 20.0])
def test_the_cluster_keeps_a_choice(gate: Gate, load: float) -> None:
    """A cluster that accepts 200 requests a second is offered more than that, and not all."""
    now_s, room, passed, accepted = learn_cost(gate), 0.0, 0, 0
    for number in range(int(load * 200 * 20)):
        step_s = 1.0 / (load * 200)
        now_s, room = now_s + step_s, min(room + 200 * step_s, 5.0)
        if gate.check(OPERATOR, 0, now_s) is not None:
            continue
        gate.enter(OPERATOR, 0, now_s)
        gate.leave(OPERATOR)
        counts = number >= load * 200 * 10  # the first half of the time is a warm-up
        passed += counts
        if room >= 1.0:
            room -= 1.0
            accepted += counts
            gate.accepted(OPERATOR, 0, now_s)
        else:
            gate.rejected(OPERATOR, 0, 1.0, now_s)
    assert accepted >= 0.99 * 2000
    assert 1.1 * accepted < passed
    extra_rps = (passed - accepted) / 10.0
    assert extra_rps * COST_S <= 1.1 * (rules.REJECTED_SHARE + rules.CHOICE * 200 * COST_S)


def test_a_flood_costs_no_other_tenant_anything(gate: Gate) -> None:
    now_s = learn_cost(gate)
    flood, calm = caller_of("flood"), caller_of("calm")
    for _ in range(2000):
        now_s += 0.002
        reject(gate, flood, 1, now_s)
        assert gate.check(calm, 0, now_s) is None
        gate.accepted(calm, 0, now_s)
    assert gate.check(flood, 0, now_s) is not None


def test_a_flood_costs_no_higher_priority_anything(gate: Gate) -> None:
    now_s = learn_cost(gate)
    for _ in range(2000):
        now_s += 0.002
        reject(gate, OPERATOR, 1, now_s, priority=0)
        assert gate.check(OPERATOR, 5, now_s) is None
        gate.accepted(OPERATOR, 5, now_s)
    assert gate.check(OPERATOR, 0, now_s) is not None
    assert gate.check(OPERATOR, None, now_s) is None  # its priority is not known yet
    assert gate.check(OPERATOR, None, now_s + rules.RECENT_S + 1.0) is None


def test_the_only_priority_need_not_be_known(gate: Gate) -> None:
    now_s = learn_cost(gate)
    reject(gate, OPERATOR, 1000, now_s, priority=3)
    assert gate.check(OPERATOR, None, now_s) is not None


def test_a_flow_enters_again_a_second_after_its_flood(gate: Gate) -> None:
    now_s = learn_cost(gate)
    reject(gate, OPERATOR, 1000, now_s)
    assert gate.check(OPERATOR, 0, now_s) is not None
    assert gate.check(OPERATOR, 0, now_s + rules.MOST_DEBT_S / rules.REJECTED_SHARE + 0.001) is None


def test_rejected_clients_do_not_return_together(gate: Gate) -> None:
    now_s = learn_cost(gate)
    reject(gate, OPERATOR, 1000, now_s)
    errors = [gate.check(OPERATOR, 0, now_s) for _ in range(100)]
    waits_s = sorted(one.retry_after_s for one in errors if one is not None)
    assert (len(waits_s), {one.cause for one in errors if one is not None}) == (100, {"cluster"})
    assert waits_s[0] >= 2.0
    assert waits_s[-1] <= 4.0
    assert max(later - former for former, later in itertools.pairwise(waits_s)) < 0.1


@pytest.mark.parametrize("count", [1, 2, 8, 10, 100])
def test_priorities_of_a_caller_divide_its_budget(gate: Gate, count: int) -> None:
    now_s, passed = learn_cost(gate), 0
    for number in range(5000):  # 500 a second
        now_s += 0.002
        passed += reject(gate, OPERATOR, 1, now_s, priority=number % count)
    most_s = rules.BURST_S + 10.0 * rules.REJECTED_SHARE + rules.MAX_PRIORITIES * COST_S
    assert passed * COST_S <= 1.1 * most_s


def test_floods_of_one_caller_take_no_share_of_another(gate: Gate) -> None:
    """Two callers flood, one of them with eight priorities."""
    now_s = learn_cost(gate)
    many, one = caller_of("many"), caller_of("one")
    passed = dict.fromkeys((many, one), 0)
    for number in range(10_000):
        now_s += 0.001
        passed[many] += reject(gate, many, 1, now_s, priority=number % 8)
        passed[one] += reject(gate, one, 1, now_s)
    assert passed[one] == pytest.approx(passed[many], rel=0.2)


def test_callers_that_are_forgotten_take_no_share(gate: Gate) -> None:
    now_s = learn_cost(gate)
    for number in range(rules.MAX_CALLERS + 100):
        reject(gate, caller_of(str(number)), 100, now_s)
    gate.check_state()


def test_any_number_of_callers_and_priorities_is_bounded(gate: Gate) -> None:
    for number in range(3 * rules.MAX_CALLERS):
        gate.rejected(caller_of(str(number)), 0, 1.0, 1.0)
    for priority in range(100):
        gate.rejected("one", priority, 1.0, 1.0 + priority)
    gate.check_state()
    assert gate.check("one", 99, 101.0) is None


# --- the event loop cannot keep up ----------------------------------------------------------------------------


@dataclass
class Front:
    """One event loop. A request costs `request_s` of CPU time when it enters, and again when it ends, `answer_s` after
    it; a rejection costs `rejection_s`. Other programs slow the loop by `slowness(now_s)`."""

    gate: Gate
    request_s: float = 0.002
    answer_s: float = 0.1
    rejection_s: float = 0.0002
    slowness: Callable[[float], float] = lambda now_s: 1.0
    now_s: float = 0.0
    admitted_s: list[float] = field(default_factory=list)
    shed: list[LoadShed] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)  # of the rejections
    waits_s: list[float] = field(default_factory=list)  # of the admitted requests before they enter

    def serve(self, arrivals_s: list[float]) -> None:
        arrivals, ends, due_s, used_s = sorted(arrivals_s, reverse=True), [], self.now_s + TICK_S, 0.0
        last_s = arrivals[0] + 0.5
        while self.now_s < last_s:
            next_s = min([due_s, *arrivals[-1:], *ends[:1]])
            self.now_s = max(self.now_s, next_s)
            began_s, turn_s = self.now_s, 0.0
            while ends and ends[0] <= began_s:
                ends.pop(0)
                self.gate.leave(OPERATOR)
                turn_s += self.request_s
            while arrivals and arrivals[-1] <= began_s:
                at_s = arrivals.pop()
                found = self.gate.check(OPERATOR, 0, began_s)
                if found is not None:
                    turn_s += self.rejection_s
                    self.shed.append(found)
                    self.delays_s.append(began_s + turn_s - at_s)
                    continue
                self.gate.enter(OPERATOR, 0, began_s)
                turn_s += self.request_s
                self.admitted_s.append(at_s)
                self.waits_s.append(began_s + turn_s - at_s)
                ends.append(began_s + turn_s + self.answer_s)
            used_s += turn_s
            self.now_s += turn_s * self.slowness(self.now_s)
            if due_s <= self.now_s:
                self.gate.observe(self.now_s - due_s, used_s, self.now_s)
                due_s, used_s = self.now_s + TICK_S, 0.0
            ends.sort()


def poisson(rate_rps: float, seconds: float, begin_s: float = 0.0, seed: int = 1) -> list[float]:
    draw, at_s, found = random.Random(seed), begin_s, []
    while (at_s := at_s + draw.expovariate(rate_rps)) < begin_s + seconds:
        found.append(at_s)
    return found


CAPACITY_RPS = 250.0


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_nothing_is_shed_below_capacity(gate: Gate, share: float) -> None:
    front = Front(gate)
    front.serve(poisson(share * CAPACITY_RPS, 30.0))
    assert front.shed == []


def test_a_burst_is_not_shed(gate: Gate) -> None:
    """60 requests at once, each second."""
    front = Front(gate)
    front.serve([second + 0.0 for second in range(20) for _ in range(60)])
    assert front.shed == []


def test_a_pause_sheds_nothing(gate: Gate) -> None:
    """A garbage collection of a second at 80 % of the capacity."""
    front = Front(gate)
    front.slowness = lambda now_s: 500.0 if 5.0 <= now_s < 5.001 else 1.0
    arrivals = poisson(0.5 * CAPACITY_RPS, 20.0)
    front.serve([one for one in arrivals if not 5.1 < one < 5.9])
    assert front.shed == []


def test_a_busy_machine_sheds_nothing_of_a_few_requests(gate: Gate) -> None:
    """The loop gets a tenth of the time, and serves 20 requests a second."""
    front = Front(gate, slowness=lambda now_s: 10.0)
    front.serve(poisson(20.0, 20.0))
    assert front.shed == []


@pytest.mark.parametrize(("load", "least"), [(1.2, 0.95), (2.0, 0.95), (4.0, 0.85)])
def test_an_overloaded_loop_sheds_what_it_cannot_serve(gate: Gate, load: float, least: float) -> None:
    front = Front(gate)
    front.serve(poisson(load * CAPACITY_RPS, 20.0))
    front.delays_s.sort()
    assert front.delays_s[len(front.delays_s) // 2] < 3.0 * rules.TARGET_S
    late_s = sorted(front.waits_s[len(front.waits_s) // 2 :])
    assert late_s[int(0.95 * len(late_s))] < 6.0 * rules.TARGET_S
    # What the rejections leave, after the first seconds.
    left = 1.0 - (load - 1.0) * CAPACITY_RPS * front.rejection_s
    kept = sum(at_s > 5.0 for at_s in front.admitted_s) / 15.0
    assert kept >= least * left * CAPACITY_RPS
    assert {one.cause for one in front.shed} == {"front"}


def test_a_loose_target_is_not_at_risk() -> None:
    """The same overload, with a target that such delays do not endanger."""
    front = Front(Gate(ttft_s=600.0))
    front.serve(poisson(1.2 * CAPACITY_RPS, 5.0))
    assert front.shed == []


def test_shedding_ends_with_the_overload(gate: Gate) -> None:
    front = Front(gate)
    front.serve(poisson(2.0 * CAPACITY_RPS, 8.0))
    assert front.shed
    before = len(front.shed)
    front.serve(poisson(0.6 * CAPACITY_RPS, 10.0, begin_s=front.now_s + rules.OFF_S + 1.0))
    assert len(front.shed) == before
    assert gate.limit is None


def test_callers_share_a_limit(gate: Gate) -> None:
    """One tenant cannot hold all of it, whatever its priorities."""
    busy_s = 0.05
    for number in range(100):
        gate.enter(caller_of("flood"), 0, 0.0)
        gate.observe(0.0, 0.0, number * 0.001)
    for tick in range(40):
        gate.observe(0.2, busy_s, 1.0 + tick * 0.1)
        if gate.limit is not None:
            break
    assert gate.limit is not None
    assert gate.limit <= 100
    now_s = 1.0 + tick * 0.1
    assert gate.check(caller_of("flood"), 0, now_s) is not None
    for _ in range(60):
        gate.leave(caller_of("flood"))
    gate.accepted(caller_of("flood"), -1, now_s)
    while gate.check(caller_of("flood"), 0, now_s) is None:
        gate.enter(caller_of("flood"), 0, now_s)
    assert gate.check(caller_of("flood"), 1, now_s) is not None
    assert gate.running <= gate.limit
    assert gate.check(caller_of("calm"), 0, now_s) is None


def test_a_wait_in_the_process_counts_as_its_delay(gate: Gate) -> None:
    """Turns of the loop are short, but few of the waiting requests begin in each."""
    for number in range(100):
        gate.enter(OPERATOR, 0, number * 0.001)
    for tick in range(1, 101):
        now_s = tick * TICK_S
        gate.enter(OPERATOR, 0, now_s)
        gate.waited(0.1 + now_s)
        gate.observe(0.001, 0.8 * TICK_S, now_s)
    assert gate.limit is not None


def test_a_few_long_waits_set_no_limit(gate: Gate) -> None:
    """One request of six waits for a second, the others do not."""
    for _ in range(100):
        gate.enter(OPERATOR, 0, 0.0)
    for tick in range(1, 201):
        now_s = tick * TICK_S
        for wait_s in (0.0002, 1.0) if tick % 5 == 0 else (0.0002,):
            gate.enter(OPERATOR, 0, now_s)
            gate.leave(OPERATOR)
            gate.waited(wait_s)
        gate.observe(0.0005, 0.002, now_s)
    assert gate.limit is None


@pytest.mark.parametrize(
    ("count", "enter_s", "begin_s"),
    [(200, 0.0005, 0.002), (400, 0.0004, 0.001), (1000, 0.0003, 0.001), (1000, 0.0003, 0.0005), (1000, 0.0003, 0.002)],
)
@pytest.mark.parametrize("spread_s", [0.0, 0.5])
def test_a_burst_of_long_answers_costs_another_tenant_at_most_a_second(
    gate: Gate, count: int, enter_s: float, begin_s: float, spread_s: float
) -> None:
    """`count` answers of a minute, all begun within `spread_s`. Entering takes `enter_s`; of those that have entered,
    four begin in each turn. The other tenant sends 20 requests a second."""
    burst, calm = caller_of("burst"), caller_of("calm")
    arrivals_s = [1.0 + spread_s * number / count for number in range(count)]
    now_s, due_s, used_s, next_s, shed_s = 0.0, TICK_S, 0.0, 0.0, []
    queue: list[float] = []
    while now_s < 20.0:
        began_s, turn_s = now_s, 0.0
        while arrivals_s and arrivals_s[0] <= began_s:
            del arrivals_s[0]
            if gate.check(burst, 0, began_s + turn_s) is None:
                gate.enter(burst, 0, began_s + turn_s)
                queue.append(began_s + turn_s)
                turn_s += enter_s
        for entered_s in queue[:4]:
            gate.waited(began_s + turn_s - entered_s)
            turn_s += begin_s
        del queue[:4]
        now_s += max(turn_s, 0.001)
        used_s += turn_s + 0.0003
        if now_s >= next_s:
            next_s += 0.05
            if gate.check(calm, 0, now_s) is None:
                gate.enter(calm, 0, now_s)
                queue.append(now_s)
                gate.leave(calm)
            else:
                shed_s.append(now_s)
        if now_s >= due_s:
            gate.observe(now_s - due_s, used_s, now_s)
            due_s, used_s = now_s + TICK_S, 0.0
    assert len(shed_s) <= 20
    assert gate.limit is None


def test_a_limit_below_what_runs_is_lifted_once_the_loop_keeps_up(gate: Gate) -> None:
    """500 long answers run, and nothing ends."""
    flood, calm = caller_of("flood"), caller_of("calm")
    now_s = 0.0
    for _ in range(500):
        gate.enter(flood, 0, 0.0)
    while gate.limit is None and now_s < 5.0:
        now_s += rules.INTERVAL_S
        gate.observe(0.2 + now_s, 0.1, now_s)
    assert gate.limit is not None
    assert gate.limit >= 0.8 * 500
    until_s = now_s + 0.6
    while now_s < until_s:
        now_s += rules.INTERVAL_S
        gate.check(calm, 0, now_s)
        gate.observe(0.001, 0.02, now_s)
    assert gate.check(calm, 0, now_s) is None
    while now_s < until_s + rules.OFF_S + 0.5:
        now_s += rules.INTERVAL_S
        gate.observe(0.001, 0.02, now_s)
    assert gate.limit is None


def test_a_long_turn_of_the_loop_sets_a_pace() -> None:
    pace = Pace()

    def after(*late_s: float) -> float:
        for one in late_s:
            pace.follow(one)
        return pace.interval_s

    assert after(*[0.004] * 50) == 0.0, "a loop that keeps up takes messages as they come"
    assert after(*[0.008] * 50) == 0.04, "at least PACE_FACTOR delays, from LEAST_PACE_S in steps of two"
    assert after(*[0.006] * 50) == 0.04, "it does not follow small changes"
    assert after(*[0.01] * 50) == 0.04
    assert after(*[2.0] * 50) == MOST_PACE_S
    assert after(*[0.0] * 50) == 0.0
    after(*[1.0] * 9)
    pace.reset()
    assert pace.interval_s == 0.0

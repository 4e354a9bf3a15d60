"""The controller of the cluster's size: forecast, predicted attainment, and the rules of its decisions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from router.recording.replay import decode_value, encode_value
from router.scaling.attainment import LoadModel, expected_attainment
from router.scaling.controller import FIRST_PAUSE_S, Controller
from router.scaling.demand import ArrivalHistory, Bin, newest_line, true_interval
from router.scaling.interface import (
    NONE,
    Change,
    ChangeKind,
    Decision,
    Demand,
    Interval,
    Observed,
    ScalingSettings,
    Size,
    resized,
)
from router.scaling.observing import (
    RouterDemand,
    WorkerCapacity,
    measured,
    observe,
    ready_workers,
    why_unsettled,
)
from router.scaling.plan import Coming, SizePlan, slice_edges_s

#: A worker decodes about 2.5 of the requests below per second, or prefills 10.
COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-4,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=2e-3,
    decode_per_context_token_s=0.0,
)
SLO = Slo(ttft_s=2.0, tpot_s=0.05)
EVERY_S = 5.0
SETTINGS = ScalingSettings(min_workers=2, max_workers=8, start_s=40.0, drain_s=10.0)


def interval(now_s: float, rate_rps: float, prompt: int = 1000, output: int = 100, **sums: float) -> Interval:
    """Equal requests, and as many answers as requests."""
    count = round(rate_rps * EVERY_S)
    found = true_interval(now_s - EVERY_S, now_s, [(prompt, 0, output, SLO)] * count)
    return replace(found, met=count, **sums)


def seen(now_s: float, rate_rps: float, size: Size, **more: object) -> Observed:
    return Observed(interval=interval(now_s, rate_rps), ready=size, cost=COST, **more)  # type: ignore[arg-type]


def decisions(
    controller: Controller, rate: Callable[[float], float], size: Size, seconds: float = 60.0, **more: object
) -> Iterator[Decision]:
    """Of a cluster whose changes take effect at the next decision."""
    for number in range(1, int(seconds / EVERY_S) + 1):
        now_s = number * EVERY_S
        decision = controller.decide(seen(now_s, rate(now_s), size, **more), now_s)
        yield decision
        for change in decision.changes:
            size = resized(size, change)


def demand(rate_rps: float, **more: float) -> Demand:
    fields = {
        "at_s": 0.0,
        "rate_rps": rate_rps,
        "error": 0.0,
        "prompt_tokens": 1000.0,
        "uncached_tokens": 1000.0,
        "token_context": 0.0,
        "output_tokens": 100.0,
        "prompt_spread": 1.0,
        "dispersion": 1.0,
        "ttft_s": 2.0,
        "tpot_s": 0.05,
    }
    return Demand(**{**fields, **more})


# --- forecast -------------------------------------------------------------------------------------------------


def bins(counts: list[int]) -> list[Bin]:
    return [(EVERY_S * at, EVERY_S * (at + 1), float(count), float(count)) for at, count in enumerate(counts)]


def test_steady_arrivals_are_averaged_over_the_longest_window() -> None:
    rng = random.Random(0)
    line = newest_line(bins([sum(rng.random() < 0.5 for _ in range(200)) for _ in range(140)]))
    rate, deviation = line.at(0.0)
    assert line.window_s == 640.0
    assert abs(rate - 20.0) < 1.0
    assert deviation < 0.5


def test_a_step_leaves_only_what_came_after_it() -> None:
    line = newest_line(bins([30] * 60 + [90] * 4))
    assert line.window_s <= 20.0
    assert line.at(0.0)[0] == pytest.approx(18.0)


def test_a_trend_is_continued_as_far_as_it_was_seen() -> None:
    line = newest_line(bins([50 + 5 * at for at in range(33)]))
    assert line.window_s == 160.0
    now, soon, later = (line.at(ahead_s)[0] for ahead_s in (0.0, 160.0, 600.0))
    assert now == pytest.approx(42.5, abs=1.0)
    assert soon == pytest.approx(now + 160.0 * 0.2, abs=1.0)
    assert later == soon


def test_a_clear_rise_is_seen_after_40_s_and_a_fall_is_not() -> None:
    rising, falling = (
        newest_line(bins([40 + 10 * at for at in range(8)])),
        newest_line(bins([110 - 10 * at for at in range(8)])),
    )
    assert rising.window_s == 40.0
    assert rising.slope == pytest.approx(10.0 / EVERY_S**2, rel=0.2)
    assert rising.at(40.0)[0] > rising.at(0.0)[0] > 20.0
    assert falling.slope == 0.0


def test_one_long_interval_has_no_trend() -> None:
    assert newest_line([(0.0, 100.0, 500.0, 500.0)]).at(60.0)[0] == pytest.approx(5.0)


def answers_of(now_s: float, *, tokens: float, answers: int, answer_tokens: float) -> Interval:
    return replace(interval(now_s, 10.0), tokens=tokens, answers=answers, answer_tokens=answer_tokens)


def test_answers_that_became_longer_count_as_twice_what_running_ones_have() -> None:
    """Of answers of 1,000 tokens at 10 per second, those that have ended by now are the short ones."""
    history = ArrivalHistory()
    for number in range(1, 9):
        history.add(answers_of(number * EVERY_S, tokens=50_000, answers=25, answer_tokens=25 * 600.0))
    lengths = {so_far: history.forecast([0.0], so_far)[0].output_tokens for so_far in (100.0, 500.0, 5000.0)}
    assert lengths == {100.0: 600.0, 500.0: 1000.0, 5000.0: 2000.0}


def test_an_uncertain_rate_is_not_believed_to_be_zero() -> None:
    rate, deviation = newest_line(bins([0] * 30)).at(0.0)
    assert rate == 0.0
    assert deviation > 0.0


# --- predicted attainment -------------------------------------------------------------------------------------


def test_all_requests_meet_their_targets_below_the_capacity() -> None:
    assert expected_attainment(0.5, 0.1) == 1.0


def test_above_the_capacity_the_share_is_what_fits() -> None:
    assert expected_attainment(2.0, 0.0) == pytest.approx(0.5, abs=1e-6)


def test_chance_costs_requests_near_the_capacity() -> None:
    assert 0.9 < expected_attainment(1.0, 0.1) < 1.0
    assert expected_attainment(1.0, 0.2) < expected_attainment(1.0, 0.1)


def test_prefill_workers_take_prompts_but_no_answers() -> None:
    """At 4 requests/s, rows take 0.8 and prompts 0.4 seconds of work per second. Of a decode worker's second, 0.8 are
    left for rows, and all of it for both."""
    model = LoadModel(demand(4.0), seen(EVERY_S, 4.0, Size(0, 1)), 1.0)
    assert model.load(Size(0, 1)) == pytest.approx(1.2)
    assert model.load(Size(1, 1)) == pytest.approx(1.0)
    assert model.load(Size(8, 1)) == pytest.approx(1.0)
    assert model.load(Size(0, 2)) == pytest.approx(0.6)
    assert model.attainment(Size(3, 0)) == 0.0


def test_memory_limits_the_rows_of_a_worker() -> None:
    observed = seen(EVERY_S, 4.0, Size(0, 1), kv_tokens=10_500)
    assert LoadModel(demand(4.0), observed, 1.0).load(Size(0, 1)) == pytest.approx(20.0 / 9.0)


# --- decisions ------------------------------------------------------------------------------------------------


def test_a_full_cluster_gets_workers() -> None:
    found = [one for one in decisions(Controller(SETTINGS), lambda now_s: 12.0, Size(0, 2)) if one.changes]
    change = found[0].changes[0]
    assert change.kind is ChangeKind.START
    assert change.role is Role.DECODE
    assert found[0].alternatives[0].cost_s < next(one.cost_s for one in found[0].alternatives if one.change == "keep")


@pytest.mark.parametrize("start_s", [0.5, 2.0, 5.0, 11.68, 15.0, 25.0, 40.0, 60.0, 95.0, 120.0, 300.0])
@pytest.mark.parametrize("rate_rps", [6.0, 12.0, 40.0])
def test_a_full_cluster_does_not_wait_for_the_next_decision(start_s: float, rate_rps: float) -> None:
    """Also where the plan has a start now and one at the next decision in the same slice."""
    settings = replace(SETTINGS, start_s=start_s)
    found = list(decisions(Controller(settings), lambda now_s: rate_rps, Size(0, 2), 60.0))
    assert found[-1].size.decode > 2 or found[-1].changes
    fits = list(decisions(Controller(settings), lambda now_s: 4.0, Size(0, 3), 60.0))
    assert not any(change.kind is ChangeKind.START for one in fits for change in one.changes)


def test_an_idle_cluster_loses_workers_down_to_the_minimum() -> None:
    sizes = [one.size for one in decisions(Controller(SETTINGS), lambda now_s: 1.0, Size(2, 8), 200.0)]
    assert sizes[-1].total == SETTINGS.min_workers
    assert sizes[-1].decode >= 1


def test_a_fitting_cluster_keeps_its_size() -> None:
    first = list(decisions(Controller(SETTINGS), lambda now_s: 12.0, Size(0, 3), 300.0))[-1].size
    later = [one for one in decisions(Controller(SETTINGS), lambda now_s: 12.0, first, 300.0) if one.changes]
    assert later == []


def test_nothing_is_decided_without_arrivals() -> None:
    found = list(decisions(Controller(SETTINGS), lambda now_s: 0.0, Size(0, 4), 200.0))
    assert all(not one.changes for one in found)
    assert found[-1].reason == "too few requests were seen"


def test_nothing_changes_during_a_roll_out() -> None:
    found = list(decisions(Controller(SETTINGS), lambda now_s: 30.0, Size(0, 2), busy_because="roll-out"))
    assert all(not one.changes for one in found)
    assert found[-1].reason == "nothing changes during a roll-out"


def test_nothing_changes_while_a_change_is_under_way() -> None:
    found = list(decisions(Controller(SETTINGS), lambda now_s: 30.0, Size(0, 2), starting=Size(0, 1)))
    assert all(not one.changes for one in found)


def test_the_next_change_waits_for_the_effect_of_the_last() -> None:
    controller = Controller(SETTINGS)
    found = list(decisions(controller, lambda now_s: 8.0 if now_s < 60.0 else 24.0, Size(0, 2), 120.0))
    changed = [number for number, one in enumerate(found) if one.changes]
    assert len(changed) >= 2
    for number in changed[:-1]:
        assert found[number + 1].reason.startswith("the effect is not yet seen")
        outcome = found[number + 2].outcome
        assert outcome is not None
        assert outcome.change == str(found[number].changes[0])
        assert outcome.seen_attainment == 1.0


class Slow:
    """A cluster whose workers start in 40 s and drain in 20 s, under one controller."""

    def __init__(self, size: Size, *, starts_overlap: bool) -> None:
        self._controller = Controller(SETTINGS, starts_overlap=starts_overlap)
        self._size, self._now_s = size, 0.0
        self._under_way: list[tuple[float, Change]] = []
        self.found: list[Decision] = []

    def run(self, seconds: float, rate_rps: float) -> list[str]:
        changes = []
        for _ in range(round(seconds / EVERY_S)):
            self._now_s += EVERY_S
            for at_s, change in [one for one in self._under_way if one[0] <= self._now_s]:
                self._under_way.remove((at_s, change))
                self._size = resized(self._size, change) if change.kind is ChangeKind.START else self._size
            counts = {kind: [0, 0] for kind in ChangeKind}
            for _, change in self._under_way:
                counts[change.kind][list(Role).index(change.role)] += change.count
            now = seen(
                self._now_s,
                rate_rps,
                self._size,
                starting=Size(*counts[ChangeKind.START]),
                draining=Size(*counts[ChangeKind.STOP]),
            )
            decision = self._controller.decide(now, self._now_s)
            self.found.append(decision)
            for change in decision.changes:
                changes.append(str(change))
                is_start = change.kind is ChangeKind.START
                self._under_way.append((self._now_s + (40.0 if is_start else 20.0), change))
                self._size = self._size if is_start else resized(self._size, change)
        return changes


@pytest.mark.parametrize("starts_overlap", [False, True])
def test_more_workers_are_started_while_others_start_if_the_caller_can(starts_overlap: bool) -> None:
    """The load is twice as high after the first order. What starts already is not ordered again."""
    cluster = Slow(Size(0, 2), starts_overlap=starts_overlap)
    assert cluster.run(30.0, 10.0)[0].startswith("start")
    assert cluster.run(5.0, 10.0) == []
    more = cluster.run(20.0, 20.0)
    assert bool(more) is starts_overlap
    assert all(one.startswith("start") for one in more)
    cluster.run(200.0, 20.0)
    outcomes = [one.outcome for one in cluster.found if one.outcome is not None]
    assert [one.took_s for one in outcomes[:2]] == [40.0] * len(outcomes[:2])
    assert outcomes[0].seen_rate_rps == pytest.approx(20.0)


def test_workers_are_started_while_others_drain_but_none_is_stopped() -> None:
    cluster = Slow(Size(0, 8), starts_overlap=True)
    [stop] = cluster.run(30.0, 6.0)
    assert stop.startswith("stop")
    starts = cluster.run(15.0, 20.0)
    assert starts
    assert all(one.startswith("start") for one in starts)
    assert not [one for one in cluster.run(25.0, 1.0) if not one.startswith("start")]


def test_a_change_of_role_or_by_hand_blocks_starts_too() -> None:
    controller = Controller(SETTINGS, starts_overlap=True)
    changed = [one for one in decisions(controller, lambda now_s: 8.0, Size(3, 2), 30.0) if one.changes]
    assert changed[0].changes[0].kind is ChangeKind.CHANGE_ROLE
    now = seen(35.0, 30.0, Size(0, 2), starting=Size(0, 3))
    assert not controller.decide(now, 35.0).changes
    by_hand = list(
        decisions(
            Controller(SETTINGS, starts_overlap=True), lambda now_s: 30.0, Size(0, 2), draining=Size(0, 1), seconds=90.0
        )
    )
    assert all(not one.changes for one in by_hand)
    assert by_hand[-1].reason == "under way: a change by hand"


def test_a_change_that_failed_has_no_outcome() -> None:
    controller = Controller(SETTINGS)
    first = [one for one in decisions(controller, lambda now_s: 12.0, Size(0, 2), 30.0) if one.changes]
    assert first
    assert first[-1].at_s == 30.0
    decision = controller.decide(seen(35.0, 12.0, Size(0, 2)), 35.0)
    assert decision.outcome is None
    assert decision.changes


def starts(controller: Controller, size: Size, seconds: float, began_s: float, *, fail: bool) -> list[float]:
    """When workers are started, if each start takes an interval and fails, or is made."""
    found: list[float] = []
    failed: Change | None = None
    for number in range(1, int(seconds / EVERY_S) + 1):
        now_s = began_s + number * EVERY_S
        decision = controller.decide(seen(now_s, 30.0, size, failed=failed), now_s)
        failed = None
        for change in decision.changes:
            found.append(now_s)
            failed = change if fail else None
            size = size if fail else resized(size, change)
    return found


def test_a_change_that_failed_is_decided_again_ever_later() -> None:
    controller = Controller(SETTINGS)
    at_s = starts(controller, Size(0, 2), 260.0, 0.0, fail=True)
    pauses_s = [later_s - earlier_s for earlier_s, later_s in pairwise(at_s)]
    assert pauses_s == [EVERY_S + FIRST_PAUSE_S * factor for factor in (1.0, 2.0, 4.0)]
    assert starts(controller, Size(0, 2), 260.0, 260.0, fail=False), "it is made"
    again_s = starts(controller, Size(0, 2), 60.0, 520.0, fail=True)
    assert again_s[1] - again_s[0] == EVERY_S + FIRST_PAUSE_S, "the pause is short again"


def test_a_pause_after_failed_changes_has_a_limit() -> None:
    controller = Controller(SETTINGS)
    failed = Change(kind=ChangeKind.START, role=Role.DECODE, count=1)
    for number in range(1, 11):
        now_s = number * EVERY_S
        controller.decide(seen(now_s, 30.0, Size(0, 2), failed=failed, busy_because="roll-out"), now_s)
    reason = controller.decide(seen(55.0, 30.0, Size(0, 2)), 55.0).reason
    assert reason.endswith("such a change failed; again in 595 s")


def test_workers_are_stopped_or_change_their_role_after_a_start_failed() -> None:
    """Also the reason for keeping a size is told."""
    failed = Change(kind=ChangeKind.START, role=Role.DECODE, count=1)
    for size, rate_rps, kind in (
        (Size(0, 8), 2.0, ChangeKind.STOP),
        (Size(6, 2), 12.0, ChangeKind.CHANGE_ROLE),
        (Size(0, 2), 12.0, None),
    ):
        controller = Controller(SETTINGS)
        for number in range(1, 6):
            assert not controller.decide(seen(number * EVERY_S, rate_rps, size), number * EVERY_S).changes
        decision = controller.decide(seen(30.0, rate_rps, size, failed=failed), 30.0)
        assert [one.kind for one in decision.changes] == ([] if kind is None else [kind])
        starts = [one for one in decision.alternatives if one.change.startswith("start")]
        assert all(one.refused == "such a change failed; again in 30 s" for one in starts)
    assert decision.reason.endswith("would cost less than keeping the size, but such a change failed; again in 30 s")


def plan(size: Size, rates: Callable[[float], float], settings: ScalingSettings = SETTINGS) -> SizePlan:
    edges_s = slice_edges_s(settings.horizon_s)
    demands = [replace(demand(rates(at_s)), at_s=at_s) for at_s in edges_s[:-1]]
    return SizePlan(settings, seen(EVERY_S, rates(0.0), size), demands, edges_s, 1.0, EVERY_S)


def best(found: SizePlan) -> str:
    return next(one.change for one, _ in found.alternatives() if not one.refused)


def test_a_drain_that_would_make_misses_is_refused() -> None:
    """The load falls in 30 s, but until then the worker is needed."""
    alternatives = {
        one.change: one for one, _ in plan(Size(0, 3), lambda at_s: 10.0 if at_s < 30.0 else 1.0).alternatives()
    }
    assert alternatives["stop 1 decode"].refused
    assert not alternatives["keep"].refused


def test_a_worker_is_started_before_the_load_that_needs_it() -> None:
    step_s = SETTINGS.start_s
    assert best(plan(Size(0, 2), lambda at_s: 4.0 if at_s < step_s else 12.0)).startswith("start")
    assert best(plan(Size(0, 2), lambda at_s: 4.0 if at_s < step_s + 120.0 else 12.0)) == "keep"


def test_workers_that_start_serve_when_they_are_there() -> None:
    """Two workers serve a third of the load. Six more come in 20 s."""
    edges_s = slice_edges_s(SETTINGS.horizon_s)
    demands = [replace(demand(24.0), at_s=at_s) for at_s in edges_s[:-1]]
    alone, joined = (
        SizePlan(SETTINGS, seen(EVERY_S, 24.0, Size(0, 2)), demands, edges_s, 1.0, EVERY_S, coming)
        for coming in ((), (Coming(Size(0, 6), 20.0),))
    )
    assert joined.attainment_now() == alone.attainment_now()
    assert best(alone).startswith("start")
    keep = next(one for one, change in joined.alternatives([ChangeKind.START]) if change is None)
    assert keep.size == Size(0, 8)
    assert best(joined) == "keep"
    assert {one.change.split()[0] for one, _ in joined.alternatives([ChangeKind.START])} <= {"keep", "start"}


def test_what_a_change_costs_decides_whether_a_dip_is_used() -> None:
    """Two workers are too many for 170 s. Their stop and start cost a minute each, or ten minutes."""

    def dip(at_s: float) -> float:
        return 4.0 if at_s < 170.0 else 16.0

    cheap, dear = replace(SETTINGS, start_s=20.0), replace(SETTINGS, start_s=400.0)
    assert best(plan(Size(0, 6), dip, cheap)).startswith("stop")
    assert best(plan(Size(0, 6), dip, dear)) == "keep"


@pytest.mark.parametrize("change_role_s", [2.0, 10.0, 40.0, 60.0])
def test_idle_prefill_workers_become_decode_workers(change_role_s: float) -> None:
    """Also if a change of role takes as long as a start, as with Ray."""
    settings = replace(SETTINGS, min_workers=6, max_workers=6, change_role_s=change_role_s)
    assert best(plan(Size(4, 2), lambda at_s: 10.0, settings)).startswith("change")


def test_roles_stay_if_they_may_not_change() -> None:
    fixed = replace(SETTINGS, may_change_roles=False)
    for one, _ in plan(Size(4, 2), lambda at_s: 10.0, fixed).alternatives():
        assert one.size.prefill == 4


def test_sizes_stay_within_the_bounds() -> None:
    rng = random.Random(1)
    for _ in range(20):
        total = rng.randint(2, 8)
        prefill = rng.randint(0, total - 1)
        rate = rng.uniform(0.1, 60.0)
        for one, change in plan(Size(prefill, total - prefill), lambda at_s, rate=rate: rate).alternatives():
            assert 2 <= one.size.total <= 8
            assert one.size.decode >= 1
            assert 0.0 <= one.attainment <= 1.0
            assert change is None or resized(Size(prefill, total - prefill), change) == one.size


def test_more_misses_than_predicted_lower_the_capacity_that_is_counted_on() -> None:
    controller, size, now_s = Controller(SETTINGS), Size(0, 6), 0.0
    shares, smallest = [], size.total
    for number in range(1, 61):
        now_s = number * EVERY_S
        sums = interval(now_s, 12.0)
        observed = Observed(interval=replace(sums, met=30, missed=30), ready=size, cost=COST)
        decision = controller.decide(observed, now_s)
        shares.append(decision.capacity_share)
        for change in decision.changes:
            size = resized(size, change)
        smallest = min(smallest, size.total)
    assert shares[-1] < 0.9 * shares[0]
    assert size.total > smallest


def test_a_recording_of_observations_decides_the_same() -> None:
    observed = [seen(EVERY_S * number, 2.0 * number, Size(1, 2), queued=number) for number in range(1, 15)]
    observed[7] = replace(observed[7], failed=Change(kind=ChangeKind.START, role=Role.DECODE, count=1))
    stored = [json.dumps(encode_value(one)) for one in observed]
    live, again = Controller(SETTINGS), Controller(SETTINGS)
    for one, line in zip(observed, stored, strict=True):
        read = decode_value(Observed, json.loads(line))
        assert read == one
        decision = live.decide(one, one.interval.end_s)
        assert again.decide(read, one.interval.end_s) == decision
        assert decode_value(Decision, json.loads(json.dumps(encode_value(decision)))) == decision


def test_a_clairvoyant_sees_the_future_instead_of_the_past() -> None:
    future = tuple(interval(EVERY_S * number, 2.0 if number < 10 else 20.0) for number in range(2, 120))
    observed = seen(EVERY_S, 2.0, Size(0, 2), future=future)
    decision = Controller(SETTINGS).decide(observed, EVERY_S)
    assert decision.changes
    assert decision.changes[0].kind is ChangeKind.START


def test_changes_are_named_for_people() -> None:
    change = Change(kind=ChangeKind.CHANGE_ROLE, role=Role.PREFILL, count=2)
    assert str(change) == "change 2 from decode to prefill"
    assert resized(Size(1, 4), change) == Size(3, 2)
    assert NONE.total == 0


@pytest.mark.parametrize(
    "wrong",
    [{"min_workers": 0}, {"min_workers": 20}, {"max_workers": 10**6}, {"start_s": -1.0}, {"horizon_s": float("inf")}],
)
def test_settings_out_of_bounds_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ScalingSettings(**wrong)  # type: ignore[arg-type]


# --- what routers tell ----------------------------------------------------------------------------------------


def capacity(name: str, role: Role, cost: CostPrior, **more: bool) -> WorkerCapacity:
    flags = {"is_connected": True, "is_draining": False, "is_drained": False, **more}
    sizes = {"rows": 2, "kv_tokens": 1000, "max_batch": 8, "max_batch_tokens": 64 if role is Role.DECODE else 512}
    return WorkerCapacity(worker_id=name, role=role, cost=cost, **flags, **sizes)  # type: ignore[arg-type]


def answer(*workers: WorkerCapacity) -> RouterDemand:
    nothing = Interval(begin_s=0.0, end_s=0.0)
    return RouterDemand(
        incarnation="a", sums=nothing, queued=1, running=2, answers=2, answer_tokens=30, workers=workers
    )


def test_prefill_workers_know_no_cost_of_decoding() -> None:
    prefill = replace(COST, prefill_per_token_s=3e-4, decode_base_s=0.0, decode_per_row_s=0.0)
    told = [answer(capacity("p0", Role.PREFILL, prefill), capacity("d0", Role.DECODE, COST))]
    found = observe(interval(5.0, 1.0), told)
    assert (found.cost.decode_base_s, found.cost.decode_per_row_s) == (COST.decode_base_s, COST.decode_per_row_s)
    assert found.cost.prefill_per_token_s == pytest.approx(2e-4)
    assert (found.ready, found.max_batch_tokens, found.tokens_so_far) == (Size(1, 1), 512, 15.0)


def test_a_worker_is_ready_if_it_is_at_each_router() -> None:
    here = answer(capacity("d0", Role.DECODE, COST), capacity("d1", Role.DECODE, COST))
    there = answer(capacity("d0", Role.DECODE, COST), capacity("d1", Role.DECODE, COST, is_connected=False))
    assert ready_workers([here, there]) == {"d0": Role.DECODE}
    assert observe(interval(5.0, 1.0), [here, there]).ready == Size(0, 1)
    assert why_unsettled([here, there], {"d0", "d1"}) == "recovery of d1"
    assert why_unsettled([here], {"d0", "d1"}) == ""
    many = {f"d{number}" for number in range(9)}
    assert why_unsettled([answer()], many) == "recovery of d0, d1, d2, d3 and 5 more"


def test_what_a_change_took_counts_for_half() -> None:
    start, stop = (Change(kind=kind, role=Role.DECODE, count=2) for kind in (ChangeKind.START, ChangeKind.STOP))
    role = Change(kind=ChangeKind.CHANGE_ROLE, role=Role.PREFILL, count=1)
    assert measured(SETTINGS, start, 60.0).start_s == 50.0
    assert measured(SETTINGS, stop, 60.0).drain_s == 20.0, "one after another"
    assert measured(replace(SETTINGS, change_role_s=4.0), role, 16.0).change_role_s == 5.0, "after the drain of 10 s"
    assert measured(SETTINGS, start, 1e9).start_s == 3600.0

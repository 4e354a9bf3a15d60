"""One deadline for all turns of a task: the targets that follow from it, and whether it was met."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.types import Slo
from router.state.turns import IDLE_S, MOST_PACE, Expected, ReuseModel, paced
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival
from tests.unit.router.test_sessions import World, chain

NONE: frozenset[str] = frozenset()
BOTH = frozenset(("ttft_s", "tpot_s"))
ORDINARY = Slo(ttft_s=2.0, tpot_s=0.1, itl_s=0.7)
#: Four turns of 2 s + 100 * 0.1 s = 12 s, with pauses of 10 s between them: 78 s.
FOUR = Expected(tokens=101.0, turns=4.0, pause_s=10.0)
PLAN_S = 4 * 12.0 + 3 * 10.0


def paces(slo: Slo) -> tuple[float, float]:
    return slo.ttft_s / ORDINARY.ttft_s, slo.tpot_s / ORDINARY.tpot_s


# --- the rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "pace"),
    [
        (PLAN_S, 1.0),
        (PLAN_S + 48.0, 2.0),  # ahead: the time left over goes to answers, because the client takes the pauses
        (1e6, MOST_PACE),
        (PLAN_S - 24.0, 1.0),  # behind
        (1.0, 1.0),  # the pauses alone take longer
    ],
)
def test_the_time_left_is_spread_over_the_turns_left(left_s: float, pace: float) -> None:
    found = paced(ORDINARY, NONE, left_s, FOUR)
    assert paces(found) == pytest.approx((pace, pace))
    assert found.itl_s == ORDINARY.itl_s


@pytest.mark.parametrize("left_s", [0.0, -1.0, -math.inf, math.nan])
def test_a_late_task_has_the_ordinary_targets(left_s: float) -> None:
    assert paced(ORDINARY, NONE, left_s, FOUR) == ORDINARY


def test_without_a_prediction_the_ordinary_targets_hold() -> None:
    unknown = Expected(tokens=101.0, turns=None, pause_s=10.0)
    assert paced(ORDINARY, NONE, 1e6, unknown) == ORDINARY


def test_a_stated_target_stays_as_it_is() -> None:
    assert paced(ORDINARY, BOTH, 1e6, FOUR) == ORDINARY
    assert paces(paced(ORDINARY, frozenset(("ttft_s",)), 1e6, FOUR)) == pytest.approx((1.0, MOST_PACE))


HOSTILE = (0.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("slo", [ORDINARY, Slo(ttft_s=1e-6, tpot_s=1e-6), Slo(ttft_s=86_400.0, tpot_s=86_400.0)])
def test_any_number_gives_targets_that_are_bounded_and_no_tighter(value: float, slo: Slo) -> None:
    for left_s in (*HOSTILE, 5.0):
        for expected in (
            Expected(tokens=value, turns=4.0),
            Expected(tokens=9.0, turns=value),
            Expected(tokens=9.0, turns=4.0, pause_s=value),
            Expected(tokens=value, turns=value, pause_s=value),
        ):
            found = paced(slo, NONE, left_s, expected)  # Slo itself rejects what no request may state
            assert slo.ttft_s <= found.ttft_s <= MOST_PACE * slo.ttft_s
            assert slo.tpot_s <= found.tpot_s <= MOST_PACE * slo.tpot_s


# --- what is expected ---------------------------------------------------------------------------------------------


def turn(world: World, number: int, name: str = "a", **facts: Any) -> Expected | None:
    """A turn; what was expected of it, if it belongs to a task."""
    seen: list[Expected] = []

    def expected(turns: float | None, pause_s: float) -> Expected:
        seen.append(Expected(tokens=1.0, turns=turns, pause_s=pause_s))
        return seen[-1]

    event = arrival("r", block_hashes=chain(name, 4 + number), **facts)
    world.sessions.targets(event, NONE, expected, world.now_s)
    world.turn(name, 4 + number, **facts)
    return seen[-1] if seen else None


def test_the_turns_left_are_learned() -> None:
    world = World()
    assert turn(world, 0, "first", slo_task_s=60.0) == Expected(tokens=1.0, turns=None)
    for number in range(40):  # conversations of five turns
        world.talk(f"c{number}", 4, 10.0)
        world.now_s += 10.0
        world.turn(f"c{number}", 8, reuse_within_s=0.0)
    of_turns = []
    for number in range(5):
        found = turn(world, number, slo_task_s=600.0)
        assert found is not None
        assert found.turns is not None
        assert found.pause_s == pytest.approx(10.0, rel=0.2)
        of_turns.append(found.turns)
        world.now_s += 10.0
    assert of_turns[:3] == sorted(of_turns[:3], reverse=True)
    assert of_turns[:3] == pytest.approx([5.0, 4.0, 3.0], abs=1.0)
    assert of_turns[3:] == pytest.approx([2.0, 2.0], abs=0.5)  # turns 4 to 7 are of one class


def test_a_conversation_that_has_never_ended_is_not_expected_to_go_on_forever() -> None:
    model = ReuseModel()
    for _ in range(10_000):
        model.continued(1e9, 0)
    assert 1.0 / (1.0 - model.goes_on) < 60.0
    assert model.pause_s == pytest.approx(IDLE_S)


def test_a_subagent_leaves_time_for_its_caller() -> None:
    world = World()
    for number in range(40):
        world.talk(f"c{number}", 4, 10.0)
        world.turn(f"c{number}", 8, reuse_within_s=0.0)
    world.talk("sub", 5, 10.0, session_id="s")
    alone = turn(world, 5, "sub", session_id="s", slo_task_s=600.0)
    main = turn(world, 0, "main", session_id="s")
    beside = turn(world, 6, "sub", session_id="s")
    assert alone is not None
    assert alone.turns is not None
    assert main is not None
    assert main.turns is not None
    assert beside is not None
    assert main.turns > 1.5 * alone.turns
    assert beside.turns == pytest.approx(main.turns, rel=0.1)


def test_turns_without_a_deadline_belong_to_the_task() -> None:
    world = World()
    assert turn(world, 0) is None
    assert turn(world, 1, slo_task_s=60.0) is not None
    assert turn(world, 2) is not None
    assert turn(world, 0, "other") is None
    task = world.turn("a", 7).session.task
    assert task is not None
    assert (task.turns, task.slo_s, task.began_s) == (3, 60.0, 1.0)


# --- attainment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slo_s", "state"), [(2.0, "in_time"), (1.5, "late")])
def test_a_task_ends_when_its_client_says_so(slo_s: float, state: str) -> None:
    world = World()
    world.turn("a", 4, slo_task_s=slo_s)
    conversation = world.turn("a", 5, reuse_within_s=0.0)
    assert world.counters == {f"task_{state}": 1}
    task = conversation.session.task
    assert task is not None
    assert (task.state, task.turns) == (state, 2)
    world.turn("a", 6, slo_task_s=9.0)
    again = conversation.session.task
    assert again is not task
    assert again is not None
    assert (again.state, again.turns, again.began_s) == ("running", 1, 2.0)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_task_ends_after_a_long_pause(is_served: bool) -> None:
    world = World()
    world.end(world.begin("a", 4, slo_task_s=9.0, session_id="s"), is_served=is_served)
    sub = world.begin("b", 4, session_id="s")
    world.now_s += 2.0 * IDLE_S
    world.sessions.advance(world.now_s)
    assert not world.counters  # one of its requests runs
    world.end(sub)
    world.sessions.advance(world.now_s + IDLE_S - 1.0)
    assert not world.counters
    world.sessions.advance(world.now_s + IDLE_S)
    assert world.counters == {"task_late": 1}
    world.end(world.begin("c", 4, slo_task_s=9.0), is_served=is_served)
    world.sessions.advance(world.now_s + IDLE_S)
    assert world.counters == ({"task_late": 1, "task_in_time": 1} if is_served else {"task_late": 2})


def test_the_last_request_of_a_session_ends_its_task() -> None:
    world = World()
    main = world.begin("a", 4, slo_task_s=9.0, session_id="s", reuse_within_s=0.0)
    sub = world.begin("b", 4, session_id="s")
    world.end(sub)
    assert not world.counters
    world.end(main)
    assert world.counters == {"task_in_time": 1}


def test_a_task_that_never_ends_is_one_task() -> None:
    world = World()
    for number in range(200):
        assert turn(world, number, slo_task_s=50.0) is not None
        world.now_s += 1.0
    assert not world.counters
    [session] = world.sessions.page("", 0, 9)
    view = world.sessions.view(session, {}, lambda _: 16, 1000.0)
    assert view.task is not None
    assert (view.task.state, view.task.turns, view.task.due_at_s) == ("running", 200, 1050.0)


def test_forgotten_tasks_are_unknown_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.state.sessions.MAX_OF_TENANT", 4)
    world = World()
    for number in range(10):
        world.turn(f"c{number}", 4, slo_task_s=0.5 if number == 0 else 100.0)
    assert world.counters == {"task_late": 1, "task_unknown": 5}


# --- in the router ------------------------------------------------------------------------------------------------


def test_the_router_loosens_targets_of_a_task_with_time_to_spare(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.state.conversations.LEAST_SEEN", 0.0)  # one turn is expected
    event = arrival("a", prompt=64, block_hashes=chain("a", 4), slo=Slo(ttft_s=4.0, tpot_s=0.4), slo_task_s=1.0)
    given.arrives("before", prompt=64, block_hashes=chain("b", 4))  # the tenant is known
    assert given.state.targets(event, NONE, given.now_s) is event.slo
    patient = replace(event, slo_task_s=3600.0)
    assert given.state.targets(patient, NONE, given.now_s) == Slo(ttft_s=4.0 * MOST_PACE, tpot_s=0.4 * MOST_PACE)
    assert given.state.targets(replace(patient, slo_task_s=None), NONE, given.now_s) is event.slo
    assert given.state.targets(replace(patient, block_hashes=()), NONE, given.now_s) is event.slo


def test_the_router_counts_tasks_that_end_in_its_idle_time(given: Given) -> None:
    given.arrives("a", prompt=64, block_hashes=chain("a", 4), slo_task_s=60.0)
    given.leaves("a")
    given.now_s += IDLE_S
    given.at(given.now_s + 1.0)
    assert given.state.counters["task_late"] == 1

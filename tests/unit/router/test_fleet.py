"""The cached lists of workers that may receive new work."""

from __future__ import annotations

import random

import pytest

from pdserve.core.protocol import Load
from pdserve.core.types import Role
from router.state.fleet import FIRST_GUESS, MAX_TENANTS, OutputLengths
from router.state.interface import DrainRequested, RouterSettings, UndrainRequested, WorkerForgotten, WorkerLost
from router.state.state import RouterState
from tests.unit.router.router_events import arrival, hello

SILENCE_S = 3.0


def test_usable_workers_follow_messages_and_silence() -> None:
    """RouterState.check compares the cached lists with a new computation."""
    dice = random.Random(3)
    state = RouterState(RouterSettings(worker_silence_s=SILENCE_S))
    names = [f"p{i}" for i in range(3)] + [f"d{i}" for i in range(3)]
    now_s = 0.0
    seen: set[int] = set()
    for _ in range(2000):
        now_s += 5.0 if dice.random() < 0.01 else dice.choice((0.0, 0.01, 0.2))
        name = dice.choice(names)
        kind = dice.random()
        if kind < 0.3:
            state.handle(hello(name, Role.PREFILL if name[0] == "p" else Role.DECODE), now_s)
        elif kind < 0.32:
            state.handle(WorkerLost(worker_id=name), now_s)
        elif kind < 0.33:
            state.handle(WorkerForgotten(worker_id=name), now_s)
        elif kind < 0.34:
            state.handle(DrainRequested(worker_id=name), now_s)
        elif kind < 0.36:
            state.handle(UndrainRequested(worker_id=name), now_s)
        else:
            is_drained = dice.random() < 0.02
            is_draining = is_drained or dice.random() < 0.05
            word = Load(worker_id=name, steps=1, free_blocks=64, is_draining=is_draining, is_drained=is_drained)
            state.handle(word, now_s)
        fleet = state._cluster.fleet
        prefills, decodes = fleet.usable(now_s)
        asked = {one.worker_id for one in fleet.workers.values() if fleet.is_usable(one, now_s)}
        assert {one.worker_id for one in (*prefills, *decodes)} == asked
        assert all(one.role is Role.PREFILL for one in prefills)
        seen.add(len(asked))
        state.check()
    assert seen >= {0, 1, 5, 6}


def test_a_silent_worker_becomes_unusable_without_an_event() -> None:
    state = RouterState(RouterSettings(worker_silence_s=SILENCE_S))
    state.handle(hello("d0", Role.DECODE), 0.0)
    fleet = state._cluster.fleet
    assert fleet.usable(2.9)[1]
    assert not fleet.usable(3.1)[1]
    fleet.heard(fleet.workers["d0"], 3.2)
    assert fleet.usable(3.2)[1]


# --- expected lengths of answers ------------------------------------------------------------------------------


def test_without_answers_the_limit_caps_the_prior() -> None:
    lengths = OutputLengths()
    assert lengths.expected(4096) == FIRST_GUESS
    assert lengths.expected(16) == 16.0


def test_each_class_has_its_own_mean() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe(1000, 300)
        lengths.observe(30, 20)
    assert lengths.expected(1000) == pytest.approx(300.0)
    assert lengths.expected(31) == pytest.approx(20.0)
    assert lengths.expected(100) == pytest.approx(100.0)  # The mean over all classes, limited by max_tokens.
    assert lengths.expected(100_000) == pytest.approx(160.0)


def test_received_tokens_reduce_the_expected_rest() -> None:
    lengths = OutputLengths()
    lengths.observe(1000, 300)
    assert lengths.expected(1000, answered=100) == pytest.approx(200.0)
    assert lengths.expected(1000, answered=400) == 1.0


def test_the_mean_follows_changing_traffic() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.observe(1000, 300)
    for _ in range(200):
        lengths.observe(1000, 30)
    assert lengths.expected(1000) == pytest.approx(30.0, rel=0.25)


def test_a_client_may_say_how_long_its_answer_will_be() -> None:
    lengths = OutputLengths()
    lengths.observe(1000, 300)
    told = arrival("a", max_tokens=1000, expected_tokens=40)
    assert lengths.remaining(told, 0) == 40.0
    assert lengths.remaining(told, 30) == 10.0
    assert lengths.remaining(told, 40) == 260.0  # the mean, because the answer is longer than expected
    assert lengths.remaining(arrival("b", max_tokens=1000), 0) == 300.0


def test_an_expectation_counts_as_far_as_the_tenants_earlier_ones_came_true() -> None:
    lengths = OutputLengths()
    lies, keeps = (arrival("a", max_tokens=4096, expected_tokens=10, tenant=name) for name in ("liar", "honest"))
    for _ in range(50):
        lengths.ended(lies, 1000, is_whole=True)
        lengths.ended(keeps, 10, is_whole=True)
    assert 900.0 < lengths.remaining(lies, 0) < 1000.0
    assert lengths.remaining(keeps, 0) == pytest.approx(10.0)


def test_true_expectations_do_not_make_false_ones_credible() -> None:
    lengths = OutputLengths()
    long, short = (arrival("a", max_tokens=4096, expected_tokens=hint, tenant="t") for hint in (4096, 1))
    for _ in range(200):
        lengths.ended(long, 4096, is_whole=True)
        lengths.ended(short, 1000, is_whole=True)
    assert 900.0 < lengths.remaining(short, 0) < 1000.0
    assert lengths.remaining(long, 0) == 4096.0


def test_a_cut_answer_shows_only_that_it_is_longer_than_expected() -> None:
    lengths = OutputLengths()
    told = arrival("a", max_tokens=4096, expected_tokens=100, tenant="t")
    lengths.ended(told, 3, is_whole=False)
    assert lengths.remaining(told, 0) == 100.0
    lengths.ended(told, 1000, is_whole=False)
    assert lengths.remaining(told, 0) > 300.0
    assert lengths.expected(4096) == FIRST_GUESS


def test_ratios_of_tenants_are_bounded_in_number() -> None:
    lengths = OutputLengths()
    for number in range(MAX_TENANTS + 10):
        lengths.ended(arrival("a", expected_tokens=1, tenant=str(number)), 100, is_whole=True)
    assert len(lengths._hinted) == MAX_TENANTS
    assert lengths.remaining(arrival("a", max_tokens=99, expected_tokens=1, tenant="0"), 0) == 1.0

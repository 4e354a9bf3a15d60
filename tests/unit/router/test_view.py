"""The router's view of a worker: its own reservations, plus other routers' load from the worker's report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.core.protocol import Load
from pdserve.core.types import Role
from router.state.interface import RouterSettings, TimePassed, WakeAt
from router.state.load import Reservation
from router.state.state import RouterState
from router.state.view import WorkerView
from tests.unit.router.router_events import arrival, hello
from tests.unit.router.test_load import FACTS


def view(role: Role = Role.DECODE) -> WorkerView:
    return WorkerView(hello("w", role, max_context_tokens=131_072, **FACTS), 0.0)


def row(name: str, tokens: int = 100, **facts: Any) -> Reservation:
    return Reservation(**{"request_id": name, "attempt": 1, "tokens": tokens, "blocks": 7, "tpot_s": 0.05, **facts})


def prompt(name: str, tokens: int, seconds: float) -> Reservation:
    return Reservation(request_id=name, attempt=1, tokens=tokens, blocks=7, prefill_tokens=tokens, prefill_s=seconds)


def report(**facts: Any) -> Load:
    return Load(**{"worker_id": "w", "steps": 1, "free_blocks": 1000, **facts})


def test_other_routers_load_is_reported_minus_reserved() -> None:
    one = view()
    mine = row("mine")
    one.reserve(mine, 0.0)
    one.arrived(mine)
    one.reported(report(running=3, waiting=2, context_tokens=700, evictable_blocks=50), 0.0)
    # Other routers have four rows with 600 tokens; two of the rows wait.
    assert one.estimated_load() == (5, 2, 700, 1050)
    one.reserve(row("later"), 0.0)
    assert one.estimated_load() == (6, 3, 800, 1043)


def test_an_old_report_does_not_reduce_reservations() -> None:
    one = view()
    for name in "abc":
        one.reserve(row(name), 0.0)
    one.reported(report(running=1, waiting=0, context_tokens=50), 0.0)
    assert one.estimated_load() == (3, 3, 300, 1000)


@pytest.mark.parametrize(
    ("waiting", "pending", "ahead"), [(0, 0, (2, 300)), (2, 300, (2, 300)), (5, 1000, (5, 1000)), (3, 301, (3, 301))]
)
def test_prompts_ahead_are_those_reserved_here_and_by_others(
    waiting: int, pending: int, ahead: tuple[int, int]
) -> None:
    one = view(Role.PREFILL)
    one.reserve(prompt("a", 100, 0.1), 0.0)
    one.reserve(prompt("b", 200, 0.2), 0.0)
    one.reported(report(waiting=waiting, pending_prefill_tokens=pending), 0.0)
    assert (one.prefills_ahead, one.prefill_tokens_ahead) == ahead


def test_a_prefill_worker_is_free_after_its_reservations() -> None:
    one = view(Role.PREFILL)
    first, second = prompt("a", 100, 0.1), prompt("b", 200, 0.2)
    one.reserve(first, 1.0)
    one.reserve(second, 1.0)
    assert one.queue_s(1.0) == pytest.approx(0.3)
    one.computed(first, 1.5)
    assert one.queue_s(1.5) == pytest.approx(0.2)
    one.computed(second, 1.6)
    assert (one.queue_s(1.6), one.totals.prefill_s, one.totals.prefills, one.computed_s) == (0.0, 0.0, 0, 1.6)
    one.check()


def test_pending_tokens_of_others_cost_as_much_as_reserved_ones() -> None:
    one = view(Role.PREFILL)
    one.reserve(prompt("a", 100, 0.4), 0.0)
    one.reported(report(pending_prefill_tokens=300), 0.0)
    assert one.queue_s(0.0) == pytest.approx(300 * 0.4 / 100)
    idle = view(Role.PREFILL)
    idle.reported(report(pending_prefill_tokens=300), 0.0)
    assert idle.queue_s(0.0) == pytest.approx(idle.prefill_s(300, 0))


def test_grant_waits_exclude_the_running_step() -> None:
    one = view()
    one.granted_after(0.050, 0.010, 0.020)
    assert one.grants.typical_s == pytest.approx(0.040)
    assert one.grant_wait_s == pytest.approx(0.1 * 0.030)
    one.granted_after(0.050, 0.010, 0.020)
    assert one.grant_wait_s == pytest.approx(0.1 * 0.030 + 0.1 * (0.030 - 0.003))


def test_a_row_that_ends_frees_its_target_and_then_its_blocks() -> None:
    one = view()
    strict, loose = row("strict", tpot_s=0.01), row("loose", tpot_s=0.05)
    one.reserve(strict, 0.0)
    one.reserve(loose, 0.0)
    assert (one.tightest_tpot_s, one.totals.rows, one.totals.tokens) == (0.01, 2, 200)
    one.left_batch(strict)
    assert (one.tightest_tpot_s, one.totals.rows, one.totals.tokens, one.totals.blocks) == (0.05, 1, 100, 14)
    one.unreserve(strict, 2.0)
    one.unreserve(loose, 3.0)
    assert (one.tightest_tpot_s, one.totals.blocks, one.totals.arriving, one.freed_s) == (math.inf, 0, 0, 3.0)
    one.check()


def test_a_lost_worker_holds_nothing_and_is_not_connected() -> None:
    one = view()
    one.reserve(row("a"), 0.0)
    one.reserve(row("b"), 0.0)
    assert [reservation.request_id for reservation in one.lost()] == ["a", "b"]
    assert not one.is_connected
    assert (one.totals.rows, one.totals.blocks, one.tightest_tpot_s) == (0, 0, math.inf)
    one.check()


def test_tokens_of_a_row_are_counted_where_it_is() -> None:
    one = view()
    landing = row("a", tokens=30)
    one.reserve(landing, 0.0)
    one.grew(landing, 5)
    assert (one.totals.tokens, one.totals.landing_tokens, landing.tokens) == (35, 35, 35)
    one.arrived(landing)
    assert (one.totals.landing_tokens, one.totals.arriving) == (0, 0)
    one.left_batch(landing)
    one.grew(landing, 5)
    assert (one.totals.tokens, landing.tokens, landing.blocks) == (0, 40, one.blocks_for(40))
    one.check()


@pytest.mark.parametrize("silence_s", [1.0, 5.0])
def test_silence_is_checked_after_half_of_the_limit(silence_s: float) -> None:
    state = RouterState(RouterSettings(worker_silence_s=silence_s))
    assert state.handle(hello("d0", Role.DECODE), 0.0) == [WakeAt(at_s=2.0 * silence_s)]
    for share in (0.9, 1.8):  # A router that was suspended for longer would not count the silence.
        assert state.handle(TimePassed(), share * silence_s) == [WakeAt(at_s=2.0 * silence_s)]
    assert state.handle(TimePassed(), 2.0 * silence_s) == [WakeAt(at_s=2.5 * silence_s)]
    assert state.handle(TimePassed(), 2.5 * silence_s) == [WakeAt(at_s=3.0 * silence_s)]


@pytest.mark.parametrize(("gap_s", "is_usable"), [(5.0, False), (5.5, True)])
def test_a_suspended_router_excuses_silence(gap_s: float, is_usable: bool) -> None:
    state = RouterState(RouterSettings(worker_silence_s=5.0))
    state.handle(hello("d0", Role.DECODE), 0.0)
    state.handle(TimePassed(), 0.25)
    state.handle(TimePassed(), 0.25 + gap_s)
    assert bool(state._cluster.fleet.usable(0.25 + gap_s)[1]) is is_usable


def test_messages_about_unknown_workers_are_counted() -> None:
    state = RouterState(RouterSettings())
    state.handle(hello("d0", Role.DECODE), 0.0)
    state.handle(report(worker_id="nobody"), 0.0)
    assert state.counters["late"] == 1
    for _ in range(3):
        state.handle(arrival("a"), 0.0)
    assert state.counters["illegal"] == 2
    assert state.num_running == 1


def test_the_first_row_on_an_idle_worker_starts_a_step() -> None:
    one = view()
    one.reserve(row("a"), 1.0)
    assert one.step_clock.remaining_s(1.002, 0.010) == pytest.approx(0.008)
    one.reserve(row("b"), 1.004)  # The running step continues.
    assert one.step_clock.remaining_s(1.006, 0.010) == pytest.approx(0.004)

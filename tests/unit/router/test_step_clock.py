"""How long a message waits for the end of a decode worker's step."""

from __future__ import annotations

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.cost.latency import CostPrior
from pdserve.core.protocol import TokenRow, TokensArrived
from pdserve.core.types import Role, TokenOut
from router.state.interface import RouterSettings
from router.state.load import MAX_STEPS, Reservation, StepClock
from router.state.view import WorkerView
from tests.unit.router.given import Given
from tests.unit.router.router_events import hello

STEP_S = 0.010
SLOW_READER = CostPrior(prefill_per_token_s=1e-3, decode_base_s=0.004)


def test_half_of_an_unreported_step_is_left() -> None:
    assert StepClock().remaining_s(7.0, STEP_S) == 0.5 * STEP_S
    assert StepClock().remaining_s(7.0, 0.0) == 0.0


@pytest.mark.parametrize(("since_s", "remaining_s"), [(0.0, 0.010), (0.002, 0.008), (0.009, 0.001), (0.013, 0.007)])
def test_the_rest_is_counted_from_the_last_end(since_s: float, remaining_s: float) -> None:
    phase = StepClock()
    phase.ended(3.0)
    phase.ended(7.0)
    assert phase.remaining_s(7.0 + since_s, STEP_S) == pytest.approx(remaining_s)


def test_an_old_step_end_is_ignored() -> None:
    phase = StepClock()
    phase.ended(7.0)
    assert phase.remaining_s(7.0 + 1.01 * MAX_STEPS * STEP_S, STEP_S) == 0.5 * STEP_S


@pytest.fixture
def view() -> WorkerView:
    return WorkerView(hello("d0", Role.DECODE, cost=SLOW_READER), 0.0)


def reserve(view: WorkerView, request_id: str, now_s: float, *, prefill_s: float = 0.0) -> Reservation:
    reservation = Reservation(
        request_id=request_id,
        attempt=1,
        tokens=100,
        blocks=7,
        prefill_tokens=100 if prefill_s else 0,
        prefill_s=prefill_s,
        tpot_s=0.2,
    )
    view.reserve(reservation, now_s)
    return reservation


def step(view: WorkerView, now_s: float, *rows: tuple[str, int]) -> None:
    told = [
        TokenRow(key=AttemptKey("d0", name, 1), output_index=0, tokens=(TokenOut(token_id=7),) * count)
        for name, count in rows
    ]
    view.stepped(TokensArrived(worker_id="d0", rows=tuple(told)), now_s)


def residents(view: WorkerView, count: int) -> list[tuple[str, int]]:
    """Requests that decode, with one token each in one step."""
    for number in range(count):
        view.arrived(reserve(view, f"r{number}", 0.0))
    return [(f"r{number}", 1) for number in range(count)]


def test_an_empty_worker_reads_its_messages_at_once(view: WorkerView) -> None:
    assert view.rest_of_step_s(5.0) == 0.0


def test_reported_steps_predict_the_next_end(view: WorkerView) -> None:
    step(view, 5.0, *residents(view, 3))
    whole_s = view.load.step_s
    assert view.rest_of_step_s(5.0) == pytest.approx(whole_s)
    assert view.rest_of_step_s(5.0 + 0.75 * whole_s) == pytest.approx(0.25 * whole_s)
    assert view.rest_of_step_s(6.0) == pytest.approx(view.half_step_s)


def test_a_message_takes_half_of_a_round_trip(view: WorkerView) -> None:
    step(view, 5.0, *residents(view, 1))
    view.grants.observe(0.5 * view.load.step_s)
    assert view.rest_of_step_s(5.0) == pytest.approx(0.75 * view.load.step_s)


@pytest.mark.parametrize("rows", [[("r0", 4), ("r1", 4), ("r2", 4)], [("r0", 1)]])
def test_only_complete_reports_set_the_step_clock(view: WorkerView, rows: list[tuple[str, int]]) -> None:
    residents(view, 3)
    step(view, 5.0, *rows)
    assert view.rest_of_step_s(5.001) == pytest.approx(view.half_step_s)


def test_a_lone_prefill_begins_when_it_is_sent(view: WorkerView) -> None:
    reads_s = view.prefill_s(100, 0)
    reserve(view, "a", 5.0, prefill_s=reads_s)
    assert view.rest_of_step_s(5.0) == pytest.approx(reads_s)
    left_s = reads_s - 2.0 * view.load.step_s
    assert left_s > 0.0, "else the next line compares nothing"
    assert view.rest_of_step_s(5.0 + reads_s - left_s) == pytest.approx(left_s)


def test_a_step_is_no_longer_than_the_remaining_prompts(view: WorkerView) -> None:
    step(view, 5.0, *residents(view, 2))
    reserve(view, "a", 5.0, prefill_s=0.02)
    assert view.load.step_s < 0.02 < view.load.reads_s, "else the next line compares nothing"
    assert view.rest_of_step_s(5.0) == pytest.approx(0.02)


def test_the_running_step_delays_the_first_token() -> None:
    def predicted_s(after_s: float) -> float:
        given = Given(RouterSettings(policy="goodput", is_strict=True))
        given.connect_decode("d0")
        given.arrives("a")
        given.seated(request_id="a")
        given.tokens(0, [100], request_id="a")
        given.now_s += 1.0
        given.tokens(1, [101], request_id="a")
        given.now_s += after_s
        given.arrives("b")
        found = given.state.explain("b")
        assert found is not None
        return found.decision.candidates[0].ttft_s

    assert predicted_s(0.002) - predicted_s(0.006) == pytest.approx(0.004)

"""The predicted steps of a decode worker, from its running requests and its step rule."""

from __future__ import annotations

import math

import pytest

from decode_worker.planning import ChunkRule
from pdserve.core.cost.latency import WIDEST_BAND, CostModel, CostPrior
from pdserve.core.cost.step_rule import DUE_SHARE, LONGEST_GAP
from pdserve.core.protocol import BatchTimed, Load
from pdserve.core.types import Role
from router.state.load import NO_SLACK, Reservation, WorkerQueue
from router.state.view import WorkerView
from tests.unit.router.router_events import hello

# About an 8B model on an H100.
COST = CostPrior(
    prefill_base_s=9e-4,
    prefill_per_token_s=1.8e-5,
    prefill_per_token_context_s=9.7e-10,
    decode_base_s=6e-3,
    decode_per_row_s=8e-6,
    decode_per_context_token_s=4.2e-8,
)
FACTS = {"cost": COST, "num_blocks": 25_000, "max_batch": 256, "max_batch_tokens": 2048, "inbox_depth": 16}


def decode(rows: int = 0, tokens: int = 12_000, tpot_s: float = 0.05) -> WorkerView:
    view = WorkerView(hello("d0", Role.DECODE, max_context_tokens=131_072, **FACTS), 0.0)
    for index in range(rows):
        reservation = Reservation(
            request_id=f"row{index}", attempt=1, tokens=tokens, blocks=tokens // 16, tpot_s=tpot_s
        )
        view.reserve(reservation, 0.0)
        view.arrived(reservation)
    return view


def read(cost: CostModel, rows: int, tokens: int, tpot_s: float, prompt: int, held: float) -> tuple[float, float]:
    """Seconds until the worker has prefilled the prompt in steps with its rows, and the time of as many steps without
    a prompt."""
    rule = ChunkRule(cost, least=16, most=2048)
    at, seconds, alone_s = 0, 0.0, 0.0
    while at < prompt:
        chunk = rule.longest(
            rows=rows, context_tokens=rows * tokens, allowed_s=tpot_s if rows else None, held_share=held
        )(at)
        chunk = min(chunk, prompt - at)
        seconds += cost.step_s(rows, rows * tokens, chunk, chunk * (at + chunk / 2))
        alone_s += cost.decode_s(rows, rows * tokens)
        at += chunk
    return seconds, alone_s


@pytest.mark.parametrize("rows", [0, 4, 16, 30])
@pytest.mark.parametrize("tpot_s", [0.03, 0.05, 0.1])
@pytest.mark.parametrize("prompt", [500, 4_000, 30_000])
def test_predicted_prefill_with_rows_matches_the_worker(rows: int, tpot_s: float, prompt: int) -> None:
    view = decode(rows, tpot_s=tpot_s)
    actual_s, alone_s = read(view.cost, rows, 12_000, tpot_s, prompt, rows * 12_000 / 400_000)
    # If decoding alone uses the whole target, chunks are tiny. The prediction need only be long enough to be avoided.
    is_full = rows == 30 and tpot_s == 0.03
    assert view.prefill_time_s(prompt, 0) == pytest.approx(actual_s, rel=1.0 if is_full else 0.35)
    if rows and prompt > 4_000 and not is_full:
        assert view.load.decode_stall_share == pytest.approx(1.0 - alone_s / actual_s, abs=0.1)


def read_with_slack(view: WorkerView, rows: int, tokens: int, tpot_s: float, prompt: int, slack_s: float) -> float:
    """Seconds until a worker has prefilled the prompt, in steps with rows that are `slack_s` ahead of their due times,
    as decode_worker.planning allows."""
    cost, rule = view.cost, ChunkRule(view.cost, least=16, most=2048)
    held = (rows * tokens / 16 + rows) / 25_000
    at, now_s, due_s = 0, 0.0, slack_s
    while at < prompt:
        left_s, due_share_s = due_s - now_s, DUE_SHARE * tpot_s
        allowed_s = min(LONGEST_GAP * tpot_s, left_s) if left_s >= due_share_s else due_share_s
        chunk = rule.longest(rows=rows, context_tokens=rows * tokens, allowed_s=allowed_s, held_share=held)(at)
        chunk = min(chunk, prompt - at)
        now_s += cost.step_s(rows, rows * tokens, chunk, chunk * (at + chunk / 2))
        due_s += due_share_s
        at += chunk
    return now_s


@pytest.mark.parametrize("rows", [1, 8, 24])
@pytest.mark.parametrize("slack_s", [0.0, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("prompt", [500, 4_000, 16_000])
def test_predicted_prefill_with_slack_matches_the_worker(rows: int, slack_s: float, prompt: int) -> None:
    view = decode(rows, tokens=2_000, tpot_s=0.03)
    for reservation in view.reservations.values():
        reservation.prompt_tokens = reservation.tokens  # No output yet: the next token is due with the first.
        reservation.first_token_s = 1.0 + slack_s
    slack = view.slack(1.0)
    assert slack.total_s == pytest.approx(slack_s)
    assert slack.longest_step_s == pytest.approx(LONGEST_GAP * 0.03)
    actual_s = read_with_slack(view, rows, 2_000, 0.03, prompt, slack_s)
    assert view.prefill_time_s(prompt, 0, slack) == pytest.approx(actual_s, rel=0.2)
    assert view.prefill_time_s(prompt, 0, slack) <= view.prefill_time_s(prompt, 0)
    assert view.prefill_share_s(prompt, 0, slack) <= view.prefill_share_s(prompt, 0)


def test_slack_is_the_minimum_over_rows() -> None:
    view = decode(3, tokens=100, tpot_s=0.05)
    for ahead, reservation in zip((10, 4, 30), view.reservations.values(), strict=True):
        reservation.prompt_tokens, reservation.first_token_s = reservation.tokens - ahead, 0.0
    assert view.slack(0.1).total_s == pytest.approx(4 * DUE_SHARE * 0.05 - 0.1)
    assert view.slack(9.0).total_s == 0.0
    next(iter(view.reservations.values())).itl_s = 0.07
    view.cached_load = None  # a reservation's targets never change in the product
    assert view.slack(0.1).longest_step_s == 0.07
    view.free_at_s = 0.15  # Earlier prompts use the slack.
    assert view.slack(0.1).total_s == pytest.approx(4 * DUE_SHARE * 0.05 - 0.15)


def test_slack_is_unknown_without_rows_or_with_other_routers() -> None:
    view = decode(2, tokens=100)
    assert view.slack(0.0) == NO_SLACK  # These rows have no token yet.
    for reservation in view.reservations.values():
        view.joined(reservation, 5.0)
    assert view.slack(0.0) != NO_SLACK
    view.reported(Load(worker_id="d0", steps=1, free_blocks=100, running=5), 0.0)
    assert view.slack(0.0) == NO_SLACK


def test_prompts_in_a_queue_share_steps() -> None:
    view = decode(8)
    rule = ChunkRule(view.cost, least=16, most=2048)
    prompts, rows, context = [700] * 6, 8, 8 * 12_000
    seconds, left = 0.0, list(prompts)
    while left:  # As on the worker: the next prompt gets the rest of a step's budget.
        budget = rule.longest(rows=rows, context_tokens=context, allowed_s=0.05, held_share=context / 400_000)(0)
        tokens = work = 0.0
        while left and budget:
            count = min(left[0], budget)
            tokens, work, budget = tokens + count, work + count * (700 - left[0] + count / 2), budget - count
            left[0] -= count
            if not left[0]:
                del left[0]
        seconds += view.cost.step_s(rows, context, tokens, work)
    assert sum(view.prefill_share_s(one, 0) for one in prompts) == pytest.approx(seconds, rel=0.1)
    assert sum(view.prefill_time_s(one, 0) for one in prompts) > 1.15 * seconds


def test_an_impossible_target_limits_no_request() -> None:
    assert decode(3, tpot_s=0.001).load.tightest_s == math.inf
    assert decode(3, tpot_s=0.02).load.tightest_s == 0.02


def test_new_tokens_update_the_cached_load() -> None:
    view = decode(3)
    before = view.load
    for reservation in list(view.reservations.values()):
        view.grew(reservation, 40)
    assert view.load is before
    followed = (before.step_s, before.context, before.blocks, before.free_tokens)
    view.reported(Load(worker_id="d0", steps=9, free_blocks=view.hello.num_blocks), 0.0)
    view.reported(Load(worker_id="d0", steps=9, free_blocks=view.report.free_blocks), 0.0)
    assert followed[0] == pytest.approx(view.load.step_s)
    assert followed[1] == view.load.context


def test_reservations_invalidate_the_cached_load() -> None:
    view = decode(1)
    before = view.load.step_s
    reservation = Reservation(request_id="new", attempt=1, tokens=10_000, blocks=625, tpot_s=0.05)
    view.reserve(reservation, 0.0)
    assert view.load.step_s == pytest.approx(before + 8e-6 + 10_000 * 4.2e-8)
    assert view.load.arriving == 1
    assert view.totals.landing_tokens == 10_000
    view.arrived(reservation)
    assert view.load.arriving == 0
    assert view.totals.landing_tokens == 0
    view.unreserve(reservation, 0.0)
    assert view.load.step_s == pytest.approx(before)
    view.check()


def test_the_error_band_needs_samples_and_is_bounded() -> None:
    view = decode(1)
    assert view.load.band == 0.0
    for seconds in (0.01, 0.03) * 20:
        view.timed(
            BatchTimed(
                worker_id="d0",
                rows=8,
                prefill_tokens=0,
                prefill_token_context=0,
                context_tokens=8000,
                step_s=seconds,
            )
        )
    view.reported(Load(worker_id="d0", steps=1, free_blocks=100), 0.0)
    assert 0.1 < view.load.band <= WIDEST_BAND


def test_an_empty_worker_is_open_despite_its_report() -> None:
    view = decode()
    view.reported(Load(worker_id="d0", steps=1, free_blocks=0, running=300), 0.0)
    assert view.load.free_tokens == math.inf


@pytest.mark.parametrize("uncached", [0.0, -3.0])
def test_no_uncached_tokens_take_no_time(uncached: float) -> None:
    load_ = decode(rows=3).load
    assert (load_.prefill_time_s(uncached, 100.0), load_.prefill_share_s(uncached, 100.0)) == (0.0, 0.0)


@pytest.mark.parametrize("rows", [0, 6])
def test_the_share_of_a_prompt_is_the_sum_of_its_chunks(rows: int) -> None:
    load_ = decode(rows).load
    chunk = load_._chunk(100.0 + 0.5 * 4 * 2048)
    prompt = 3 * chunk
    cached = 100.0 + 0.5 * (4 * 2048 - prompt)  # The middle of this chunk is at the given position.
    one_s = [load_._cost.prefill_s(chunk, cached + index * chunk) for index in range(3)]
    rows_s = load_.row_s * rows + load_.token_s * load_.context
    assert load_.prefill_share_s(prompt, cached) == pytest.approx(sum(one_s) + 3 * rows_s)


# --- queue of one prefill worker ------------------------------------------------------------------------------
# Its order, and the sums that policies read.


def test_a_worker_queue_keeps_order_and_sums() -> None:
    line = WorkerQueue()
    line.join("a", 100, 0.1, (1, 0, 1))
    line.join("b", 20, 0.02, (1, 0, 2))
    line.join("c", 3, 0.003, (1, 0, 3))
    assert line.leave("b")
    line.check()
    assert (list(line), line.first(), len(line)) == (["a", "c"], ((1, 0, 1), "a"), 2)
    assert line.uncached_tokens == 103
    assert "b" not in line
    assert not line.leave("b"), "it left before"


def test_resumed_and_prioritised_requests_go_first() -> None:
    line = WorkerQueue()
    line.join("early", 1, 0.1, (1, 0, 1))
    line.join("high", 1, 0.1, (1, -5, 2))
    line.join("begun", 1, 0.1, (0, 0, 3))
    assert list(line) == ["begun", "high", "early"]
    line.check()


def test_an_empty_worker_queue_has_exact_sums() -> None:
    line = WorkerQueue()
    for number in range(10):
        line.join(f"r{number}", 1, 0.1, (1, 0, number))
    for number in range(10):
        line.leave(f"r{number}")
    assert (line.prefill_s, line.uncached_tokens, len(line)) == (0.0, 0, 0)

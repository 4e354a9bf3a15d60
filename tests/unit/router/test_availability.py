"""Which workers have room now, and when a worker without room is checked again."""

from __future__ import annotations

from typing import Any

import pytest

from router.policy.availability import (
    LONGEST_WAIT_S,
    SHORTEST_WAIT_S,
    can_start,
    is_decode_open,
    not_avoided,
    opens_in_s,
    wait_for_decode,
    wait_for_prefill,
)
from router.policy.interface import Choice, Obstacle
from router.state.view import WorkerView
from tests.unit.router.test_goodput import ask, view, with_queue, with_rows


def closed(one: WorkerView, until_s: float) -> WorkerView:
    one.closed_until_s = until_s
    return one


def test_a_prefill_worker_can_start_within_a_batch_of_being_free() -> None:
    one = view("p0")
    assert can_start(one, 100, 0.0)
    batch_s = one.batch_s
    assert can_start(with_queue(one, batch_s * 0.99), 100, 0.0)
    assert not can_start(with_queue(view("p1"), batch_s * 1.01), 100, 0.0)
    assert can_start(with_queue(view("p2"), batch_s * 1.01), 100, batch_s)


@pytest.mark.parametrize(("depth", "expected"), [(1, False), (2, True)])
def test_a_worker_with_a_full_inbox_has_no_room(depth: int, expected: bool) -> None:
    assert can_start(with_queue(view("p0", inbox_depth=depth), 0.001), 100, 0.0) is expected


@pytest.mark.parametrize(("tokens", "expected"), [(1600, True), (1601, False)])
def test_a_busy_prefill_worker_needs_the_blocks_of_the_prompt(tokens: int, expected: bool) -> None:
    one = with_queue(view("p0", num_blocks=100), 0.001)
    assert can_start(one, tokens, 0.0) is expected
    assert can_start(view("p1", num_blocks=100), 10**6, 0.0), "an empty worker knows best"


def test_a_worker_that_declined_is_closed_for_a_time() -> None:
    assert not can_start(closed(view("p0"), 1.0), 100, 0.99)
    assert can_start(closed(view("p0"), 1.0), 100, 1.0)


def test_a_busy_worker_is_checked_again_one_batch_early() -> None:
    one = view("p0")
    wait_s = 0.1
    with_queue(one, one.batch_s + wait_s)
    assert opens_in_s(one, 0.0) == pytest.approx(wait_s)
    assert opens_in_s(one, wait_s) == pytest.approx(SHORTEST_WAIT_S)
    assert opens_in_s(one, wait_s + 1.0) == LONGEST_WAIT_S, "what is missing then comes with word from the worker"
    assert opens_in_s(closed(one, 0.2), 0.0) == pytest.approx(0.2)
    assert opens_in_s(closed(one, 100.0), 0.0) == LONGEST_WAIT_S


@pytest.mark.parametrize(
    ("facts", "rows", "tokens", "expected"),
    [
        ({}, 3, 100, True),
        ({"max_batch": 3}, 3, 100, False),
        ({"max_batch": 4}, 3, 100, True),
        ({"num_blocks": 40}, 3, 16 * 16, True),  # Three rows hold 21 blocks, and each may grow by one.
        ({"num_blocks": 40}, 3, 16 * 16 + 1, False),
        ({"max_batch": 0}, 0, 10**6, True),
    ],
)
def test_a_decode_worker_needs_a_row_and_blocks_to_grow(
    facts: dict[str, Any], rows: int, tokens: int, expected: bool
) -> None:
    one = with_rows(view("d0", **facts), rows, tokens=112)
    assert is_decode_open(one, one.estimated_load(), ask(tokens), 0.0) is expected
    assert not is_decode_open(closed(one, 1.0), one.estimated_load(), ask(tokens), 0.0)


@pytest.mark.parametrize(("depth", "expected"), [(2, False), (3, True)])
def test_a_decode_workers_inbox_is_bounded(depth: int, expected: bool) -> None:
    one = with_rows(view("d0", inbox_depth=depth), 2, tokens=112, joined=False)
    assert is_decode_open(one, one.estimated_load(), ask(100), 0.0) is expected


def test_workers_that_failed_the_request_are_avoided_if_there_are_others() -> None:
    views = [view("d0"), view("d1")]
    assert not_avoided(views, ask()) == views
    assert not_avoided(views, ask(avoid_workers=frozenset({"d0"}))) == views[1:]
    assert not_avoided(views, ask(avoid_workers=frozenset({"d0", "d1"}))) == views


def test_a_waiting_request_retries_when_a_worker_may_open() -> None:
    soon, late = view("p0"), view("p1")
    with_queue(soon, soon.batch_s + 0.05)
    with_queue(late, late.batch_s + 0.2)
    waits = wait_for_prefill([late, soon], 0.0)
    assert (waits.choice, waits.obstacle, waits.retry_in_s) == (Choice.WAIT, Obstacle.PREFILL, pytest.approx(0.05))
    waits = wait_for_decode([closed(view("d0"), 0.1), closed(view("d1"), 0.05), view("d2")], 0.0)
    assert (waits.choice, waits.obstacle, waits.retry_in_s) == (Choice.WAIT, Obstacle.DECODE, pytest.approx(0.05))
    assert wait_for_decode([view("d0")], 0.0).retry_in_s == LONGEST_WAIT_S

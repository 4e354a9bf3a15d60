"""Which waiting requests admission control gives up, for work and capacity that are known exactly."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from router.state.forecast import Capacity
from router.state.queue import Entry, Queue
from router.state.rejection import Forecast, excess

LEVEL = (1, 0)
Job = tuple[float, float]  # prefill seconds, seconds until its first token is due

jobs = st.lists(st.tuples(st.sampled_from([0.125, 0.25, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 1.5, 2.0])), max_size=7)


def waiting(jobs: list[Job], *tenants: str) -> Queue:
    """In the order of their due times, as the goodput policy orders them."""
    queue = Queue()
    for serial, (prefill_s, due_s) in enumerate(jobs):
        entry = Entry(
            key=due_s,
            serial=serial,
            request_id=f"r{serial}",
            level=LEVEL,
            tenant=tenants[serial] if tenants else "",
            prefill_s=prefill_s,
            late_at_s=due_s - prefill_s,
        )
        queue.add(entry)
    return queue


def given_up(queue: Queue, *, by_length: bool = True) -> list[str]:
    """In turn; the rest can start in time on one worker that is free."""
    gone, forecast = [], Forecast(Capacity([(0.0, 1.0)]))
    while (found := excess(queue, LEVEL, forecast, 0.0, by_length=by_length)) is not None:
        gone.append(found.request_id)
        queue.remove(found.request_id)
    return gone


def test_no_request_is_given_up_if_all_fit() -> None:
    assert given_up(waiting([(0.5, 1.0), (0.5, 1.0)])) == []


def test_the_longest_is_given_up() -> None:
    assert given_up(waiting([(0.25, 1.0), (0.75, 1.0), (0.5, 1.0)])) == ["r1"]


def test_of_equal_requests_the_last_is_given_up() -> None:
    assert given_up(waiting([(0.5, 1.0), (0.5, 1.0), (0.5, 1.0)])) == ["r2"]


def test_without_the_rule_the_last_is_given_up() -> None:
    assert given_up(waiting([(0.75, 1.0), (0.5, 1.0)]), by_length=False) == ["r1"]


def test_a_longer_one_that_starts_later_is_kept() -> None:
    assert given_up(waiting([(0.5, 0.5), (0.5, 0.75), (2.0, 9.0)])) == ["r1"]


def test_the_rest_is_in_time_in_any_case() -> None:
    queue = waiting([(1.0, 0.5)])
    assert given_up(queue) == ["r0"]
    assert len(queue) == 0


@given(jobs)
def test_the_rest_can_start_in_time(jobs: list[Job]) -> None:
    queue = waiting(jobs)
    given_up(queue)
    at_s = 0.0
    for entry in queue.on_time(LEVEL):
        assert at_s <= entry.late_at_s
        at_s += entry.prefill_s


@given(jobs, st.sampled_from([0.5, 1.0, 1.5, 2.0]))
def test_with_equal_due_times_no_choice_keeps_more(jobs: list[Job], due_s: float) -> None:
    same = [(prefill_s, due_s) for prefill_s, _ in jobs]
    kept = len(same) - len(given_up(waiting(same)))
    best = max(
        size
        for size in range(len(same) + 1)
        if any(sum(prefill_s for prefill_s, _ in some) <= due_s for some in combinations(same, size))
    )
    assert kept == best


def test_a_tenant_gives_up_its_own_request() -> None:
    queue = waiting([(1.0, 1.25), (0.25, 0.75), (0.75, 1.25)], "light", "heavy", "heavy")
    for _ in range(8):
        queue.fairness.charge("heavy", 1.0)
    assert queue.fairness.is_ahead("heavy", "light")
    assert "r0" not in given_up(queue)

"""The description of a waiting request for policies and for the queue."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.core.types import Role, Slo
from router.state.fleet import Fleet, OutputLengths, able, entry_of, policy_input_of
from router.state.interface import RouterSettings
from router.state.request import Request
from router.state.state import RouterState
from tests.unit.router.router_events import BLOCK, arrival, hello

NOW_S = 5.0
RULES = frozenset({"priority", "fairness", "least-slack"})


def request(serial: int = 7, **facts: Any) -> Request:
    facts = {"slo": Slo(ttft_s=2.0, tpot_s=0.1), "priority": 3, "tenant": "blue", **facts}
    return Request(facts=arrival("a", **facts), arrived_s=4.0, deadline_at_s=9.0, serial=serial)


@pytest.fixture
def fleet() -> Fleet:
    """p0, p1, d0 and d1; d1 and p1 are in their second generation."""
    state = RouterState(RouterSettings())
    for name in ("p0", "p1", "d0", "d1"):
        role = Role.PREFILL if name[0] == "p" else Role.DECODE
        state.handle(hello(name, role, generation=1 if name[1] == "0" else 2), NOW_S)
    return state._cluster.fleet


def test_a_policy_sees_the_rest_of_a_request(fleet: Fleet) -> None:
    one = request(prompt=100, max_tokens=8)
    fresh = policy_input_of(one, fleet, OutputLengths(), NOW_S)
    assert (fresh.num_tokens, fresh.max_new_tokens, fresh.expected_tokens, fresh.is_resumed) == (100, 8, 8.0, False)
    assert (fresh.waited_s, fresh.deadline_left_s, fresh.priority, fresh.tenant) == (1.0, 4.0, 3, "blue")
    one.output = [10, 11, 12]
    begun = policy_input_of(one, fleet, OutputLengths(), NOW_S)
    assert (begun.num_tokens, begun.max_new_tokens, begun.expected_tokens, begun.is_resumed) == (103, 5, 5.0, True)


def test_a_resumed_requests_wait_starts_at_its_last_token(fleet: Fleet) -> None:
    one = request(prompt=100, max_tokens=8)
    one.output, one.first_token_s, one.last_token_s = [10, 11, 12], 4.2, 4.6
    told = policy_input_of(one, fleet, OutputLengths(), NOW_S)
    assert told.waited_s == pytest.approx(NOW_S - 4.6), "its TTFT is over"
    assert told.answer_left_s == pytest.approx(7 * 0.1 - (NOW_S - 4.2)), "of 8 tokens at 0.1 s each"
    assert policy_input_of(request(), fleet, OutputLengths(), NOW_S).answer_left_s == math.inf


def test_resumed_requests_are_ordered_by_due_time(fleet: Fleet) -> None:
    """An answer that is far ahead of its target tolerates a longer gap."""
    ahead, behind = request(serial=1), request(serial=2)
    ahead.output, ahead.first_token_s, ahead.first_emitted_s = [1] * 50, 1.0, 1.0
    behind.output, behind.first_token_s, behind.first_emitted_s = [1], 4.0, 4.0
    entries = [entry_of(one, fleet, OutputLengths(), RULES, NOW_S) for one in (ahead, behind)]
    assert [one.key for one in entries] == pytest.approx([1.0 + 50 * 0.1, 4.0 + 0.1])
    assert sorted(entries)[0].serial == 2


def test_cached_blocks_of_known_workers_count_in_tokens(fleet: Fleet) -> None:
    one = request()
    one.cached_blocks = {"p0": 3, "d1": 2, "gone": 9}
    assert policy_input_of(one, fleet, OutputLengths(), NOW_S).cached_tokens == {"p0": 3 * BLOCK, "d1": 2 * BLOCK}


def test_only_failed_incarnations_are_avoided(fleet: Fleet) -> None:
    one = request()
    one.avoid_workers = {("d0", "d0.1"), ("d1", "d1.1"), ("gone", "gone.1")}
    one.avoid_pairs = {
        (("p0", "p0.1"), ("d0", "d0.1")),
        (("p1", "p1.2"), ("d0", "d0.1")),
        (("p1", "p1.1"), ("d0", "d0.1")),  # p1 was restarted since then.
        (("p0", "p0.1"), ("d1", "d1.1")),  # d1 was restarted since then.
    }
    told = policy_input_of(one, fleet, OutputLengths(), NOW_S)
    assert told.avoid_workers == {"d0"}
    assert told.avoid_pairs == {("p0", "d0"), ("p1", "d0")}


def test_a_worker_that_is_too_small_is_skipped(fleet: Fleet) -> None:
    one, views = request(), [fleet.workers["d0"], fleet.workers["d1"]]
    most = views[0].max_tokens
    assert able(one, views, most) == views
    assert able(one, views, most + 1) == []
    one.too_large_for = {("d0", "d0.1"), ("d1", "d1.1")}
    assert able(one, views, 1) == views[1:], "d1 was restarted since, and may have more memory"


def test_queue_entries_sort_by_level_then_start_time(fleet: Fleet) -> None:
    plain, urgent, begun = request(), request(priority=9), request(priority=0)
    begun.output, begun.first_token_s, begun.first_emitted_s = [1], 4.5, 4.5
    entries = {
        name: entry_of(one, fleet, OutputLengths(), RULES, NOW_S)
        for name, one in (("plain", plain), ("urgent", urgent), ("begun", begun))
    }
    assert sorted(entries, key=lambda name: entries[name].level) == ["begun", "urgent", "plain"]
    assert plain.unloaded is not None
    one = entries["plain"]
    assert one.key == 4.0 + 2.0
    assert one.late_at_s == pytest.approx(4.0 + 2.0 - plain.unloaded.ttft_s)
    assert (one.prefill_s, one.tenant, one.serial) == (plain.unloaded.ttft_s, "blue", 7)
    assert entries["begun"].key == pytest.approx(4.6)


def test_rules_that_are_off_leave_the_order_of_arrival(fleet: Fleet) -> None:
    none: frozenset[str] = frozenset()
    first, second = (entry_of(request(serial=n, priority=n), fleet, OutputLengths(), none, NOW_S) for n in (1, 2))
    assert first < second
    assert first.level == second.level
    assert (first.tenant, first.prefill_s, first.key) == ("", 0.0, 1)

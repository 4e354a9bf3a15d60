"""Fairness between tenants: which tenant yields, no credit for idle time, bounded memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.state.queue import MAX_IDLE, Fairness
from tests.support.examples import examples


def test_a_tenant_is_ahead_after_more_than_a_quantum() -> None:
    fairness = Fairness()
    fairness.joins("a")
    fairness.joins("b")
    for _ in range(2):
        fairness.charge("a", 2.0)
    assert not fairness.is_ahead("a", "b")
    fairness.charge("a", 2.0)
    assert fairness.is_ahead("a", "b")
    assert not fairness.is_ahead("b", "a")
    assert fairness.in_turn(["a", "b"]) == ["b"]


def test_idleness_earns_no_credit() -> None:
    fairness = Fairness()
    fairness.joins("busy")
    for _ in range(100):
        fairness.joins("busy")
        fairness.charge("busy", 1.0)
        fairness.leaves("busy")
    fairness.joins("idle")
    assert fairness.served_s("busy") - fairness.served_s("idle") <= 1.0


def test_a_surplus_survives_a_short_absence() -> None:
    fairness = Fairness()
    fairness.joins("fair")
    fairness.joins("greedy")
    for _ in range(10):
        fairness.charge("greedy", 1.0)
    fairness.leaves("greedy")
    fairness.joins("greedy")
    assert fairness.is_ahead("greedy", "fair")


def test_a_correction_never_gives_credit() -> None:
    fairness = Fairness()
    fairness.joins("a")
    fairness.joins("b")
    fairness.charge("a", 5.0)
    fairness.correct("a", -2.0)
    assert fairness.served_s("a") == 3.0
    fairness.correct("a", -50.0)
    assert fairness.served_s("a") == fairness.served_s("b")
    fairness.check()


def test_memory_of_tenants_is_bounded() -> None:
    fairness = Fairness()
    fairness.joins("steady")
    for number in range(5 * MAX_IDLE):
        fairness.joins(f"t{number}")
        fairness.charge(f"t{number}", 1.0 + number % 7)
        fairness.leaves(f"t{number}")
        fairness.check()
    assert len(fairness) <= MAX_IDLE + 1


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(0.1, 3.0), min_size=50, max_size=200), st.integers(2, 5))
def test_tenants_that_always_wait_get_equal_shares(works: list[float], tenants: int) -> None:
    """Holds whichever tenant is picked among those in turn. The test picks the most served one, the worst choice."""
    fairness = Fairness()
    names = [f"t{index}" for index in range(tenants)]
    for name in names:
        fairness.joins(name)
    for work_s in works:
        chosen = max(fairness.in_turn(names), key=lambda name: (fairness.served_s(name), name))
        fairness.charge(chosen, work_s)
        fairness.check()
    served = [fairness.served_s(name) for name in names]
    assert max(served) - min(served) <= 2.0 * 3.0 + 3.0


def test_memory_of_corrected_idle_tenants_is_bounded() -> None:
    fairness = Fairness()
    fairness.joins("steady")
    for number in range(3 * MAX_IDLE):
        fairness.correct(f"t{number}", 1.0)
        fairness.check()
    assert len(fairness) <= MAX_IDLE + 1

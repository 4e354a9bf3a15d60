"""Fairness between tenants: who is ahead of whom, what idleness earns (nothing), how much is remembered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.shares import MAX_IDLE, Shares
from tests.support.examples import examples


def test_a_tenant_is_ahead_once_it_has_had_more_than_a_quantum_more() -> None:
    shares = Shares()
    shares.joins("a")
    shares.joins("b")
    for _ in range(2):
        shares.charge("a", 2.0)
    assert not shares.is_ahead("a", "b")
    shares.charge("a", 2.0)
    assert shares.is_ahead("a", "b")
    assert not shares.is_ahead("b", "a")
    assert shares.in_turn(["a", "b"]) == ["b"]


def test_idleness_earns_no_credit() -> None:
    shares = Shares()
    shares.joins("busy")
    for _ in range(100):
        shares.joins("busy")
        shares.charge("busy", 1.0)
        shares.leaves("busy")
    shares.joins("idle")
    assert shares.served_s("busy") - shares.served_s("idle") <= 1.0


def test_what_a_tenant_had_too_much_is_still_known_after_a_short_absence() -> None:
    shares = Shares()
    shares.joins("fair")
    shares.joins("greedy")
    for _ in range(10):
        shares.charge("greedy", 1.0)
    shares.leaves("greedy")
    shares.joins("greedy")
    assert shares.is_ahead("greedy", "fair")


def test_a_correction_moves_a_tenant_but_never_into_credit() -> None:
    shares = Shares()
    shares.joins("a")
    shares.joins("b")
    shares.charge("a", 5.0)
    shares.correct("a", -2.0)
    assert shares.served_s("a") == 3.0
    shares.correct("a", -50.0)
    assert shares.served_s("a") == shares.served_s("b")
    shares.check()


def test_any_number_of_tenants_is_remembered_in_bounded_memory() -> None:
    shares = Shares()
    shares.joins("steady")
    for number in range(5 * MAX_IDLE):
        shares.joins(f"t{number}")
        shares.charge(f"t{number}", 1.0 + number % 7)
        shares.leaves(f"t{number}")
        shares.check()
    assert len(shares) <= MAX_IDLE + 1


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(0.1, 3.0), min_size=50, max_size=200), st.integers(2, 5))
def test_tenants_that_always_wait_get_equal_shares(works: list[float], tenants: int) -> None:
    """Whoever is picked among those in turn, here always the most served one: the worst choice."""
    shares = Shares()
    names = [f"t{index}" for index in range(tenants)]
    for name in names:
        shares.joins(name)
    for work_s in works:
        chosen = max(shares.in_turn(names), key=lambda name: (shares.served_s(name), name))
        shares.charge(chosen, work_s)
        shares.check()
    served = [shares.served_s(name) for name in names]
    assert max(served) - min(served) <= 2.0 * 3.0 + 3.0


def test_corrections_of_idle_tenants_are_remembered_in_bounded_memory() -> None:
    shares = Shares()
    shares.joins("steady")
    for number in range(3 * MAX_IDLE):
        shares.correct(f"t{number}", 1.0)
        shares.check()
    assert len(shares) <= MAX_IDLE + 1

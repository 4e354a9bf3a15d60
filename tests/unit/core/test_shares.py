"""No caller takes a pool that all use, and no number of tenants takes the operators' part of it."""

from __future__ import annotations

import random

import pytest

from pdserve.core.access.shares import (
    BYTES_WEIGHT,
    CONTROL,
    COUNT_WEIGHT,
    OPERATOR,
    SMALL_BYTES,
    Shares,
    caller_of,
    kept_of,
    to_close,
)
from pdserve.core.errors import Overloaded


def fill(shares: Shares, caller: str) -> int:
    """Takes all that the caller gets, one at a time."""
    taken = 0
    while shares.fits(caller, 1):
        shares.add(caller, 1)
        taken += 1
    shares.check()
    return taken


@pytest.mark.parametrize("weight", [BYTES_WEIGHT, COUNT_WEIGHT])
def test_a_caller_leaves_room_for_others(weight: int) -> None:
    shares, free = Shares(512, weight), 512 - kept_of(512)
    for tenant in ("first", "second", "third"):
        taken = fill(shares, caller_of(tenant))
        assert 0 < taken <= free * weight // (weight + 1) + 1
        free -= taken
    assert free > 0


@pytest.mark.parametrize("limit", [8, 15, 16, 480])
def test_many_tenants_leave_the_operators_their_part(limit: int) -> None:
    shares, kept = Shares(limit, COUNT_WEIGHT, is_controlled=True), kept_of(limit)
    taken = sum(fill(shares, caller_of(f"t{number}")) for number in range(1000))
    assert taken == limit - 2 * kept > 0
    assert (fill(shares, OPERATOR), fill(shares, CONTROL)) == (kept, kept)
    assert shares.total == limit


def test_operators_leave_tenants_their_part() -> None:
    shares = Shares(480, COUNT_WEIGHT, is_controlled=True)
    taken = fill(shares, OPERATOR)
    assert taken == kept_of(480) + 315  # three quarters of the part that all use
    assert fill(shares, CONTROL) >= kept_of(480)
    assert fill(shares, caller_of("late")) > 0


def test_several_operators_have_one_kept_part() -> None:
    shares = Shares(256, COUNT_WEIGHT)
    fill(shares, caller_of("tenant"))
    while any(fill(shares, caller_of(f"t{number}")) for number in range(100)):
        pass
    assert sum(fill(shares, f"10.0.0.{number}") for number in range(50)) == kept_of(256)


def test_shares_add_up_in_any_order() -> None:
    rng = random.Random(0)
    callers = [OPERATOR, CONTROL, *(caller_of(f"t{number}") for number in range(5))]
    shares = Shares(1000, BYTES_WEIGHT, is_controlled=True)
    held: list[tuple[str, int]] = []
    for _ in range(2000):
        caller, amount = rng.choice(callers), rng.randrange(1, 100)
        if rng.random() < 0.6 and shares.fits(caller, amount):
            shares.add(caller, amount)
            held.append((caller, amount))
        elif held:
            caller, amount = held.pop(rng.randrange(len(held)))
            shares.add(caller, -amount)
        assert shares.total <= 1000
        shares.check()


def test_bodies_are_charged_as_they_arrive_and_given_back() -> None:
    shares = Shares(12 * SMALL_BYTES, BYTES_WEIGHT)
    with shares.body("tenant a") as first, shares.body("tenant a") as second, shares.body("tenant b") as other:
        first.add(6 * SMALL_BYTES)
        with pytest.raises(Overloaded, match="for all callers"):
            second.add(SMALL_BYTES + 1)
        second.add(1)
        assert shares.total == 6 * SMALL_BYTES + 1
        other.add(SMALL_BYTES)
    assert shares.total == 0
    with shares.body("tenant a", 100 * SMALL_BYTES):
        assert shares.total == 100 * SMALL_BYTES
    assert shares.total == 0
    assert not shares._of
    shares.check()


def test_a_body_that_does_not_fit_is_not_charged() -> None:
    shares = Shares(100, BYTES_WEIGHT)
    with shares.body("tenant a", 500):
        with pytest.raises(Overloaded, match="500 bytes are being served, of 100"), shares.body("tenant b", 1):
            pass
        with shares.body(OPERATOR, kept_of(100)):
            assert shares.total == 500 + kept_of(100)
    assert shares.total == 0


def test_large_requests_leave_room_for_small_ones() -> None:
    shares = Shares(16 * SMALL_BYTES, BYTES_WEIGHT)
    held = [shares.body(f"tenant {name}", 3 * SMALL_BYTES) for name in "abc"]
    with held[0], held[1], held[2]:
        with (
            pytest.raises(Overloaded, match=f"of {12 * SMALL_BYTES} for all"),
            shares.body("tenant d", 3 * SMALL_BYTES),
        ):
            pass
        with shares.body("tenant d", SMALL_BYTES):
            assert shares.total == 10 * SMALL_BYTES


# -- connections that wait --------------------------------------------------------------------------------------


def hosts(names: str) -> dict[str, str]:
    """`a1 a2 b1`: connections of hosts a and b."""
    return {one: one[0] for one in names.split()}


@pytest.mark.parametrize(
    ("silent", "active", "closed"),
    [
        ("", "", None),
        ("a1", "", "a1"),
        ("", "a1 a2", "a1"),
        ("a1", "a2 a3", "a1"),
        ("a1", "a2 a3 a4", "a2"),  # a quarter is silent
        ("a1 b1 b2", "", "b1"),
        ("", "a1 b1 b2", "b1"),
        ("", "a1 b1 b2 a2", "a1"),
    ],
)
def test_the_host_with_the_most_loses_one(silent: str, active: str, closed: str | None) -> None:
    assert to_close(hosts(silent), hosts(active)) == closed


def test_expected_connections_take_no_share() -> None:
    waiting = hosts("a1 a2 a3 b1 b2")
    assert to_close({}, waiting) == "a1"
    assert to_close({}, waiting, {"a": 2}) == "b1"
    assert to_close(waiting, {}, {"a": 1, "b": 1}) == "a1"
    assert to_close({}, waiting, {"a": 9, "b": 9}) == "a1"

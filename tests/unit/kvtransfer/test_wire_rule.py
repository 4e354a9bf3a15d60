"""The rule that decides when float KV is sent as int8."""

from __future__ import annotations

import pytest

from kvtransfer.reshape.sender import CONVERTED_BYTES_S, LEAST_BYTES, MAX_PAIRS, REVISIT, WireRule

MIB = 1 << 20


@pytest.mark.parametrize(("choice", "is_quantised"), [("exact", False), ("int8", True)])
def test_a_fixed_choice_ignores_the_link(choice: str, is_quantised: bool) -> None:
    rule = WireRule(choice)
    for bytes_s in (1e6, 1e12):
        rule.sent("d", 64 * MIB, 64 * MIB / bytes_s)
        assert rule.is_quantised("d") is is_quantised


def test_unknown_and_fast_links_send_exact_values() -> None:
    rule = WireRule("auto")
    assert not rule.is_quantised("d")
    rule.sent("d", 64 * MIB, 64 * MIB / (2 * CONVERTED_BYTES_S))
    assert not rule.is_quantised("d")


def test_a_slow_link_is_measured_again() -> None:
    rule = WireRule("auto")
    rule.sent("slow", 64 * MIB, 64 * MIB / 1e8)
    choices = [rule.is_quantised("slow") for _ in range(2 * REVISIT)]
    assert choices.count(False) == 2
    assert not rule.is_quantised("other")
    for _ in range(20):
        rule.sent("slow", 64 * MIB, 64 * MIB / 1e10)
    assert not rule.is_quantised("slow")


def test_small_transfers_are_not_measured() -> None:
    rule = WireRule("auto")
    rule.sent("d", LEAST_BYTES - 1, 10.0)
    rule.sent("d", 64 * MIB, 0.0)
    assert not rule.is_quantised("d")


def test_links_that_are_not_used_are_forgotten() -> None:
    rule = WireRule("auto")
    for number in range(MAX_PAIRS + 1):
        rule.sent(f"d{number}", 64 * MIB, 10.0)
    assert not rule.is_quantised("d0")
    assert rule.is_quantised("d1")

"""Which bars the benchmark of a change of role finds missed."""

from __future__ import annotations

from typing import Any

from benchmarks.role_change import ChangeRow, Traffic, missed_bars, render


def row(**changes: Any) -> ChangeRow:
    facts: dict[str, Any] = {"role": "prefill", "drain_s": 1.0, "after_drain_s": 0.5, "began_s": 10.0, "ready_s": 12.0}
    return ChangeRow(**{**facts, "says": "is a prefill worker", **changes})


def traffic(kept_after: list[bool]) -> Traffic:
    before = [(1.0, True), (9.0, True), (9.9, False), (9.95, True)]
    return Traffic(kept=before + [(32.0 + number, one) for number, one in enumerate(kept_after)])


def test_a_row_has_the_shares_around_its_change() -> None:
    found = row().shares(traffic([True, False]))
    assert found[0] == 0.75
    assert found[-1] == 0.5
    assert all(share != share for share in found[1:3]), "no request arrived then"


def test_each_bar_can_be_missed() -> None:
    good = traffic([True] * 3 + [False])
    assert missed_bars([row()], good, 0) == []
    assert missed_bars([row(after_drain_s=2.1)], good, 0) == ["2.1 s"]
    assert missed_bars([row()], traffic([True, False]), 0) == ["50% kept after 75%"]
    assert missed_bars([row()], traffic([]), 0) == ["nan% kept after 75%"]
    good.failed = 2
    assert missed_bars([row()], good, 1) == ["2 failed", "weights read 1 times"]
    assert render([row()], good, 1).endswith("weights read 1 times; bars missed: 2 failed, weights read 1 times")

"""What the admission benchmark judges, without a simulation."""

from __future__ import annotations

from benchmarks.admission import BASELINES, WITHOUT, config, render


def test_a_row_must_beat_every_baseline() -> None:
    even = dict.fromkeys(("goodput", WITHOUT, *BASELINES), 0.9)
    rows = [
        ("even", even),
        ("rule", even | {WITHOUT: 0.904}),
        ("baseline", even | {"mooncake": 0.904}),
        ("near", even | {WITHOUT: 0.902, "mooncake": 0.902}),
    ]
    verdicts = [line.split("|")[-2].strip() for line in render("load", rows).splitlines()[2:]]
    assert verdicts == ["met", "missed", "missed", "met"]


def test_the_rule_is_the_only_difference() -> None:
    assert config(WITHOUT, 0, 0).router.rules_off == ("rejection",)
    assert config(WITHOUT, 0, 0).workers == config("goodput", 0, 0).workers
    assert {one.role.value for one in config("colocated", 0, 0).workers} == {"decode"}

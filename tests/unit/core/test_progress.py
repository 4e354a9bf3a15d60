"""Shares, estimates and texts of progress, and its lines from a worker to the launcher."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.progress import (
    PhaseProgress,
    Progress,
    bar_line,
    duration_text,
    log_text,
    phase_line,
    phase_of,
)


def test_the_rest_is_estimated_at_the_mean_rate() -> None:
    progress = Progress(100.0, 10.0)
    assert (progress.share, progress.remaining_s(11.0)) == (0.0, None)
    progress.update(25.0, 20.0)
    assert (progress.share, progress.remaining_s(20.0)) == (0.25, 30.0)
    assert progress.remaining_s(26.0) == 24.0, "it falls between two updates"
    assert progress.remaining_s(99.0) == 0.0
    assert progress.time_text(20.0) == "30 s left"


def test_too_little_gives_no_estimate() -> None:
    progress = Progress(100.0, 0.0)
    progress.update(50.0, 0.1)
    assert progress.remaining_s(0.1) is None
    assert progress.time_text(7.0) == "7 s so far"
    early = Progress(100.0, 0.0)
    early.update(1.0, 30.0)
    assert early.remaining_s(30.0) is None


def test_the_amount_never_decreases_and_an_unknown_total_has_no_share() -> None:
    progress = Progress(10.0, 0.0)
    for done in (5.0, 3.0):
        progress.update(done, 1.0)
    assert progress.share == 0.5
    progress.update(99.0, 1.0)
    assert progress.share == 1.0
    for total in (None, 0.0):
        assert Progress(total, 0.0).share is None


def test_a_wide_terminal_gets_a_bar_and_a_narrow_one_the_share() -> None:
    words = ("d0 weights", 0.5, "30 s left", "1.00 of 2.00 GB")
    assert bar_line(*words, 80) == "[############............]  50%  d0 weights  30 s left  1.00 of 2.00 GB"
    assert bar_line(*words, 40) == " 50%  30 s left  d0 weights"
    assert bar_line("planning", None, "3 s so far", "", 80) == "planning  3 s so far"
    assert log_text(*words) == "d0 weights: 50%, 30 s left, 1.00 of 2.00 GB"
    assert log_text("planning", None, "3 s so far", "") == "planning: 3 s so far"


@given(st.text(), st.none() | st.floats(0.0, 1.0), st.text(), st.integers(0, 120))
def test_a_line_never_wraps_or_moves_the_cursor(label: str, share: float | None, detail: str, columns: int) -> None:
    line = bar_line(label, share, "1 s left", detail, columns)
    assert len(line) <= max(columns - 1, 1)
    assert line.isprintable()


def test_durations_have_the_unit_that_fits() -> None:
    found = [duration_text(one) for one in (0.2, 59.0, 61.0, 3599.0, 3700.0)]
    assert found == ["1 s", "59 s", "1 min 01 s", "59 min 59 s", "1 h 01 min"]


def test_a_phase_survives_its_line() -> None:
    one = PhaseProgress(phase="weights", done=1.5e9, total=3e9, unit="bytes", seconds=0.5)
    assert phase_of(phase_line(one)) == one
    assert one.detail == "1.50 of 3.00 GB"
    assert replace(one, done=4.25e6, total=99.9e6).detail == "4.2 of 99.9 MB"
    assert replace(one, done=0.0, total=0.1e9).detail == "0.00 of 0.10 GB"
    steps = PhaseProgress(phase="decode graphs", done=3, total=3, unit="graphs", seconds=0.5)
    assert (steps.detail, steps.is_over, one.is_over) == ("3 of 3 graphs", True, False)


@pytest.mark.parametrize(
    "line",
    [
        "progress of the day",
        "progress {}",
        "progress [1]",
        'progress {"phase": "a", "done": 1, "total": 2, "unit": "b"}',
        'progress {"phase": "a", "done": "x", "total": 2, "unit": "b", "seconds": 1}',
        'progress {"phase": "a", "done": NaN, "total": 2, "unit": "b", "seconds": 1}',
        'progress {"phase": "a", "done": -1, "total": 2, "unit": "b", "seconds": 1}',
        'progress {"phase": 7, "done": 1, "total": 2, "unit": "b", "seconds": 1}',
        'progress {"phase": "' + "a" * 41 + '", "done": 1, "total": 2, "unit": "b", "seconds": 1}',
        'progress {"phase": "' + "a" * 999 + '", "done": 1, "total": 2, "unit": "b", "seconds": 1}',
        'a progress {"phase": "a", "done": 1, "total": 2, "unit": "b", "seconds": 1}',
    ],
)
def test_other_lines_are_not_progress(line: str) -> None:
    assert phase_of(line) is None

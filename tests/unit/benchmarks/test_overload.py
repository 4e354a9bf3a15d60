"""What the overload benchmark counts and judges, without a cluster."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.openloop import OfferedLoad, Rejection, TimedAnswer
from benchmarks.overload import OverloadRow, loads_of, render, row_of
from pdserve.core.types import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def answer(ttft_s: float, total_s: float, tokens: int = 11) -> TimedAnswer:
    return TimedAnswer(ttft_s=ttft_s, total_s=total_s, added_s=0.0, tokens=tokens, prompt_tokens=50)


def row(load: float, kept: int = 100, rejections_s: tuple[float, ...] = ()) -> OverloadRow:
    return OverloadRow(
        load=load,
        seconds=10.0,
        sent=200,
        kept=kept,
        kept_tokens=40 * kept,
        late=0,
        rejected=len(rejections_s),
        failed=0,
        rejections_s=rejections_s,
        late_start_s=0.0,
    )


def test_only_answers_within_both_targets_are_kept() -> None:
    answers = [answer(0.9, 1.8), answer(1.1, 1.2), answer(0.5, 1.6), answer(0.5, 0.5, tokens=1)]
    rejections = [Rejection(after_s=0.3), Rejection(after_s=0.1)]
    seen = OfferedLoad(
        rate_rps=1.0, sent=7, failed=3, late_start_s=0.0, wall_s=10.0, answers=answers, rejections=rejections
    )
    found = row_of(3.0, 10.0, seen, SLO)
    assert (found.kept, found.late, found.rejected, found.failed) == (2, 2, 2, 1)
    assert found.kept_tokens == 2 * 50
    assert found.rejections_s == (0.1, 0.3)


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (row(0.7), "met"),
        (row(0.7, rejections_s=(0.0,)), "missed: 1 rejected"),
        (row(1.0, kept=10, rejections_s=(9.0,)), ""),
        (row(5.0, kept=95, rejections_s=(0.001,) * 99 + (0.3,)), "met"),
        (row(5.0, kept=94, rejections_s=(0.001,)), "missed: kept"),
        (row(5.0, rejections_s=(0.021,) * 3), "missed: median"),
        (row(5.0, rejections_s=(0.001,) * 90 + (0.3,) * 10), "missed: p95"),
    ],
)
def test_each_load_has_its_bars(one: OverloadRow, verdict: str) -> None:
    assert one.verdict(10.0) == verdict


def test_the_table_has_a_line_for_each_load() -> None:
    table = render(10.0, 800.0, SLO, [row(0.7), row(5.0, rejections_s=(0.001, 0.5))])
    assert "| 0.7 | 200 | 10.0 | 100% | 50% | 0 | 0 | 0 |  | met |" in table
    assert "| 5 | 200 | 10.0 | 100% | 50% | 0 | 2 | 0 | 1 / 1 / 500 / 500 ms | missed: p95 |" in table


def test_invalid_loads_are_rejected() -> None:
    assert loads_of("0.7,5") == [0.7, 5.0]
    for text in ("", "a", "0", "-1", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="numbers above 0"):
            loads_of(text)

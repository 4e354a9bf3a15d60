"""Routers receive the mean of similar decode steps, and prefill steps individually."""

from __future__ import annotations

import pytest

from pdserve.core.effects import StepAccount
from pdserve.worker.timed import LONGEST_SPANS, STEPS, TimedSteps

READS = StepAccount(prefill_tokens=64, prefill_token_context=2048.0)


def decodes(rows: int, context_tokens: int) -> StepAccount:
    return StepAccount(decode_rows=rows, context_tokens=context_tokens)


def test_equal_decode_steps_are_reported_as_a_mean() -> None:
    steps = TimedSteps(0.025)
    for number in range(STEPS - 1):
        assert steps.observe(decodes(2, 100 + 2 * number), 0.004, 0.004 * number) is None
    assert steps.observe(decodes(2, 100 + 2 * (STEPS - 1)), 0.012, 0.1) == (
        decodes(2, 100 + STEPS - 1),
        pytest.approx((0.004 * (STEPS - 1) + 0.012) / STEPS),
    )
    assert steps.observe(decodes(2, 120), 0.004, 0.2) is None, "the next mean begins anew"


def test_steps_with_other_rows_are_averaged_separately() -> None:
    steps = TimedSteps(0.025)
    told = []
    for number in range(2 * STEPS):
        rows = 2 + number % 2
        told.append(steps.observe(decodes(rows, 100 * rows), 0.002 * rows, 0.005 * number))
    assert told[:-2] == [None] * (2 * STEPS - 2)
    assert told[-2] == (decodes(2, 200), pytest.approx(0.004))
    assert told[-1] is None, "so soon after the other"
    assert steps.observe(decodes(3, 300), 0.006, 1.0) == (decodes(3, 300), pytest.approx(0.006))


def test_slow_periods_count_by_steps() -> None:
    steps, told, now_s = TimedSteps(0.025), [], 0.0
    for number in range(100 * STEPS):
        step_s = 0.004 if number // STEPS % 2 else 0.012
        now_s += step_s
        found = steps.observe(decodes(1, 50), step_s, now_s)
        if found is not None:
            told.append(found[1])
    assert sum(told) / len(told) == pytest.approx(0.008, rel=0.02)


def test_long_steps_are_not_waited_for() -> None:
    steps = TimedSteps(0.025)
    assert steps.observe(decodes(1, 50), LONGEST_SPANS * 0.025, 1.0) == (decodes(1, 50), LONGEST_SPANS * 0.025)


def test_a_prefill_step_is_reported_individually() -> None:
    steps = TimedSteps(1.0)
    mixed = StepAccount(decode_rows=2, context_tokens=100, prefill_tokens=64, prefill_token_context=2048.0)
    assert steps.observe(decodes(2, 100), 0.010, 0.0) is None
    assert steps.observe(mixed, 0.2, 0.5) == (mixed, 0.2)
    assert steps.observe(READS, 0.1, 1.1) is None
    assert steps.observe(READS, 0.1, 1.6) == (READS, 0.1)


def test_short_steps_are_not_reported_more_often() -> None:
    steps = TimedSteps(1.0)
    told = [number for number in range(3000) if steps.observe(decodes(1, 50), 0.001, 0.001 * number) is not None]
    assert told == [STEPS - 1, 1000 + STEPS - 1, 2000 + STEPS - 1]

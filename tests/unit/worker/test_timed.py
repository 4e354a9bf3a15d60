"""Routers are told the mean of like decode steps, and steps that read prompts one by one."""

from __future__ import annotations

from pdserve.core.effects import StepAccount
from pdserve.worker.timed import TimedSteps

READS = StepAccount(prefill_tokens=64, prefill_token_context=2048.0)


def decodes(rows: int, context_tokens: int) -> StepAccount:
    return StepAccount(decode_rows=rows, context_tokens=context_tokens)


def test_like_decode_steps_are_told_as_their_mean() -> None:
    steps = TimedSteps(1.0)
    assert steps.took(decodes(2, 100), 0.010, 0.0) == (decodes(2, 100), 0.010)
    assert steps.took(decodes(2, 102), 0.010, 0.3) is None
    assert steps.took(decodes(2, 104), 0.010, 0.6) is None
    told = steps.took(decodes(2, 106), 0.040, 1.0)
    assert told is not None
    assert told == (decodes(2, 104), (0.010 + 0.010 + 0.040) / 3)


def test_steps_of_other_rows_are_not_mixed_in() -> None:
    steps = TimedSteps(1.0)
    steps.took(decodes(2, 100), 0.010, 0.0)
    assert steps.took(decodes(2, 102), 0.010, 0.3) is None
    assert steps.took(decodes(3, 300), 0.030, 1.0) == (decodes(3, 300), 0.030)


def test_a_step_that_reads_is_told_alone_and_parts_what_is_before_from_what_follows() -> None:
    steps = TimedSteps(1.0)
    mixed = StepAccount(decode_rows=2, context_tokens=100, prefill_tokens=64, prefill_token_context=2048.0)
    steps.took(decodes(2, 100), 0.010, 0.0)
    assert steps.took(decodes(2, 102), 0.010, 0.3) is None
    assert steps.took(mixed, 0.2, 0.5) is None
    assert steps.took(READS, 0.1, 1.1) == (READS, 0.1)
    assert steps.took(decodes(2, 104), 0.020, 1.2) is None
    assert steps.took(decodes(2, 106), 0.030, 2.1) == (decodes(2, 105), 0.025)

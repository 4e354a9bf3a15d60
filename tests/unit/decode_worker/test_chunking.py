"""Prompt chunks beside decode rows meet the decode rows' TPOT targets."""

import pytest

from decode_worker.planning import ChunkRule
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.cost.step_rule import Allowance
from pdserve.core.effects import StepAccount


def rule(**prior: float) -> ChunkRule:
    return ChunkRule(CostModel(CostPrior(**prior)), least=16, most=512)


def sure(chunks: ChunkRule) -> None:
    """Observes steps that take exactly as long as predicted, until the error is small."""
    for _ in range(200):
        steps = [StepAccount(decode_rows=1, context_tokens=10)]
        steps.append(StepAccount(prefill_tokens=100))
        for step in steps:
            chunks.observe(step, chunks.cost.step_s(step.decode_rows, step.context_tokens, step.prefill_tokens))


def test_without_decode_rows_a_chunk_is_as_large_as_possible() -> None:
    assert rule().longest(rows=0, context_tokens=0, allowed_s=None)(0) == 512


def test_a_chunk_takes_the_time_that_the_rows_allow() -> None:
    chunks = rule(prefill_base_s=0.0, prefill_per_token_s=0.001, prefill_per_token_context_s=0.0, decode_base_s=0.02)
    sure(chunks)
    # 0.9 * 0.1 - 1e-4 for the row - context.
    assert chunks.longest(rows=1, context_tokens=10, allowed_s=0.1)(0) == 89
    assert chunks.longest(rows=1, context_tokens=10, allowed_s=10.0)(0) == 512


def test_an_untrained_cost_model_leaves_a_larger_reserve() -> None:
    chunks = rule(prefill_base_s=0.0, prefill_per_token_s=0.001, prefill_per_token_context_s=0.0, decode_base_s=0.02)
    assert chunks.longest(rows=1, context_tokens=10, allowed_s=0.1)(0) == 79  # An error above WIDEST_BAND: 0.1 / 1.25.


def test_a_chunk_after_more_context_is_shorter() -> None:
    prior = {"prefill_base_s": 0.0, "prefill_per_token_s": 0.001, "decode_base_s": 0.02}
    prior["prefill_per_token_context_s"] = 1e-6
    near = rule(**prior).longest(rows=1, context_tokens=10, allowed_s=0.1)(0)
    far = rule(**prior).longest(rows=1, context_tokens=10, allowed_s=0.1)(1000)
    assert near == 76
    assert far == 39


def test_free_arithmetic_is_used_even_if_the_target_is_missed() -> None:
    chunks = rule(
        prefill_base_s=0.0, prefill_per_token_s=0.001, prefill_per_token_context_s=0.0, decode_per_row_s=0.0,
        decode_base_s=0.2, decode_per_context_token_s=0.0,
    )  # fmt: skip
    assert chunks.longest(rows=1, context_tokens=10, allowed_s=0.1)(0) == 204


def test_a_waiting_prompt_makes_progress_without_time_left() -> None:
    full = rule(decode_base_s=0.01, decode_per_row_s=0.2, prefill_per_token_s=0.001)
    assert full.longest(rows=1, context_tokens=10, allowed_s=0.1)(0) == 16


def test_tokens_that_cost_nothing_fill_the_chunk() -> None:
    """A calibration may find no cost per token, as with the toy engine."""
    free = rule(decode_base_s=0.2, prefill_per_token_s=0.0, prefill_per_token_context_s=0.0)
    assert free.longest(rows=1, context_tokens=10, allowed_s=0.1)(0) == 512
    nothing = rule(**dict.fromkeys(CostPrior.__dataclass_fields__, 0.0))
    assert nothing.longest(rows=1, context_tokens=10, allowed_s=0.1)(0) == 512


def test_rows_with_much_memory_shorten_a_step() -> None:
    chunks = rule()

    def tokens(held_share: float) -> int:
        return chunks.longest(rows=1, context_tokens=10, allowed_s=0.1, held_share=held_share)(0)

    unpriced, full = tokens(0.0), tokens(1.0)
    sizes = [tokens(held / 10) for held in range(11)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == unpriced
    assert full < unpriced / 4
    assert full >= 16


DECODE_S = 0.02 + 1e-4 + 10 * 1e-7  # of one row over ten tokens, with the other coefficients at their defaults
# 20 ms more than reading the weights, whatever the number of prompt tokens; 100 tokens make that a fifth of their time
FIXED = {
    "prefill_base_s": 0.04,
    "prefill_per_token_s": 0.001,
    "prefill_per_token_context_s": 0.0,
    "decode_base_s": 0.02,
}
NEEDED_S = (0.02 + DECODE_S + 0.1) * 1.25  # A model without samples leaves a reserve.


def waits(allowance: Allowance, *, wanted: int = 1000, **changes: float) -> bool:
    return rule(**(FIXED | changes)).is_worth_waiting(allowance, rows=1, context_tokens=10, wanted=wanted)


@pytest.mark.parametrize(
    ("step_s", "gain_s", "expected"),
    [
        (NEEDED_S, 0.01, False),  # There is slack.
        (NEEDED_S - 1e-3, 0.01, True),
        (NEEDED_S - 0.079, 0.01, True),
        (NEEDED_S - 0.081, 0.01, False),  # It would take more than MAX_WAITS steps.
        (NEEDED_S - 1e-3, 0.0, False),  # The rows gain no slack.
    ],
)
def test_prompts_wait_for_slack_with_a_fixed_cost(step_s: float, gain_s: float, expected: bool) -> None:
    assert waits(Allowance(step_s, 1.0, gain_s)) is expected


def test_prompts_wait_no_longer_than_needed() -> None:
    short_s = (0.02 + DECODE_S + 0.03) * 1.25
    assert not waits(Allowance(short_s, 1.0, 0.01), wanted=30)
    assert waits(Allowance(short_s - 1e-3, 1.0, 0.01), wanted=30)
    assert waits(Allowance(0.099, 0.1, 0.01))
    assert not waits(Allowance(0.1, 0.1, 0.01))  # No step may be longer.


def test_prompts_do_not_wait_without_a_reason() -> None:
    assert not waits(Allowance(0.05, 1.0, 0.01), decode_base_s=0.04)
    assert not waits(Allowance(None))
    assert not waits(Allowance(0.05, 1.0, 0.01), prefill_per_token_s=0.0)
    assert not rule(**FIXED).is_worth_waiting(Allowance(None), rows=0, context_tokens=0, wanted=1000)

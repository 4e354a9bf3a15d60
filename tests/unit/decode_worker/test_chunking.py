"""Prompt chunks beside decode rows meet the decode rows' TPOT targets."""

from decode_worker.chunking import ChunkRule
from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel, CostPrior


def rule(**prior: float) -> ChunkRule:
    return ChunkRule(CostModel(CostPrior(**prior)), least=16, most=512)


def sure(chunks: ChunkRule) -> None:
    """Shows it steps that take exactly what it believes, until its band is narrow."""
    for _ in range(200):
        steps = [StepAccount(decode_rows=1, context_tokens=10)]
        steps.append(StepAccount(prefill_tokens=100))
        for step in steps:
            chunks.observe(step, chunks.cost.step_s(step.decode_rows, step.context_tokens, step.prefill_tokens))


def test_nobody_decodes_so_the_chunk_is_as_large_as_may_be() -> None:
    assert rule().tokens(rows=0, context_tokens=0, allowed_s=None, cached=0) == 512


def test_a_chunk_takes_the_time_that_the_strictest_promise_leaves() -> None:
    chunks = rule(prefill_base_s=0.0, prefill_per_token_s=0.001, prefill_per_token_context_s=0.0, decode_base_s=0.02)
    sure(chunks)
    assert chunks.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0) == 89  # 0.9 * 0.1 - a row's 1e-4 - context
    assert chunks.tokens(rows=1, context_tokens=10, allowed_s=10.0, cached=0) == 512


def test_an_untrained_cost_model_leaves_a_larger_reserve() -> None:
    chunks = rule(prefill_base_s=0.0, prefill_per_token_s=0.001, prefill_per_token_context_s=0.0, decode_base_s=0.02)
    assert (
        chunks.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0) == 79
    )  # an error above WIDEST_BAND: 0.1 / 1.25


def test_a_chunk_after_more_context_is_shorter() -> None:
    prior = {"prefill_base_s": 0.0, "prefill_per_token_s": 0.001, "decode_base_s": 0.02}
    prior["prefill_per_token_context_s"] = 1e-6
    near = rule(**prior).tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0)
    far = rule(**prior).tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=1000)
    assert near == 76
    assert far == 39


def test_the_arithmetic_that_the_weights_leave_free_is_used_though_the_promise_is_broken() -> None:
    chunks = rule(
        prefill_base_s=0.0, prefill_per_token_s=0.001, prefill_per_token_context_s=0.0, decode_per_row_s=0.0,
        decode_base_s=0.2, decode_per_context_token_s=0.0,
    )  # fmt: skip
    assert chunks.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0) == 204


def test_no_time_left_still_lets_a_waiting_prompt_get_on() -> None:
    full = rule(decode_base_s=0.01, decode_per_row_s=0.2, prefill_per_token_s=0.001)
    assert full.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0) == 16


def test_tokens_that_cost_nothing_divide_nothing() -> None:
    """A calibration may find no cost per token, as with the toy engine."""
    free = rule(decode_base_s=0.2, prefill_per_token_s=0.0, prefill_per_token_context_s=0.0)
    assert free.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0) == 512
    nothing = rule(**dict.fromkeys(CostPrior.__dataclass_fields__, 0.0))
    assert nothing.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0) == 512


def test_residents_who_hold_much_memory_shorten_a_step_whatever_was_promised() -> None:
    chunks = rule()

    def tokens(held_share: float) -> int:
        return chunks.tokens(rows=1, context_tokens=10, allowed_s=0.1, cached=0, held_share=held_share)

    unpriced, full = tokens(0.0), tokens(1.0)
    sizes = [tokens(held / 10) for held in range(11)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == unpriced
    assert full < unpriced / 4
    assert full >= 16

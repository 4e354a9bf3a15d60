"""Prompt chunks beside decode rows keep the residents' time per token."""

from decode_worker.chunking import ChunkRule
from pdserve.core.latency import CostModel, CostPrior


def rule(**prior: float) -> ChunkRule:
    return ChunkRule(CostModel(CostPrior(**prior)), least=16, most=512)


def test_nobody_decodes_so_the_chunk_is_as_large_as_may_be() -> None:
    assert rule().tokens(rows=0, context_tokens=0, tpot_s=None, cached=0) == 512


def test_a_chunk_takes_the_time_that_the_strictest_promise_leaves() -> None:
    chunks = rule(decode_base_s=0.04, decode_per_row_s=0.0, decode_per_context_token_s=0.0, prefill_per_token_s=0.001)
    assert chunks.tokens(rows=1, context_tokens=10, tpot_s=0.1001, cached=0) == 40
    assert chunks.tokens(rows=1, context_tokens=10, tpot_s=10.0, cached=0) == 512


def test_no_time_left_still_lets_a_waiting_prompt_get_on() -> None:
    assert (
        rule(decode_base_s=0.2, prefill_per_token_s=0.001).tokens(rows=1, context_tokens=10, tpot_s=0.1, cached=0) == 16
    )


def test_tokens_that_cost_nothing_divide_nothing() -> None:
    """A calibration may find no cost per token, as with the toy engine."""
    free = rule(decode_base_s=0.2, prefill_per_token_s=0.0, prefill_per_token_context_s=0.0)
    assert free.tokens(rows=1, context_tokens=10, tpot_s=0.1, cached=0) == 16
    assert free.tokens(rows=1, context_tokens=10, tpot_s=1.0, cached=0) == 512

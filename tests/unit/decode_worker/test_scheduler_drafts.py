"""With speculation, a scheduler gives the same tokens in fewer steps, and other sequences lose nothing."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.protocol import Released, TokenRow
from pdserve.core.types import FinishReason
from pdserve.engine.toy import answer

SPACE = 32


def prompt(*tail: int) -> list[int]:
    return [SPACE] * 6 + list(tail)


def test_repeated_text_takes_fewer_steps(make_bench: Any) -> None:
    bench = make_bench(num_answers=1, max_drafts=6)
    bench.offer("a", prompt(), max_tokens=40)
    effects = bench.run()
    assert bench.sampled["a"] == answer(prompt(), 40, num_answers=1)
    assert len(bench.accounts) < 20
    assert max(account.draft_tokens for account in bench.accounts) == 6
    sampled = [one for one in effects if isinstance(one, TokenRow)]
    assert [one.output_index for one in sampled] == list(range(40))
    assert [one.finish for one in sampled] == [None] * 39 + [FinishReason.LENGTH]
    assert isinstance(effects[-1], Released)


@pytest.mark.parametrize("num_answers", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wrong_and_right_drafts_give_the_same_text(make_bench: Any, num_answers: int, temperature: float) -> None:
    bench = make_bench(num_answers=num_answers, max_drafts=15, num_blocks=80)
    seed = 5 if temperature else None
    for name, tail in (("a", 40), ("b", 41), ("c", 42)):
        bench.offer(name, prompt(tail), max_tokens=60, temperature=temperature, seed=5)
    bench.run()
    for name, tail in (("a", 40), ("b", 41), ("c", 42)):
        assert bench.sampled[name] == answer(prompt(tail), 60, seed=seed, num_answers=num_answers)
    assert sum(account.draft_tokens for account in bench.accounts) > 20


def test_no_draft_follows_the_last_possible_token(make_bench: Any) -> None:
    bench = make_bench(num_answers=1, max_drafts=15)
    bench.offer("a", prompt(), max_tokens=3)
    while bench.scheduler.has_work:
        plan, _ = bench.scheduler.plan(bench.now_s)
        sequence = bench.scheduler.sequences.by_key[bench.key("a")]
        assert sequence.num_output + 1 + plan.account.draft_tokens <= 3
        bench.step()
    assert bench.sampled["a"] == [SPACE] * 3


def test_a_text_that_fills_the_context_ends_there(make_bench: Any) -> None:
    bench = make_bench(num_answers=1, max_drafts=15, num_blocks=6)
    bench.offer("a", prompt(), max_tokens=100)
    bench.run()
    assert bench.sampled["a"] == [SPACE] * (24 - 6)


def test_a_stop_token_is_never_followed_by_a_draft(make_bench: Any) -> None:
    """The toy engine samples only 32 or 33, and 33 is the stop token."""
    for tail in range(40, 60):
        bench = make_bench(num_answers=2, max_drafts=15)
        bench.offer("a", [*[SPACE] * 9, 33, 33, tail, SPACE, SPACE], max_tokens=20, stop_token_ids=(33,))
        expected = answer([*[SPACE] * 9, 33, 33, tail, SPACE, SPACE], 20, num_answers=2)
        while bench.scheduler.has_work:
            plan, _ = bench.scheduler.plan(bench.now_s)
            assert all(33 not in row.drafts for row in plan.rows)
            bench.step()
        end = expected.index(33) + 1 if 33 in expected else 20
        assert bench.sampled["a"] == expected[:end]


def test_a_prefill_step_has_no_drafts(make_bench: Any) -> None:
    bench = make_bench(num_answers=1, max_drafts=6)
    bench.offer("a", prompt(), max_tokens=60)
    for _ in range(8):
        bench.step()
    assert bench.accounts[-1].draft_tokens > 0
    bench.offer("b", [7] * 30, max_tokens=1)
    bench.step()
    assert bench.accounts[-1].prefill_tokens > 0
    assert bench.accounts[-1].draft_tokens == 0
    bench.run()
    assert bench.sampled == {"a": [SPACE] * 60, "b": answer([7] * 30, 1, num_answers=1)}


def test_short_memory_limits_drafts_without_preemption(make_bench: Any) -> None:
    """Two sequences that together just fit: drafts take no block that the other needs."""
    bench = make_bench(num_answers=1, max_drafts=15, num_blocks=8)
    bench.offer("a", prompt(), max_tokens=10)  # 4 blocks at its end, like the other.
    bench.offer("b", prompt(40), max_tokens=9)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.sampled == {"a": [SPACE] * 10, "b": [SPACE] * 9}


def test_preempted_sequences_continue_the_same_text(make_bench: Any) -> None:
    bench = make_bench(num_answers=2, max_drafts=8, num_blocks=12)
    for name, tail in (("a", 40), ("b", 41), ("c", 42)):
        bench.offer(name, prompt(tail), max_tokens=24)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert sum(account.draft_tokens for account in bench.accounts) > 0
    for name, tail in (("a", 40), ("b", 41), ("c", 42)):
        assert bench.sampled[name] == answer(prompt(tail), 24, num_answers=2)


def test_rejected_drafts_are_never_cached(make_bench: Any) -> None:
    """A later prompt that equals an earlier text finds its blocks, despite rejected drafts."""
    bench = make_bench(num_answers=2, max_drafts=15, num_blocks=64)
    bench.offer("a", prompt(44), max_tokens=60)
    bench.run()
    whole = [*prompt(44), *bench.sampled["a"]]
    for size in (20, 33, 60):
        bench.offer(f"again {size}", whole[:size], max_tokens=1)
        [sampled, _] = [one for one in bench.run() if isinstance(one, (TokenRow, Released))]
        assert sampled.cached_tokens >= (size - 1) // 4 * 4
        assert sampled.tokens[0].token_id == answer(whole[:size], 1, num_answers=2)[0]

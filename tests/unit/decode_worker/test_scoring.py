"""A local prefill scores the prompt like a prefill worker, and a preemption only repeats scores."""

from __future__ import annotations

from typing import Any

from pdserve.core.effects import DecodeEffect, PromptScored
from pdserve.core.protocol import Released, TokenRow
from pdserve.engine.toy import answer

PROMPT = list(range(40, 62))
ALL = dict(enumerate(PROMPT[1:], 1))


def scores(effects: list[DecodeEffect], name: str) -> list[tuple[int, int]]:
    found = []
    for one in effects:
        if isinstance(one, PromptScored) and one.key.request_id == name:
            found += [(one.first_position + index, token.token_id) for index, token in enumerate(one.tokens)]
    return found


def test_a_local_prompt_is_scored_despite_the_cache(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.run()
    bench.offer("b", PROMPT, prompt_logprobs=2)
    effects = bench.run()
    assert scores(effects, "b") == list(ALL.items())
    assert bench.sampled["b"] == answer(PROMPT, 8)
    kinds = [type(one) for one in effects]
    assert kinds.index(TokenRow) > max(index for index, kind in enumerate(kinds) if kind is PromptScored)
    bench.offer("c", PROMPT, output=(bench.sampled["b"][0],), prompt_logprobs=2)
    assert scores(bench.run(), "c") == []


def test_a_remote_prompt_is_scored_by_its_prefill_worker(bench: Any) -> None:
    bench.offer("a", PROMPT, is_local=False, prompt_logprobs=2)
    first = bench.write("a")
    bench.receive("a")
    bench.admit("a", first)
    assert scores(bench.run(), "a") == []


def test_a_prompt_preempted_in_prefill_is_scored_again(make_bench: Any) -> None:
    """Memory is exhausted while "b" is prefilled, so it starts again. After its first token, a preemption scores
    nothing."""
    bench = make_bench(num_blocks=12, max_batch_tokens=4)
    bench.offer("a", [1, 2, 3], max_tokens=30)
    bench.step()
    bench.offer("b", PROMPT, max_tokens=16, prompt_logprobs=0)
    effects = bench.run()
    found = scores(effects, "b")
    assert dict(found) == ALL
    assert bench.scheduler.num_preemptions > 0
    first_sampled = next(
        index for index, one in enumerate(effects) if isinstance(one, TokenRow) and one.key.request_id == "b"
    )
    assert scores(effects[first_sampled:], "b") == []
    assert bench.sampled == {"a": answer([1, 2, 3], 30), "b": answer(PROMPT, 16)}


def test_scores_and_tokens_are_sent_before_other_effects(bench: Any) -> None:
    bench.offer("a", [7, 8, 9], max_tokens=2)
    bench.step()
    bench.offer("b", [3, 4, 5], prompt_logprobs=2)
    assert [(type(one), one.key.request_id) for one in bench.step()] == [
        (PromptScored, "b"),
        (TokenRow, "a"),
        (TokenRow, "b"),
        (Released, "a"),
    ]

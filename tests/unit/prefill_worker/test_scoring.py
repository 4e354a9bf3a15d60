"""A prompt with prompt_logprobs is computed completely, and its scores come before its first token."""

from __future__ import annotations

from typing import Any

from pdserve.core.effects import PrefillEffect, PromptScored
from pdserve.core.protocol import FirstToken

PROMPT = list(range(40, 62))


def scores(effects: list[PrefillEffect]) -> list[tuple[int, int]]:
    """(position, token) pairs in order."""
    found = []
    for one in effects:
        if isinstance(one, PromptScored):
            found += [(one.first_position + index, token.token_id) for index, token in enumerate(one.tokens)]
    return found


ALL = list(enumerate(PROMPT))[1:]


def test_each_token_but_the_first_is_scored_before_the_first_token(bench: Any) -> None:
    bench.offer("a", PROMPT, prompt_logprobs=1)
    effects = bench.run()
    assert scores(effects) == ALL
    kinds = [type(one) for one in effects]
    assert kinds.count(PromptScored) == 3  # One for each chunk.
    assert kinds.index(FirstToken) > max(index for index, kind in enumerate(kinds) if kind is PromptScored)


def test_the_cache_is_written_but_not_read(bench: Any) -> None:
    for name in "ab":
        bench.offer(name, PROMPT, prompt_logprobs=0)
        effects = bench.run()
        assert scores(effects) == ALL
        bench.sent(name)
    bench.offer("c", PROMPT)
    effects = bench.run()
    assert scores(effects) == []
    [first] = [one for one in effects if isinstance(one, FirstToken)]
    assert first.cached_tokens == 20


def test_a_resumed_answer_is_not_scored_again(bench: Any) -> None:
    bench.offer("a", PROMPT, output=(70, 71), prompt_logprobs=1)
    assert scores(bench.run()) == []


def test_a_prompt_of_one_token_has_nothing_to_score(bench: Any) -> None:
    bench.offer("a", [40], prompt_logprobs=1)
    effects = bench.run()
    assert scores(effects) == []
    assert any(isinstance(one, FirstToken) for one in effects)

"""Properties of an attempt, the end of a text, and the attempts that a worker has seen."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.attempt import Attempt, AttemptKey, AttemptLedger, EndRule, blocks_for, shareable_blocks
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import FinishReason, Sampling

EOS, STOP, OTHER = 2, 7, 9
RULE = EndRule(eos_token_ids=frozenset({EOS}), max_context_tokens=100)
ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT)


def key(attempt: int = 1, request_id: str = "a", router: int = 1) -> AttemptKey:
    return AttemptKey(router, request_id, attempt)


def attempt(output: tuple[int, ...] = (), deadline_at_s: float | None = None, **sampling: Any) -> Attempt:
    return Attempt(
        key=key(),
        prompt_ids=(10, 11, 12),
        output_ids=output,
        sampling=Sampling(**sampling),
        deadline_at_s=deadline_at_s,
    )


@pytest.mark.parametrize(
    ("sampling", "token_id", "num_output", "num_tokens", "expected"),
    [
        ({}, EOS, 1, 50, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, 1, 50, None),
        ({"stop_token_ids": (STOP,), "ignore_eos": True}, STOP, 1, 50, FinishReason.STOP),
        ({"min_tokens": 3}, EOS, 3, 50, None),
        ({"min_tokens": 3}, EOS, 4, 50, FinishReason.STOP),
        ({"max_tokens": 8}, OTHER, 7, 50, None),
        ({"max_tokens": 8}, OTHER, 8, 50, FinishReason.LENGTH),
        ({}, OTHER, 1, 99, None),
        ({}, OTHER, 1, 100, FinishReason.LENGTH),
        ({"grammar": ANY_OBJECT, "ignore_eos": True, "min_tokens": 3}, EOS, 1, 50, FinishReason.STOP),
        ({"grammar": ANY_OBJECT}, OTHER, 1, 50, None),
    ],
)
def test_a_text_ends_by_its_rules(
    sampling: dict[str, Any], token_id: int, num_output: int, num_tokens: int, expected: FinishReason | None
) -> None:
    assert RULE.finish(Sampling(**sampling), token_id, num_output, num_tokens) is expected


@pytest.mark.parametrize(
    ("num_output", "num_tokens", "expected"), [(6, 50, False), (7, 50, True), (1, 98, False), (1, 99, True)]
)
def test_the_last_token_is_known_before_sampling(num_output: int, num_tokens: int, expected: bool) -> None:
    assert RULE.ends_with_next(Sampling(max_tokens=8), num_output, num_tokens) is expected


def test_prompt_positions_are_scored_until_the_client_has_a_token() -> None:
    assert attempt().num_top_of_prompt is None
    assert attempt().targets(0, 3) == ()
    scored = attempt(prompt_logprobs=0)
    assert (scored.num_top_of_prompt, scored.targets(0, 2), scored.targets(2, 3)) == (0, (11, 12), ())
    assert attempt(output=(20,), prompt_logprobs=0).num_top_of_prompt is None


def test_an_attempt_is_late_from_its_deadline_on() -> None:
    assert not attempt().is_late(1e9)
    assert [attempt(deadline_at_s=5.0).is_late(now_s) for now_s in (4.9, 5.0, 5.1)] == [False, True, True]


def test_blocks_are_counted_in_full_and_one_token_is_always_computed() -> None:
    assert [blocks_for(count, 4) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [shareable_blocks(count, 4) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_only_a_newer_attempt_begins() -> None:
    ledger = AttemptLedger()
    assert ledger.newest(key()) is None
    assert ledger.begin(key(2))
    assert not ledger.begin(key(2))
    assert not ledger.begin(key(1))
    assert ledger.newest(key(1)) == key(2)
    assert ledger.begin(key(3))
    assert ledger.begin(key(1, "b"))
    assert ledger.begin(key(1, "a", router=2))


def test_a_released_request_may_reuse_its_name() -> None:
    ledger = AttemptLedger()
    ledger.begin(key(2))
    ledger.forget(key(1))
    assert not ledger.begin(key(1)), "the newer attempt stays"
    ledger.forget(key(2))
    assert ledger.begin(key(1))
    ledger.forget(key(1, "unknown"))


def test_forgetting_a_router_keeps_the_others() -> None:
    ledger = AttemptLedger()
    for one in (key(5), key(5, "b"), key(5, router=2)):
        ledger.begin(one)
    ledger.forget_router(1)
    assert [ledger.newest(one) for one in (key(), key(request_id="b"))] == [None, None]
    assert ledger.newest(key(router=2)) == key(5, router=2)


def test_memory_of_attempts_is_bounded() -> None:
    ledger = AttemptLedger(capacity=2)
    for one in (key(1, "a"), key(1, "b"), key(2, "a"), key(1, "c")):
        assert ledger.begin(one)
    assert [ledger.newest(key(0, name)) for name in "abc"] == [key(2, "a"), None, key(1, "c")]

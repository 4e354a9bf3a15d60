"""The ranges of Sampling's fields: both ends are allowed, and a value outside is rejected by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import (
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    Sampling,
    check_bad_words,
    check_token_ids,
)

INSIDE: list[tuple[str, list[Any]]] = [
    ("max_tokens", [1, 10**6]),
    ("min_tokens", [0, 256]),
    ("temperature", [0.0, 100.0]),
    ("top_k", [0, 1]),
    ("top_p", [1e-9, 1.0]),
    ("min_p", [0.0, 1.0]),
    ("top_n_sigma", [0.0, 100.0]),
    ("repetition_penalty", [0.01, 100.0]),
    ("presence_penalty", [-2.0, 2.0]),
    ("frequency_penalty", [-2.0, 2.0]),
    ("seed", [0, MAX_SEED]),
    ("stop", [("a",), ("a" * MAX_STOP_STRING_CHARS,) * MAX_STOP_STRINGS]),
    ("logprobs", [None, 0, MAX_LOGPROBS]),
    ("prompt_logprobs", [None, 0, MAX_PROMPT_LOGPROBS]),
    ("logit_bias", [((0, -100.0), (1, 100.0))]),
    ("bad_token_ids", [((1,),), ((1,) * MAX_BAD_SEQUENCE_TOKENS,)]),
]
OUTSIDE: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1]),
    ("min_tokens", [-1, 257]),
    ("temperature", [-0.01, 100.1, math.nan, math.inf]),
    ("top_k", [-1]),
    ("top_p", [0.0, 1.01, math.nan]),
    ("min_p", [-0.01, 1.01]),
    ("top_n_sigma", [-0.01, 100.1, math.nan]),
    ("repetition_penalty", [0.009, 100.1]),
    ("presence_penalty", [-2.01, 2.01]),
    ("frequency_penalty", [-2.01, 2.01]),
    ("seed", [-1, MAX_SEED + 1]),
    ("stop", [("",), ("a" * (MAX_STOP_STRING_CHARS + 1),), ("a",) * (MAX_STOP_STRINGS + 1)]),
    ("logprobs", [-1, MAX_LOGPROBS + 1]),
    ("prompt_logprobs", [-1, MAX_PROMPT_LOGPROBS + 1]),
    ("logit_bias", [((0, -100.1),), ((0, 100.1),)]),
    ("bad_token_ids", [((),), ((1,) * (MAX_BAD_SEQUENCE_TOKENS + 1),)]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in INSIDE for value in values])
def test_both_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(Sampling(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in OUTSIDE for value in values])
def test_a_value_outside_is_rejected_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Sampling(**{field: value})
    assert raised.value.field == {"bad_token_ids": "bad_words"}.get(field, field)


def test_defaults_sample_freely_and_end_at_eos() -> None:
    plain = Sampling()
    assert (plain.ignore_eos, plain.include_stop_in_output, plain.skip_special_tokens) == (False, False, True)
    assert (plain.is_greedy, plain.adjusts_logits, plain.needs_history) == (False, False, False)
    assert Sampling(temperature=0.0).is_greedy


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -1}])
def test_each_penalty_counts(changes: dict[str, float]) -> None:
    assert Sampling(**changes).is_penalised


@pytest.mark.parametrize("changes", [{"presence_penalty": 0.1}, {"logit_bias": ((1, 2.0),)}, {"top_n_sigma": 0.5}])
def test_adjusts_logits_lists_changes_before_temperature(changes: dict[str, Any]) -> None:
    assert Sampling(**changes).adjusts_logits


@pytest.mark.parametrize("changes", [{"bad_token_ids": ((1,),)}, {"grammar": Grammar(GrammarKind.JSON_OBJECT)}])
def test_bad_words_and_grammars_need_earlier_tokens(changes: dict[str, Any]) -> None:
    assert Sampling(**changes).needs_history


@pytest.mark.parametrize("words", [["a"] * MAX_BAD_WORDS, ["a" * MAX_BAD_WORD_CHARS]])
def test_bad_words_within_their_bounds_pass(words: list[str]) -> None:
    check_bad_words(words)


@pytest.mark.parametrize("words", [["a"] * (MAX_BAD_WORDS + 1), ["a" * (MAX_BAD_WORD_CHARS + 1)], [""]])
def test_bad_words_outside_their_bounds_are_rejected(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="bad_words"):
        check_bad_words(words)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stop_token_ids": (10,)}, "stop_token_ids"),
        ({"logit_bias": ((10, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (1, 10)}, "allowed_token_ids"),
        ({"bad_token_ids": ((1, 10),)}, "bad_words"),
        ({"bad_token_ids": tuple((one,) for one in range(10))}, "bad_words"),
        ({"bad_token_ids": ((3,),), "allowed_token_ids": (3,)}, "allowed_token_ids"),
    ],
)
def test_invalid_token_ids_name_their_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_token_ids(Sampling(**changes), 10, of="sampling.")
    assert raised.value.field == f"sampling.{field}"


def test_token_ids_below_the_vocabularys_size_pass() -> None:
    check_token_ids(Sampling(stop_token_ids=(9,), bad_token_ids=((3,), (4, 5)), allowed_token_ids=(3, 4)), 10)
    check_token_ids(Sampling(bad_token_ids=tuple((one,) for one in range(9))), 10)

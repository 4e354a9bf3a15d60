"""Limits on the text of a grammar, before it is compiled."""

from __future__ import annotations

import json

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, Grammar, GrammarKind, choice


@pytest.mark.parametrize("kind", [kind for kind in GrammarKind if kind is not GrammarKind.JSON_OBJECT])
def test_a_grammar_without_a_text_is_rejected(kind: GrammarKind) -> None:
    with pytest.raises(InvalidRequest, match="a grammar") as raised:
        Grammar(kind)
    assert (raised.value.field, raised.value.seen) == (kind.value, "an empty text")


def test_json_object_has_no_text() -> None:
    assert Grammar(GrammarKind.JSON_OBJECT).text == ""
    with pytest.raises(InvalidRequest) as raised:
        Grammar(GrammarKind.JSON_OBJECT, "{}")
    assert (raised.value.field, raised.value.seen) == ("json_object", "a text")


def test_the_size_of_a_text_is_bounded_in_bytes() -> None:
    assert Grammar(GrammarKind.REGEX, "é" * (MAX_GRAMMAR_BYTES // 2)).text
    with pytest.raises(InvalidRequest, match=f"{MAX_GRAMMAR_BYTES + 1} bytes"):
        Grammar(GrammarKind.REGEX, "é" * (MAX_GRAMMAR_BYTES // 2) + "a")


@pytest.mark.parametrize("text", ["{", '"a"', "[1]", '["a", null]', '{"a": "b"}'])
def test_choices_are_an_array_of_strings(text: str) -> None:
    with pytest.raises(InvalidRequest, match="a JSON array of strings") as raised:
        Grammar(GrammarKind.CHOICE, text)
    assert raised.value.field == "choice"


def test_the_number_of_choices_is_bounded() -> None:
    most = ["a"] * MAX_CHOICES
    assert choice(most).choices() == most
    assert choice(["é"]).text == '["é"]'
    for strings in ([], [*most, "a"]):
        with pytest.raises(InvalidRequest, match=f"1 to {MAX_CHOICES} strings"):
            Grammar(GrammarKind.CHOICE, json.dumps(strings))
    with pytest.raises(InvalidRequest, match=f"1 to {MAX_CHOICES} strings"):
        choice([*most, "a"])

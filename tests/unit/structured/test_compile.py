"""Which grammars compile, why others are rejected, and the checker's limits of time and memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, choice
from pdserve.structured.checker import reason_against
from pdserve.structured.compile import Compiler, _tokenizer_text
from pdserve.text.tokenizer import load_tokenizer
from pdserve.tokenizer_json import is_linear
from tests.unit.text.conftest import KINDS

MODEL = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))
TOKENIZER = load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(MODEL, TOKENIZER.vocab_size, (0,))


def json_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def accepts(compiler: Compiler, grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole document."""
    matcher = compiler.compile(grammar)
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


REFUSED: dict[str, tuple[Grammar, str]] = {
    "a string longer than its longest": (json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
    "false": (json_schema(False), "false allows no document"),
    "an empty enum": (json_schema({"enum": []}), "Unsatisfiable"),
    "an enum of another type": (json_schema({"type": "string", "enum": [1]}), "Unsatisfiable"),
    "enum and const that differ": (json_schema({"enum": ["a"], "const": "b"}), "Unsatisfiable"),
    "an empty range": (json_schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
    "a pattern over maxLength": (json_schema({"type": "string", "pattern": "^a{5}$", "maxLength": 2}), "Unsatisfiable"),
    "a required property that cannot be": (
        json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        "required property",
    ),
    "a reference to itself": (json_schema({"$ref": "#"}), "no document meets it"),
    "a node that requires itself": (
        json_schema({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}),
        "requires itself",
    ),
    "a reference to nothing": (json_schema({"$ref": "#/$defs/a"}), "does not exist"),
    "a reference to elsewhere": (json_schema({"$ref": "https://example.org/a"}), "nothing is fetched"),
    "an unknown type": (
        json_schema({"items": {"type": ["null", "text"]}}),
        "\"type\" at #/items is 'text'; it is one of null",
    ),
    "a type that is no text": (json_schema({"type": {}}), '"type" at # is {}'),
    "a pattern within a schema": (
        json_schema({"properties": {"a": {"pattern": "ab(c"}}}),
        "the pattern 'ab(c': unclosed group at character 3",
    ),
    "a regex of two lines": (Grammar(GrammarKind.REGEX, "ab\n[z-a]"), "invalid character class range"),
    "nothing, in another spelling": (json_schema({"not": {}}), '"not" at # excludes every document'),
    "a number that no float holds": (json_schema({"enum": [1, 2**53 + 1]}), '"enum" at #'),
    "a control character without a short escape": (json_schema({"const": {"a": ["\x01"]}}), '"const" at #'),
    "its own options": (json_schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
    "no JSON": (Grammar(GrammarKind.JSON_SCHEMA, '{"type"'), "delimiter"),
    "no schema": (json_schema([1]), "a JSON object"),
    "a deep one": (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000), "recursion"),
    "look-around": (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
    "an open group": (Grammar(GrammarKind.REGEX, "(a"), "unclosed group at character 1"),
    "a regex that nothing meets": (Grammar(GrammarKind.REGEX, "[^\\s\\S]"), "no document meets it"),
    "half a rule": (Grammar(GrammarKind.LARK, 'start: "a'), "line 1, column 10: lexer error"),
    "an unknown rule": (
        Grammar(GrammarKind.LARK, 'start: one\n\none: "b" two\n'),
        'line 3, column 6: unknown name: "two"',
    ),
    "no start": (Grammar(GrammarKind.LARK, 'one: "a"'), "start"),
    "a rule that never ends": (Grammar(GrammarKind.LARK, 'start: one\none: "a" one'), "Too many items"),
    "lenient JSON within a grammar": (
        Grammar(GrammarKind.LARK, 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
        "not",
    ),
    "a regex whose masks cost too much": (Grammar(GrammarKind.REGEX, "x?(a{1000}){1000}"), "too many"),
    "a row too many": (Grammar(GrammarKind.LARK, 'start: "a"{1000000}'), "Too many items"),
}
UNSUPPORTED: dict[str, Any] = {
    "not": {"type": "string"},
    "if": {"if": {"minLength": 1}, "then": {"maxLength": 3}},
    "contains": {"type": "integer"},
    "uniqueItems": True,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "unevaluatedProperties": {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": True}}, {}]},
    "unevaluatedItems": {"unevaluatedItems": False, "allOf": [{"prefixItems": [True]}]},
    "propertyNames": {"pattern": "a"},
    "minProperties": 2,
    "$dynamicRef": "#",
    "$recursiveRef": "#",
}


def test_no_place_is_named_in_a_grammar_with_schemas(compiler: Compiler) -> None:
    """They are compiled in another form, so that it would be a place in another text."""
    grammar = Grammar(GrammarKind.LARK, 'start: %json {"type":\n"null"} two')
    assert reason_against(compiler, grammar) == 'unknown name: "two"'


@pytest.mark.parametrize("name", REFUSED)
def test_unsatisfiable_and_invalid_grammars_are_rejected(compiler: Compiler, name: str) -> None:
    grammar, reason = REFUSED[name]
    seen = reason_against(compiler, grammar)
    assert seen is not None
    assert reason in seen
    assert len(seen) <= 300


def test_a_schema_that_is_no_json_is_told_so(compiler: Compiler) -> None:
    reason = reason_against(compiler, Grammar(GrammarKind.JSON_SCHEMA, "schema.json"))
    assert reason == "not JSON: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_an_unsupported_keyword_is_rejected(compiler: Compiler, keyword: str) -> None:
    value = UNSUPPORTED[keyword]
    schema = value if isinstance(value, dict) and keyword in value else {keyword: value}
    nested = {"type": "object", "properties": {"a": schema}}
    for whole, place in ((schema, "#"), (nested, "#/properties/a")):
        assert f'"{keyword}" at {place} is not supported' in (reason_against(compiler, json_schema(whole)) or "")


def test_json_whitespace_is_limited(compiler: Compiler) -> None:
    grammar = json_schema({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{"a": [1,2], "b":{}}'):
        assert accepts(compiler, grammar, text), text
    for text in ('{ "a":[]}', '{"a" :[]}', '{"a":  []}', '{"a":[]}\n', ' {"a":[]}', '{\n"a":[]}', '{"a":[1 ]}'):
        assert not accepts(compiler, grammar, text), text


def test_each_kind_accepts_only_its_documents(compiler: Compiler) -> None:
    odd = ["yes", "no", "", "é 😀", 'a "b" \\', "a/b\n", "(.*)"]
    for text in odd:
        assert accepts(compiler, choice(odd), text), text
    assert not accepts(compiler, choice(odd), "yesno")
    assert accepts(compiler, Grammar(GrammarKind.REGEX, "[ab]{2,4}c?"), "abac")
    assert not accepts(compiler, Grammar(GrammarKind.REGEX, "[ab]{2,4}c?"), "abcc")
    assert accepts(compiler, Grammar(GrammarKind.JSON_OBJECT), '{"a": [1, {"b": null}]}')
    assert not accepts(compiler, Grammar(GrammarKind.JSON_OBJECT), "[1]")
    assert accepts(compiler, json_schema(True), "[1]")
    lark = Grammar(GrammarKind.LARK, 'start: sum\nsum: NUMBER | NUMBER "+" sum\nNUMBER: /[0-9]+/')
    assert accepts(compiler, lark, "1+22+333")
    assert not accepts(compiler, lark, "1++2")


def test_a_grammar_is_checked_for_size_and_shape_before_anything_else() -> None:
    with pytest.raises(InvalidRequest, match="regex: got 65537 bytes"):
        Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1))
    with pytest.raises(InvalidRequest, match="json_schema: got an empty text"):
        Grammar(GrammarKind.JSON_SCHEMA, "")
    for text in ("[]", "[1]", '"a"', "[", json.dumps(["a"] * 5000)):
        with pytest.raises(InvalidRequest, match="choice: got"):
            Grammar(GrammarKind.CHOICE, text)


def test_a_model_that_cannot_be_masked_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="end of sequence"):
        Compiler(MODEL, TOKENIZER.vocab_size, ())
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Compiler(tmp_path, 10, (0,))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Compiler(tmp_path, 10, (0,))


def test_special_tokens_are_never_part_of_a_document(tmp_path: Path) -> None:
    """As the detokenizer has it: its text is not shown, so it must not count as text."""
    text = json.loads((MODEL / "tokenizer.json").read_text())
    text["added_tokens"].append({**text["added_tokens"][0], "id": 4096, "content": "PADDING", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    shutil.copy(MODEL / "tokenizer_config.json", tmp_path)
    any_text = Grammar(GrammarKind.REGEX, "[\\s\\S]*")
    assert Compiler(tmp_path, 4097, (0,)).compile(any_text).try_consume_tokens([4096]) == 1
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "PADDING"}))
    assert Compiler(tmp_path, 4097, (0,)).compile(any_text).try_consume_tokens([4096]) == 0


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], object], held: str = "") -> Path:
    """A folder with a tokenizer.json."""
    text = json.loads(held or (MODEL / "tokenizer.json").read_text())
    change(text)
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    return tmp_path


def forced(compiler: Compiler, document: str) -> list[int]:
    matcher = compiler.compile(Grammar(GrammarKind.CHOICE, json.dumps([document])))
    return matcher.compute_ff_tokens()


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma"])
def test_patterns_of_unknown_cost_do_not_run_in_this_process(tmp_path: Path, name: str) -> None:
    unknown = {"type": "Split", "pattern": {"Regex": r"(?:a|a)*(?!a)\s*"}, "behavior": "Isolated", "invert": False}

    def add(text: dict[str, Any]) -> None:
        parts = [unknown] + ([text["pre_tokenizer"]] if text["pre_tokenizer"] else [])
        text["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
        text["decoder"] = text["decoder"] or {"type": "ByteLevel"}

    tokenizer = KINDS[name]()
    folder = changed(tmp_path, add, tokenizer.to_str())
    shown, _ = _tokenizer_text(folder, 10**6)
    assert is_linear(shown)
    document = "a" * 60 + " the cat, 12!"
    compiler = Compiler(folder, tokenizer.get_vocab_size(), (0,))
    tokens = forced(compiler, document)
    assert tokens
    assert document.startswith(compiler._tokenizer.decode_str(tokens))


def test_known_patterns_stay(tmp_path: Path) -> None:
    """They decide by which tokens a forced text is written."""
    shown, _ = _tokenizer_text(MODEL, 4096)
    held = json.loads((MODEL / "tokenizer.json").read_text())
    assert (shown["pre_tokenizer"], shown["normalizer"]) == (held["pre_tokenizer"], held["normalizer"])


def test_a_tokenizer_of_another_cost_than_its_size_is_bounded(tmp_path: Path) -> None:
    plain = Compiler(MODEL, 4096, (0,))
    padding: dict[str, Any] = {"strategy": {"Fixed": 100_000}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    padded = Compiler(changed(tmp_path, lambda text: text.update(padding=padding)), 4096, (0,))
    assert padded._tokenizer.tokenize_str("def f") == plain._tokenizer.tokenize_str("def f")
    far = Compiler(changed(tmp_path, lambda text: text["model"]["vocab"].update(far=2**30)), 4096, (0,))
    assert far.num_words <= plain.num_words + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text["model"].update(vocab={"<0xZZ>": 0}, merges=[]),  # llguidance panics
        lambda text: text.update(model={"type": "Unigram", "unk_id": 0, "vocab": [["a" * 10_000, 0.0]]}),
        lambda text: text["model"].update(vocab=[1, 2]),
        lambda text: text.update(added_tokens=[{"id": 0}]),
        lambda text: text.update(pre_tokenizer=[]),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_the_models_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    def both(text: dict[str, Any]) -> None:
        text["decoder"] = {"type": "ByteFallback"}
        change(text)

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Compiler(changed(tmp_path, both), 4096, (0,))

"""Which keywords are enforced, ignored or refused, and that documents are valid whatever the tokens are."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.structured.checker import reason_against
from pdserve.structured.compile import Compiler
from pdserve.structured.supported import FORMATS, supported
from tests.unit.structured.documents import document
from tests.unit.structured.judge import READERS, why_invalid
from tests.unit.structured.schemas import FORMAT_NAMES, WITHOUT_EFFECT, any_schema
from tests.unit.structured.test_compile import MODEL, TOKENIZER, accepts, json_schema

ROUNDS = 40  # schemas; all of them in the slow version


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(MODEL, TOKENIZER.vocab_size, (0,))


def documents(compiler: Compiler, schema: Any, count: int, seed: int = 0) -> list[str]:
    """Random documents that end, each of which is checked."""
    grammar = json_schema(schema)
    assert reason_against(compiler, grammar) is None, schema
    rng = random.Random(seed)
    found = [text for _ in range(count) if (text := document(compiler, TOKENIZER, grammar, rng))]
    for text in found:
        assert not (why := why_invalid(text, schema)), f"{text}: {why}"
    return found


def check_random_schemas(compiler: Compiler, seeds: range) -> None:
    """Each schema is accepted, and its documents are valid."""
    num_documents = 0
    for seed in seeds:
        num_documents += len(documents(compiler, any_schema(random.Random(seed)), 2, seed))
    assert num_documents > 1.7 * len(seeds)  # the others were cut before their end


def test_random_documents_of_random_schemas_are_valid(compiler: Compiler) -> None:
    check_random_schemas(compiler, range(ROUNDS))


@pytest.mark.slow
def test_random_documents_of_2000_random_schemas_are_valid(compiler: Compiler) -> None:
    check_random_schemas(compiler, range(2000))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_each_value_of_a_format_is_read(compiler: Compiler, name: str) -> None:
    assert set(FORMATS) == set(READERS) == set(FORMAT_NAMES)
    assert len(documents(compiler, {"type": "string", "format": name}, 12)) > 6


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            "2024-02-29 2000-02-29 0004-02-29 9999-12-31 0001-01-01",
            "2023-02-29 1900-02-29 0000-01-01 2024-04-31",
        ),
        (
            "time",
            "23:59:59Z 00:00:00.123456+23:59 12:00:00-00:00",
            "23:59:60Z 24:00:00Z 12:00:00 12:00:00+24:00 12:00Z",
        ),
        (
            "date-time",
            "2024-02-29T10:00:00.5Z",
            "2016-12-31T23:59:60Z 0000-01-01T00:00:00Z 2024-02-29 2023-02-29T10:00:00Z",
        ),
        ("duration", "P1Y2M3D P3W PT1H30M P1DT12H", "P PT P1Y1D P1W2D 1D P1.5D"),
        (
            "email",
            "a.b+c@mail.example.com x@y.co o'n@a-b.org",
            "a@b a..b@c.de .a@b.de a@b.local a@-b.de a@b.test a@b--c.de",
        ),
        ("hostname", "localhost a-b.example.org 3com.com", "-a.org a-.org a..b 1.2.3.4 a_b.org"),
        ("ipv4", "0.0.0.0 255.255.255.255", "256.1.1.1 01.2.3.4 1.2.3"),
        ("ipv6", "::1 :: 1:2:3:4:5:6:7:8 fe80::1:2 1:2:3:4:5:6:7::", "1::2::3 1:2:3:4:5:6:7 12345::"),
        (
            "uri",
            "https://a.org/x?y#z urn:a:b mailto:a@b file:///etc http://[::1]:80/",
            "http:// a://b:99999/ /x http:a b",
        ),
    ],
)
def test_a_format_has_the_values_of_its_rfc(compiler: Compiler, name: str, good: str, bad: str) -> None:
    grammar = json_schema({"type": "string", "format": name})
    assert [one for one in good.split() if not accepts(compiler, grammar, f'"{one}"')] == []
    assert [one for one in bad.split() if accepts(compiler, grammar, f'"{one}"')] == []


def test_a_format_does_not_replace_a_pattern(compiler: Compiler) -> None:
    grammar = json_schema({"type": ["string", "null"], "format": "date", "pattern": "^2", "maxLength": 10})
    for text, is_valid in (('"2024-02-29"', True), ("null", True), ('"1999-01-01"', False), ('"2x"', False)):
        assert accepts(compiler, grammar, text) == is_valid, text


@pytest.mark.parametrize("extra", WITHOUT_EFFECT, ids=str)
def test_a_keyword_without_effect_is_ignored(compiler: Compiler, extra: dict[str, Any]) -> None:
    plain = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for schema in ({**plain, **extra}, {**plain, "properties": {"a": {**extra, "type": "integer"}}}):
        assert accepts(compiler, json_schema(schema), '{"a":1}')
        assert not accepts(compiler, json_schema(schema), '{"a":"1"}')
    assert accepts(compiler, json_schema(extra), "[1,1]")


def test_a_keyword_that_follows_from_others_is_not_refused(compiler: Compiler) -> None:
    names = {"type": "object", "required": ["a", "b"]}
    assert accepts(compiler, json_schema({**names, "dependentRequired": {"a": ["b"]}}), '{"a":1,"b":2}')
    assert accepts(compiler, json_schema({"type": "array", "uniqueItems": True, "maxItems": 1}), "[1]")
    closed = json_schema({"properties": {"a": True}, "type": "object", "unevaluatedProperties": False})
    assert accepts(compiler, closed, '{"a":1}')
    assert not accepts(compiler, closed, '{"b":1}')
    some = json_schema({"type": "array", "contains": {}, "maxContains": 2})
    assert [accepts(compiler, some, text) for text in ("[]", "[1]", "[1,2,3]")] == [False, True, False]
    then = json_schema({"if": True, "then": {"type": "integer"}, "else": {"type": "null"}})
    assert [accepts(compiler, then, text) for text in ("1", "null")] == [True, False]


LISTED = {"type": "object", "properties": {"a": {"type": "integer"}, "b\tc": {"type": "null"}}, "required": ["a"]}


def test_a_free_name_never_spells_a_listed_one(compiler: Compiler) -> None:
    free = json_schema({**LISTED, "additionalProperties": {"type": "string"}})
    for name in ("a", r"\u0061", r"b\tc", r"b\u0009c", r"\u0062\tc"):
        assert not accepts(compiler, free, f'{{"a":1,"{name}":"x"}}'), name
    for name in ("A", "aa", "é", "b c"):
        assert accepts(compiler, free, f'{{"a":1,"{name}":"x"}}'), name
    by_pattern = json_schema(
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": True}
    )
    assert not accepts(compiler, by_pattern, r'{"\u0061b":1}')
    assert not accepts(compiler, by_pattern, '{"ab":1}')
    assert accepts(compiler, by_pattern, '{"ab":null,"b":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        {"type": "object", "patternProperties": {"^a": True}, "additionalProperties": False, "minProperties": 2.0},
        {**LISTED, "minProperties": 3},
        {"allOf": [{"minProperties": 4}, {"type": "object"}]},
        {"anyOf": [{"type": ["null", "object"], "minProperties": 2}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"minProperties": 2}}},
    ],
    ids=str,
)
def test_a_minimum_that_copies_of_a_name_could_reach_is_refused(compiler: Compiler, schema: dict[str, Any]) -> None:
    assert '"minProperties" at #' in (reason_against(compiler, json_schema(schema)) or "")


def test_a_minimum_of_names_that_cannot_repeat_is_kept(compiler: Compiler) -> None:
    two = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    closed = {**two, "additionalProperties": False}
    for schema in ({**closed, "minProperties": 2}, {**two, "minProperties": 3}, {"type": "object", "minProperties": 1}):
        assert documents(compiler, schema, 5)
    through_ref = {"$ref": "#/$defs/two", "minProperties": 2, "$defs": {"two": closed}}
    assert documents(compiler, through_ref, 5)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 4, "maximum": 4.2},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9},
        {"type": "number", "minimum": -0.1, "exclusiveMaximum": 0.0},
        {"type": "number", "minimum": -5, "exclusiveMaximum": -4, "multipleOf": 0.25},
        {"allOf": [{"exclusiveMinimum": 4}, {"type": "number", "maximum": 4.5}]},
        {"type": "number", "minimum": 123456789012345.678, "maximum": 123456789012346.5},
        {"type": "integer", "minimum": 2**63 - 20000, "maximum": 2**63 - 1},
        {
            "exclusiveMinimum": True,
            "minimum": 3,
            "maximum": 3.5,
            "type": "number",
            "$schema": "http://json-schema.org/draft-04/schema#",
        },
    ],
    ids=str,
)
def test_bounds_of_numbers_are_exact(compiler: Compiler, schema: dict[str, Any]) -> None:
    assert documents(compiler, schema, 20)


REFERENCES: dict[str, Any] = {
    "the whole": {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}},
    "an anchor": {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "integer"}}},
    "a dynamic anchor": {"$ref": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "integer"}}},
    "its own URI": {"$id": "https://e.org/a", "$ref": "https://e.org/a#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    "relative to the nearest $id": {
        "$id": "https://e.org/a/",
        "$ref": "b/c",
        "$defs": {"x": {"$id": "b/c", "$ref": "d", "$defs": {"y": {"$id": "d", "type": "integer"}}}},
    },
    "a pointer in an embedded schema": {
        "$ref": "part",
        "$defs": {
            "a": {"type": "null"},
            "p": {"$id": "part", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        },
    },
    "an anchor in an embedded schema": {
        "$ref": "part#x",
        "$defs": {"a": {"$anchor": "x"}, "p": {"$id": "part", "$defs": {"q": {"$anchor": "x", "type": "integer"}}}},
    },
    "escapes": {"$ref": "#/$defs/a~1b%25%C3%A9", "$defs": {"a/b%é": {"type": "integer"}}},
    "below an unknown keyword": {
        "$ref": "#/components/schemas/A",
        "components": {"schemas": {"A": {"$ref": "#/components/schemas/B"}, "B": {"type": "integer"}}},
    },
    "an urn": {"$id": "urn:uuid:1", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#a",
        "type": "string",  # ignored beside the reference
        "definitions": {"a": {"$id": "#a", "type": "integer"}},
    },
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "http://e.org/",
        "allOf": [{"$ref": "b"}],
        "definitions": {"a": {"id": "b", "type": "integer"}},
    },
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_resolved(compiler: Compiler, name: str) -> None:
    assert why_invalid("1", REFERENCES[name]) == ""  # the test's own example
    grammar = json_schema(REFERENCES[name])
    assert reason_against(compiler, grammar) is None
    assert accepts(compiler, grammar, "1")
    assert not accepts(compiler, grammar, '"1"')


@pytest.mark.parametrize("reference", ["https://e.org/a", "other.json", "#nowhere", "#/$defs/b", "file:///etc/passwd"])
def test_nothing_is_fetched(compiler: Compiler, reference: str) -> None:
    schema = {"properties": {"a": {"$ref": reference}}, "$defs": {"a": {}}}
    assert repr(reference) in (reason_against(compiler, json_schema(schema)) or "")


def test_data_is_not_a_schema(compiler: Compiler) -> None:
    data = {"$ref": "#/nowhere", "uniqueItems": True, "$id": "x"}
    for schema in ({"const": data}, {"enum": [data]}):
        assert accepts(compiler, json_schema(schema), json.dumps(data))
    beside = {"type": "integer", "default": data, "examples": [data], "x-other": data}
    assert accepts(compiler, json_schema(beside), "1")
    named = {
        "type": "object",
        "properties": {"$ref": {"type": "integer"}, "uniqueItems": {"const": True}},
        "required": ["$ref"],
    }
    assert accepts(compiler, json_schema(named), '{"$ref":1,"uniqueItems":true}')


def test_a_schema_is_not_changed_by_its_preparation() -> None:
    schema = {"type": "string", "format": "date", "not": False, "$id": "a"}
    before = json.dumps(schema)
    supported(schema)
    assert json.dumps(schema) == before
    assert Grammar(GrammarKind.JSON_SCHEMA, before)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"n" * 30_000: {"$anchor": "x"}}, "anyOf": [{"$ref": "#x"} for _ in range(1_500)]},
        {"$id": "http://" + "a" * 30_000, "$defs": {str(one): {"$anchor": str(one)} for one in range(1_000)}},
    ],
    ids=("pointers", "names"),
)
def test_short_references_do_not_become_much_longer(schema: dict[str, Any]) -> None:
    """The gateway rewrites the schemas of tools itself: a request of 64 KiB must not become one of 50 MiB there."""
    with pytest.raises(ValueError, match="characters"):
        supported(schema)


def test_a_reference_into_a_condition_is_refused_wherever_it_is(compiler: Compiler) -> None:
    definitions = {"a": {"if": True, "then": {"required": ["q"]}}}
    parts = [{"$ref": "#/components/a"}, {"$ref": "#/components/a/then"}]  # below an unknown keyword
    schema = {"type": "object", "components": definitions, "allOf": parts, "minProperties": 3}
    reason = reason_against(compiler, json_schema(schema))
    assert "#/components/a/then" in str(reason)


# --- compilers before 1.9, as vLLM's environment has ----------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "multipleOf": 5}, "multipleOf"),
        ({"type": "number", "minimum": -5, "exclusiveMaximum": -4, "multipleOf": 0.25}, "multipleOf"),
        ({"items": {"anyOf": [{"multipleOf": 2, "exclusiveMinimum": -1}]}}, "multipleOf"),
        ({**LISTED, "additionalProperties": {"type": "string"}}, "additionalProperties"),
        ({**LISTED, "additionalProperties": True}, "additionalProperties"),
        ({**LISTED, "patternProperties": {"^b": {"type": "null"}}}, "patternProperties"),
    ],
    ids=str,
)
def test_an_older_compiler_refuses_what_it_gets_wrong(schema: dict[str, Any], keyword: str) -> None:
    supported(copy.deepcopy(schema))
    with pytest.raises(ValueError, match=f'"{keyword}" at #.* is not supported: .*llguidance, before 1.9'):
        supported(copy.deepcopy(schema), has_older_compiler=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 5, "minimum": 0},
        {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0},
        {**LISTED, "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ],
    ids=str,
)
def test_an_older_compiler_keeps_the_rest(schema: dict[str, Any]) -> None:
    expected = supported(copy.deepcopy(schema))
    assert supported(copy.deepcopy(schema), has_older_compiler=True) == expected

"""Which schemas have infinite documents alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdserve.structured.checker import is_endless
from tests.unit.structured.schemas import schema

SELF = {"$ref": "#"}
NULL = {"type": "null"}


def linked(next_: object, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": next_}, "required": ["next"], **more}


ENDLESS = {
    "itself": SELF,
    "a required property": linked(SELF),
    "a required property in a list of one type": linked(SELF) | {"type": ["object"]},
    "an item that must be there": {"type": "array", "items": SELF, "minItems": 1},
    "a first item that must be there": {"type": "array", "prefixItems": [SELF], "minItems": 1},
    "all ways": {"anyOf": [linked(SELF), {"type": "array", "items": SELF, "minItems": 2}]},
    "one of all": {"allOf": [{"type": "object"}, linked(SELF)]},
    "two that require each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": linked({"$ref": "#/$defs/b~1c"}), "b/c": linked({"$ref": "#/$defs/a"})},
    },
}
FINITE = {
    "a property that may be left out": {"type": "object", "properties": {"next": SELF}},
    "a property that may be null": linked({"anyOf": [SELF, NULL]}),
    "a property of one of two types": linked(SELF) | {"type": ["object", "null"]},
    "no type, so that a number is a document": {"properties": {"next": SELF}, "required": ["next"]},
    "an array that may be empty": {"type": "array", "items": SELF},
    "a second item that need not be there": {"type": "array", "prefixItems": [NULL, SELF], "minItems": 1},
    "a tree": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"anyOf": [NULL, linked({"$ref": "#/$defs/tree"})]}},
    },
    "a constant that looks like a reference": {"const": {"$ref": "#"}},
    "a reference to nothing, which others refuse": {"$ref": "#/$defs/absent"},
    "an odd one": {"type": "array", "minItems": "2", "items": SELF, "required": 3, "anyOf": {}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_requires_itself_is_endless(name: str) -> None:
    assert is_endless(ENDLESS[name])


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_that_can_end_is_not_endless(name: str) -> None:
    assert not is_endless(FINITE[name])


def test_random_bounded_schemas_are_not_endless() -> None:
    rng = random.Random(5)
    assert not any(is_endless(schema(rng)[0]) for _ in range(200))

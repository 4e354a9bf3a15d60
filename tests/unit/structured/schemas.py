"""Random JSON schemas: bounded ones, with the most bytes that a document may have, and some of every keyword."""

from __future__ import annotations

import random
from typing import Any

MAX_BYTES = 700
NAMES = ("id", "name", "size", "tags", "owner", "kind", "value", "left", "right", "né", 'a "b"', "x/y")
WORDS = ("red", "green", "blue", "", "naïve", "tab\there", 'quote"', "0", "true", "日本")
PATTERNS = (("^[a-z]{2,6}$", 6), ("^[0-9]{3}-[0-9]{4}$", 8), ("^(yes|no|maybe)$", 5), ("^[A-F0-9]{4}$", 4))
FORMATS = (("date", 10), ("uuid", 36), ("ipv4", 15))
FORMAT_NAMES = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
Sized = tuple[dict[str, Any], int]


def schema(rng: random.Random) -> Sized:
    """At most MAX_BYTES bytes of document: each token has one byte at least, so it is also the most tokens."""
    while True:
        # A node may be named and used from several places.
        shared, shared_bytes = _leaf(rng)
        root, num_bytes = _node(rng, depth=3, shared_bytes=shared_bytes)
        if num_bytes <= MAX_BYTES:
            return {**root, "$defs": {"shared": shared}}, num_bytes


def _node(rng: random.Random, depth: int, shared_bytes: int) -> Sized:
    kind = rng.choice(("object", "object", "array", "leaf", "anyOf", "tuple", "ref")) if depth else "leaf"
    match kind:
        case "object":
            return _object(rng, depth, shared_bytes)
        case "array":
            item, num_bytes = _node(rng, depth - 1, shared_bytes)
            least = rng.randint(0, 2)
            most = least + rng.randint(0, 3)
            return {"type": "array", "items": item, "minItems": least, "maxItems": most}, 2 + most * (num_bytes + 2)
        case "tuple":
            parts = [_node(rng, depth - 1, shared_bytes) for _ in range(rng.randint(1, 3))]
            items = [part for part, _ in parts]
            num_bytes = 2 + sum(size + 2 for _, size in parts)
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}, num_bytes
        case "anyOf":
            parts = [_node(rng, depth - 1, shared_bytes) for _ in range(rng.randint(2, 3))]
            return {"anyOf": [part for part, _ in parts]}, max(size for _, size in parts)
        case "ref":
            return {"$ref": "#/$defs/shared"}, shared_bytes
    return _leaf(rng)


def _object(rng: random.Random, depth: int, shared_bytes: int) -> Sized:
    properties: dict[str, Any] = {}
    num_bytes = 2
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        properties[name], size = _node(rng, depth - 1, shared_bytes)
        num_bytes += 2 * len(name.encode()) + size + 8  # quotes, escapes, colon, comma, spaces
    required = [name for name in properties if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }, num_bytes


def _leaf(rng: random.Random) -> Sized:
    match rng.choice(("string", "pattern", "format", "integer", "range", "number", "boolean", "null", "enum", "const")):
        case "string":
            least = rng.randint(0, 4)
            most = least + rng.randint(0, 12)
            return {"type": "string", "minLength": least, "maxLength": most}, 2 + 6 * most
        case "pattern":
            pattern, most = rng.choice(PATTERNS)
            return {"type": "string", "pattern": pattern}, 2 + most
        case "format":
            name, most = rng.choice(FORMATS)
            return {"type": "string", "format": name}, 2 + most
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 1, 9, 500))}, 6
        case "range":
            return {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 256, "multipleOf": 4}, 4
        case "number":
            return {"enum": [rng.randint(-9, 9) / 4, rng.randint(0, 9)]}, 8
        case "boolean":
            return {"type": "boolean"}, 5
        case "null":
            return {"type": "null"}, 4
        case "const":
            value = rng.choice((None, 7, "seven", [1, "a"], {"k": False}))
            return {"const": value}, 20
    return {"enum": rng.sample(WORDS, rng.randint(1, 4))}, 2 + 6 * 9


# --- every keyword and spelling, also those without effect, of two drafts

FREE_NAMES = ("^[a-z]{1,3}$", "^x-", "^(?:left|right|né)$", "^[0-9]{2}$")
CONDITION = {"if", "then", "else"}
#: Beside any schema, these change nothing.
WITHOUT_EFFECT: tuple[dict[str, Any], ...] = (
    {"uniqueItems": False},
    {"propertyNames": {}},
    {"propertyNames": True},
    {"propertyNames": {"type": "string"}},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True, "b": {}}},
    {"not": False},
    {"not": {"not": {}}},
    {"contains": {"type": "integer"}, "minContains": 0},
    {"minContains": 3, "maxContains": 1},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"if": {"type": "string"}},
    {"then": False, "else": {"not": {}}},
    {"if": {"minLength": 3}, "then": True, "else": {}},
    {"if": True, "else": False},
    {"format": "password"},
    {"format": "file-path"},
    {"format": "ipvanyaddress"},
    {"format": 7},
    {"default": {"$ref": "#/nowhere"}, "examples": [{"$ref": "https://example.org"}]},
    {"title": "t", "description": "d", "$comment": "c", "deprecated": True, "readOnly": True, "writeOnly": False},
    {"contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {"not": {}}},
    {"nullable": True, "discriminator": {"propertyName": "kind"}, "x-order": 1, "example": {"$ref": "#"}},
    {"minLength": 0, "minItems": 0.0, "minProperties": 0},
)


def any_schema(rng: random.Random) -> dict[str, Any]:
    """Of every keyword that is supported, in draft 2020-12 or 7. Its documents may be long."""
    shape = rng.choice(("plain", "plain", "id", "anchor", "embedded", "draft 7"))
    shared = rng.choice((_rich(rng, 1) if shape != "draft 7" else _number(rng), {"type": "integer", "minimum": 3}))
    match shape:
        case "id":
            reference, root = "https://example.org/a/b#/$defs/shared", {"$id": "https://example.org/a/b"}
            definitions: dict[str, Any] = {"shared": shared}
        case "anchor":
            reference, root, definitions = "#here", {}, {"at": {"$anchor": "here", **shared}}
        case "embedded":
            # Its own reference is relative to its own $id.
            inner = {"$id": "part/c", "$ref": "#/$defs/deep", "$defs": {"deep": shared}}
            reference, root, definitions = "part/c", {"$id": "https://example.org/a/"}, {"inner": inner}
        case "draft 7":
            node = {"type": "array", "items": [{"$ref": "#/definitions/s~1t"}, _number(rng)], "additionalItems": False}
            node |= {"minItems": 2, "dependencies": {}, "const1": {"$ref": "#"}}
            hidden = {"$ref": "#/definitions/u", "minLength": 99, "type": "null"}  # the reference hides the rest
            return {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"s/t": hidden, "u": shared},
                **node,
            }
        case _:
            reference, root, definitions = "#/$defs/a%25b", {}, {"a%b": shared}
    node = {"type": "object", "properties": {"by": {"$ref": reference}, "$ref": _rich(rng, 2)}}
    node["required"] = rng.choice((["by"], ["by", "$ref"]))
    node["additionalProperties"] = rng.choice((False, {"$ref": reference}, {"type": "boolean"}))
    return {**root, **_sprinkled(rng, node), "$defs": definitions}


def _rich(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: tuple[str, ...] = ("leaf", "format", "number", "data")
    kinds += ("free", "free", "array", "closed", "union", "both") if depth else ()
    match rng.choice(kinds):
        case "leaf":
            node = _leaf(rng)[0]
        case "format":
            node = {"type": "string", "format": rng.choice(FORMAT_NAMES)}
        case "number":
            node = _number(rng)
        case "data":
            node = {"const": {"$ref": "#/$defs/none", "$id": rng.choice(("a", 1, None))}}
        case "free":
            node = _free(rng, depth)
        case "array":
            node = {"type": "array", "items": _rich(rng, depth - 1), "maxItems": rng.randint(0, 3)}
            node |= rng.choice(
                ({}, {"contains": True, "minContains": 0, "maxContains": 2}, {"unevaluatedItems": False})
            )
        case "closed":
            node = {"properties": {name: _rich(rng, depth - 1) for name in rng.sample(NAMES, 2)}, "type": "object"}
            node |= rng.choice(({"unevaluatedProperties": False}, {"additionalProperties": {"not": {}}}))
            node |= rng.choice(({}, {"required": list(node["properties"]), "minProperties": 2}))
        case "union":
            node = {"anyOf": [_rich(rng, depth - 1), _rich(rng, depth - 1)]}
        case _:
            first, second = rng.sample(NAMES, 2)
            node = {
                "allOf": [
                    {"type": "object", "properties": {first: _rich(rng, depth - 1)}, "required": [first]},
                    {"properties": {second: _rich(rng, 0)}, "additionalProperties": True},
                ]
            }
    return _sprinkled(rng, node)


def _free(rng: random.Random, depth: int) -> dict[str, Any]:
    """An object with names that it does not list, some of which need escapes."""
    node: dict[str, Any] = {"type": "object", "additionalProperties": rng.choice((_rich(rng, depth - 1), False))}
    if node["additionalProperties"] is False or rng.random() < 0.5:
        node["patternProperties"] = {rng.choice(FREE_NAMES): _rich(rng, depth - 1)}
    if rng.random() < 0.6:
        listed = rng.sample(("tab\there", "a b", "nö", 'q"', "x/y", "\x7f"), 2)
        node["properties"] = {name: _number(rng) for name in listed}
        node["required"] = listed
    least = len(node.get("required", ()))
    node |= rng.choice(({}, {"minProperties": least + 1}, {"maxProperties": least + 2}))
    return node


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.choice((0, 0.0, -1, 4, 0.001, 1e-9, -0.5, 123456.789, rng.randint(-99, 99), rng.uniform(-9, 9)))
    node: dict[str, Any] = {"type": rng.choice(("number", ["number", "null"]))}
    node[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.6:
        node[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((0.25, 1, 10, 1e-3))
    return rng.choice((node, node, {"type": "integer", "minimum": -7, "exclusiveMaximum": rng.choice((2**63, 9, 2.5))}))


def _sprinkled(rng: random.Random, node: dict[str, Any]) -> dict[str, Any]:
    for _ in range(rng.choice((0, 0, 1, 2))):
        extra = rng.choice(WITHOUT_EFFECT)
        if not node.keys() & extra.keys() and not (node.keys() & CONDITION and extra.keys() & CONDITION):
            node = {**node, **extra} if rng.random() < 0.5 else {**extra, **node}
    return node

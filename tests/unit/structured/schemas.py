"""Random JSON schemas whose documents are bounded, with the most bytes that a document may have."""

from __future__ import annotations

import random
from typing import Any

MAX_BYTES = 700
NAMES = ("id", "name", "size", "tags", "owner", "kind", "value", "left", "right", "né", 'a "b"', "x/y")
WORDS = ("red", "green", "blue", "", "naïve", "tab\there", 'quote"', "0", "true", "日本")
PATTERNS = (("^[a-z]{2,6}$", 6), ("^[0-9]{3}-[0-9]{4}$", 8), ("^(yes|no|maybe)$", 5), ("^[A-F0-9]{4}$", 4))
FORMATS = (("date", 10), ("uuid", 36), ("ipv4", 15))
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

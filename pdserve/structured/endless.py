"""Detects JSON schemas whose documents are all infinite: a node that requires itself. Pure.

llguidance follows such a schema until max_tokens, so admission rejects it. The rule is the least fixed point: a
reference is finite if its target is, and everything else follows from its parts. Unknown features (anchors, other
keywords) count as finite, so no satisfiable schema is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.core.json_schema import path_of, resolve


def is_endless(root: Mapping[str, Any]) -> bool:
    references = {one["$ref"] for one in _nodes(root) if _is_local(one.get("$ref"))}
    targets = {one: target for one in references if (target := _resolved(root, one)) is not None}
    finite = references - targets.keys()
    while newly := {one for one, target in targets.items() if one not in finite and _is_finite(target, finite)}:
        finite |= newly
    return not _is_finite(root, finite)


def _is_finite(node: object, finite: set[str]) -> bool:
    if not isinstance(node, Mapping) or "const" in node or "enum" in node:
        return True
    reference = node.get("$ref")
    if _is_local(reference) and reference not in finite:
        return False
    if not all(_is_finite(part, finite) for part in _list(node, "allOf")):
        return False
    for choices in (_list(node, "anyOf"), _list(node, "oneOf")):
        if choices and not any(_is_finite(part, finite) for part in choices):
            return False
    kind = node.get("type")
    if kind in ("object", ["object"]):
        parts = _required_properties(node)
    elif kind in ("array", ["array"]):
        parts = _required_items(node)
    else:
        return True  # a document of another type may be finite
    return all(_is_finite(part, finite) for part in parts)


def _required_properties(node: Mapping[str, Any]) -> list[object]:
    properties = node.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return [known[name] for name in _list(node, "required") if isinstance(name, str) and name in known]


def _required_items(node: Mapping[str, Any]) -> list[object]:
    least = node.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return []
    items, rest = node.get("items"), "items"
    first = _list(node, "prefixItems")
    if isinstance(items, list):  # the form of draft 7
        first, rest = items, "additionalItems"
    return [*first[:least], *([node.get(rest)] if least > len(first) else [])]


def _nodes(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for part in value.values():
            yield from _nodes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nodes(part)


def _is_local(reference: object) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _resolved(root: Mapping[str, Any], reference: str) -> object:
    """The value of a JSON pointer (RFC 6901); None if there is none."""
    try:
        return resolve(root, path_of(reference))
    except LookupError:
        return None


def _list(node: Mapping[str, Any], name: str) -> list[Any]:
    held = node.get(name)
    return held if isinstance(held, list) else []

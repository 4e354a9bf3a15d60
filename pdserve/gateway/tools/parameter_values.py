"""The JSON of a call's parameter that a model writes as bare text; the function's schema gives its type. Pure."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn, final

_UNIONS: Final = ("anyOf", "oneOf", "allOf")
MAX_STEPS: Final = 4096  # schemas and values that are read for the types of one parameter


def parameter_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a function's schema allows for a parameter; a string if it says nothing."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return frozenset(_types(schema, parameters)) or frozenset({"string"})


@final
class ParameterValue:
    """Receives the text in pieces, and leaves out the line ends that the template writes around it. A string is
    passed on as it comes, a value of another type at its end."""

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._is_string = types == {"string"}
        self._text = ""  # not passed on yet
        self._has_begun = False

    def feed(self, text: str) -> str:
        """More of the JSON text."""
        self._text += text
        if not self._is_string or not self._text:
            return ""
        found = self._begin()
        whole = self._text.removesuffix("\n")
        self._text = self._text[len(whole) :]
        return found + _escaped(whole)

    def end(self) -> str:
        found = self._begin()
        text = self._text.removesuffix("\n")
        return f'{found}{_escaped(text)}"' if self._is_string else _json(text, self._types)

    def cut(self) -> str:
        """Like end(), of a text that was cut: without a quotation mark at the end."""
        if self._is_string:
            return self._begin() + _escaped(self._text.removesuffix("\n"))
        return _json(self._text, self._types) if self._text.strip() else ""

    def _begin(self) -> str:
        if self._has_begun:
            return ""
        self._has_begun = True
        self._text = self._text.removeprefix("\n")
        return '"'


def _json(text: str, types: frozenset[str]) -> str:
    """A string if the text is no value of another allowed type."""
    try:
        value, found = _parsed(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value, found = text, json.dumps(text, ensure_ascii=False)
    return found if types & _types_of(value) else json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> tuple[Any, str]:
    """A value and its JSON. Qwen3-Coder's template renders the values of earlier calls as Python's, and the model may
    do the same."""
    try:
        return json.loads(text, parse_constant=_no_number), text
    except ValueError:
        value = ast.literal_eval(text)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Each schema is read once: unions of references to each other have more paths than any limit of depth allows."""
    found: set[str] = set()
    pending, seen, num_left = [schema], set[int](), MAX_STEPS
    while pending and num_left > 0:
        num_left -= 1
        one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        given = one.get("type")
        if isinstance(given, str):
            found.add(given)
        elif isinstance(given, list):
            found.update(part for part in given[:num_left] if isinstance(part, str))
        else:
            values, constant = one.get("enum"), [one["const"]] if "const" in one else []
            for value in [*(values[:num_left] if isinstance(values, list) else ()), *constant]:
                found |= _types_of(value)
                num_left -= 1
            parts = [part for union in _UNIONS if isinstance(one.get(union), list) for part in one[union][:num_left]]
            pending += [_referenced(one.get("$ref"), root), *parts]
    return found


def _referenced(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _types_of(value: Any) -> set[str]:
    """The types that JSON Schema gives to a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"number", "integer"}
    return {{float: "number", str: "string", list: "array", dict: "object"}.get(type(value), "null")}

"""Reads the calls of Qwen3-Coder and Qwen3.5, which are XML. Pure.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter> .. </function></tool_call>

Values are bare text. Models sometimes omit <tool_call>, which is accepted before the name of a tool, or an end mark.
Other text within a call is text of the answer, after the call.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NoReturn, final

from pdserve.gateway.tools.reading import MAX_NAME_CHARS, SPACE, Arguments, CallReader, Mark

# --- values ---------------------------------------------------------------------------------------------------
# The JSON of a parameter that a model writes as bare text; the function's schema gives its type.

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


# --- calls ----------------------------------------------------------------------------------------------------

_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


class _Place(Enum):
    TEXT = "outside of calls"
    OPENED = "after <tool_call>"
    NAME = "after <function="
    BETWEEN = "between parameters"
    KEY = "after <parameter="
    VALUE = "in a value"


@final
class XmlReader(CallReader):
    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """`parameters` are the schemas of the tools' parameters, by the tools' names."""
        super().__init__()
        self._parameters = parameters
        self._place = _Place.TEXT
        self._outside = Mark(_CALL, _CALL_END, _FUNCTION)
        self._function = Mark(_FUNCTION)
        self._inside = Mark(_PARAMETER, _FUNCTION_END, _CALL_END, _CALL, _FUNCTION)
        self._value_end = Mark(_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        self._opening = ""  # the first mark of what may become a call; the text after it is in _raw
        self._word = ""  # a name or key that is being read
        self._schema: Mapping[str, Any] = {}  # of the call's parameters
        self._value = ParameterValue(frozenset())
        self._separator = ""  # before the next parameter
        self._extra = ""  # text within a call
        self._is_open = False  # </tool_call> may follow

    def _char(self, char: str) -> None:
        place = self._place
        if place is _Place.TEXT:
            self._feed_text(char)
        elif place is _Place.OPENED:
            self._raw += char
            self._feed_opened(char)
        elif place is _Place.NAME:
            self._raw += char
            self._feed_name(char)
        elif place is _Place.BETWEEN:
            self._add_extra(self._inside.feed(char))
            self._go_on(self._inside.found())
        elif place is _Place.KEY:
            self._feed_key(char)
        else:
            self._found.append(Arguments(self._value.feed(self._value_end.feed(char))))
            if mark := self._value_end.found():
                self._found.append(Arguments(self._value.end()))
                self._go_on(mark)

    def _end(self) -> None:
        place, self._place = self._place, _Place.TEXT
        if place in (_Place.OPENED, _Place.NAME):
            self._write_all(self._opening + self._raw)
        elif place is _Place.KEY:
            self._add_extra(_PARAMETER + self._word)
        elif place is _Place.VALUE:
            value = self._value.feed(self._value_end.rest())
            self._found.append(Arguments(value + self._value.cut()))
        self._write_extra()
        rest = self._outside.rest()
        if not (self._is_open and _CALL_END.startswith(rest)):
            self._write_all(rest)
        super()._end()

    # ------------------------------------------------------------------------------------------------------------

    def _feed_text(self, char: str) -> None:
        self._write_all(self._outside.feed(char))
        mark = self._outside.found()
        if mark == _CALL_END and self._is_open:
            self._space, self._is_open = "", False
        elif mark == _CALL_END:
            self._write_all(mark)
        elif mark:
            self._open(mark)

    def _open(self, mark: str) -> None:
        self._is_open = self._is_open and mark != _CALL
        self._opening, self._raw, self._word = mark, "", ""
        self._place = _Place.OPENED if mark == _CALL else _Place.NAME

    def _add_extra(self, text: str) -> None:
        """Space between marks is no text."""
        self._extra += text if self._extra else text.lstrip(SPACE)

    def _write_extra(self) -> None:
        self._write_all(self._extra.rstrip(SPACE))
        self._extra = ""

    def _feed_opened(self, char: str) -> None:
        if char in SPACE and not self._function.held:
            return
        if self._function.feed(char):
            self._function.rest()
            self._reject()
        elif self._function.found():
            self._place = _Place.NAME

    def _feed_name(self, char: str) -> None:
        if char != ">":
            self._word += char
            if char in "<\n" or len(self._word) > MAX_NAME_CHARS:
                self._reject()
            return
        name = self._word.strip()
        if not name or (self._opening == _FUNCTION and name not in self._parameters):
            self._reject()
            return
        self._call(name)
        self._is_open = True
        self._found.append(Arguments("{"))
        self._schema, self._separator, self._place = self._parameters.get(name, {}), "", _Place.BETWEEN

    def _reject(self) -> None:
        """What was read is not a call. A call may begin within the text after its first mark."""
        raw, self._place = self._raw, _Place.TEXT
        self._write_all(self._opening)
        for char in raw:
            self._char(char)

    def _go_on(self, mark: str | None) -> None:
        """After a mark within a call."""
        if mark == _PARAMETER:
            self._place, self._word = _Place.KEY, ""
        elif mark == _PARAMETER_END:
            self._place = _Place.BETWEEN
        elif mark:  # a model may omit </function>
            self._found.append(Arguments("}"))
            self._place = _Place.TEXT
            self._write_extra()
            if mark == _CALL_END:
                self._is_open = False
            elif mark != _FUNCTION_END:
                self._open(mark)

    def _feed_key(self, char: str) -> None:
        if char in "<\n" or len(self._word) > MAX_NAME_CHARS:
            self._add_extra(_PARAMETER + self._word)
            self._place = _Place.BETWEEN
            self._char(char)
            return
        if char != ">":
            self._word += char
            return
        key = self._word.strip()
        self._found.append(Arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: "))
        self._value = ParameterValue(parameter_types(self._schema, key))
        self._separator, self._place = ", ", _Place.VALUE

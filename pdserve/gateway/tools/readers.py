"""Readers of the forms in which models write tool calls. Pure.

hermes (Hermes, Qwen2.5, Qwen3): text, then calls, each `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
llama3 (Llama 3.x): the whole answer is `{"name": .., "parameters": {..}}`, or several with a semicolon between them.
qwen3_coder (Qwen3-Coder, Qwen3.5): text, then calls in XML (xml_reader.py).
mistral: text, then `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`, or `[TOOL_CALLS]name[ARGS]{..}` for each call.

Nothing that a model wrote is lost. A character is part of a call's name or arguments, or of the syntax of a call
(marks, separators, keys, `id` and `type`), or it is text, verbatim and in order. An object that proves not to be a call
before its name is known is text as a whole. Later, what belongs to no call becomes text after the call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, Final, final

from pdserve.gateway.tools.reading import (
    MAX_NAME_CHARS,
    SEPARATORS,
    SPACE,
    Arguments,
    CallBegan,
    CallReader,
    CharReader,
    JsonValue,
    Mark,
    Text,
)
from pdserve.gateway.tools.xml_reader import XmlReader

_CALLS: Final = "[TOOL_CALLS]"
_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_CALL_ID: Final = "[CALL_ID]"  # may follow a name in Mistral's second form
_CALL_ID_VALUE: Final = re.compile(r"[A-Za-z0-9_-]{0,64}")


@final
class HermesReader(CallReader):
    """Models sometimes write several objects between two marks, or omit the second mark."""

    def __init__(self) -> None:
        super().__init__()
        self._mark = Mark(_CALL, _CALL_END)
        self._is_open = False  # the end mark of a call is missing so far
        self._is_after = False  # between an object and its end mark, without other text so far

    def _char(self, char: str) -> None:
        if self._object is not None:
            if not self._feed_object(char):
                self._is_open = self._is_open or self._is_named
                self._is_after = self._is_named
                self._leave_object(char)
        elif self._is_after and not self._mark.held and char == "{":
            self._begin("")
            self._feed_object(char)
        elif self._is_after and not self._mark.held and char in SEPARATORS:
            self._space += char
        else:
            self._feed_text(self._mark.feed(char))
            mark = self._mark.found()
            if mark == _CALL:
                self._is_open = False
                self._begin(mark)
            elif mark and self._is_open:
                self._is_open = self._is_after = False
                self._space = ""
            elif mark:
                self._feed_text(mark)

    def _feed_text(self, text: str) -> None:
        self._is_after = self._is_after and not text
        self._write_all(text)

    def _end(self) -> None:
        rest = self._mark.rest()
        if not (self._is_open and _CALL_END.startswith(rest)):
            self._write_all(rest)
        super()._end()


@final
class Llama3Reader(CallReader):
    """Only objects with the name of a tool are calls, because an answer may itself be JSON."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._tag = Mark("<|python_tag|>")
        self._is_text = False  # the rest is text
        self._between = ""  # before an object

    def _is_tool(self, name: str) -> bool:
        return name in self._names

    def _char(self, char: str) -> None:
        if self._is_text:
            self._write(char)
        elif self._object is not None:
            if not self._feed_object(char):
                self._is_text = not self._is_named
                self._leave_object(char)
        elif char == "{" and not self._tag.held:
            self._begin(self._between)
            self._between = ""
            self._feed_object(char)
        else:
            self._before_object(char)

    def _before_object(self, char: str) -> None:
        """Space, the tag, and semicolons between calls; anything else makes the rest text."""
        if not self._tag.held and (char in SPACE or (char == ";" and self._has_calls)):
            self._between += char
            return
        passed = self._tag.feed(char)
        if tag := self._tag.found():
            self._between += tag
        elif passed:
            self._is_text = True
            self._write_all(self._between + passed + self._tag.rest())
            self._between = ""

    def _end(self) -> None:
        rest = self._between + self._tag.rest()
        if not self._has_calls or rest.strip(SEPARATORS):
            self._write_all(rest)
        super()._end()


@final
class ArrayReader(CallReader):
    """Reads `[{..}, {..}]`, which the grammar of a required call produces. Anything else is text."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: other objects are text."""
        super().__init__()
        self._names = None if names is None else frozenset(names)
        self._between = ""  # since the last call

    def _is_tool(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _char(self, char: str) -> None:
        if self._object is not None:
            if not self._feed_object(char):
                self._leave_object(char)
        elif char == "{":
            self._begin(self._between)
            self._between = ""
            self._feed_object(char)
        elif char in SEPARATORS or char == ("]" if self._has_calls else "["):
            self._between += char
        else:
            self._write_all(self._between + char)
            self._between = ""

    def _end(self) -> None:
        if not self._has_calls:
            self._write_all(self._between)
        super()._end()


@final
class NamedReader(CharReader):
    """The whole answer is the arguments of one function, which its grammar enforces."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._has_begun = False

    def _char(self, char: str) -> None:
        if not self._has_begun:
            self._found.append(CallBegan(self._name))
        self._has_begun = True
        self._found.append(Arguments(char))

    def _end(self) -> None:
        """Nothing was held back."""


@final
class FirstCharReader(CharReader):
    """Reads with `reader` if the answer begins with `first`. Otherwise all of it is text."""

    def __init__(self, first: str, reader: CharReader) -> None:
        super().__init__()
        self._first, self._reader = first, reader
        self._is_text: bool | None = None

    def _char(self, char: str) -> None:
        if self._is_text is None:
            self._is_text = char != self._first
        self._found += [Text(char)] if self._is_text else self._reader.feed(char)

    def _end(self) -> None:
        self._found += self._reader.end()


class _Place(Enum):
    TEXT = "outside of calls"
    NAME = "after [TOOL_CALLS]"
    ARGS = "after a name, before the arguments"
    VALUE = "in the arguments"
    ARRAY = "in an array, between its objects"
    OBJECT = "in an object of an array"


@final
class MistralReader(CallReader):
    def __init__(self) -> None:
        super().__init__()
        self._place = _Place.TEXT
        self._mark = Mark(_CALLS)
        self._args = Mark("[ARGS]", _CALLS)
        self._name = ""  # in the second form; all that was read since the mark is in _raw
        self._value = JsonValue()
        self._has_bracket = False  # the objects are in an array
        self._has_array_calls = False
        self._between = ""  # since the last object of the array

    def _char(self, char: str) -> None:
        match self._place:
            case _Place.TEXT:
                self._write_all(self._mark.feed(char))
                if mark := self._mark.found():
                    self._open(mark)
            case _Place.NAME:
                self._feed_name(char)
            case _Place.ARGS:
                self._feed_args(char)
            case _Place.VALUE:
                self._feed_value(char)
            case _Place.ARRAY:
                self._feed_array(char)
            case _Place.OBJECT:
                if not self._feed_object(char):
                    self._has_array_calls = self._has_array_calls or self._is_named
                    self._place = _Place.ARRAY if self._has_bracket else _Place.TEXT
                    self._leave_object(char)

    def _open(self, mark: str) -> None:
        self._place, self._raw, self._name = _Place.NAME, mark, ""
        self._has_bracket = self._has_array_calls = False

    def _reject(self, char: str) -> None:
        """What was read since the mark is text, and `char` is read again."""
        raw, self._raw, self._place = self._raw, "", _Place.TEXT
        self._write_all(raw)
        self._char(char)

    def _feed_name(self, char: str) -> None:
        is_first = not self._name and not self._args.held
        if is_first and char == "[":
            self._between, self._has_bracket, self._place = self._raw + char, True, _Place.ARRAY
        elif is_first and char == "{":
            self._begin_object(self._raw, char)
        elif is_first and char in SPACE:
            self._raw += char
        elif char == "{":  # some templates have no [ARGS]
            self._args.rest()
            self._end_name()
            self._feed_args(char)
        else:
            self._name += self._args.feed(char)
            self._raw += char
            if mark := self._args.found():
                self._end_name()
                if mark == _CALLS:
                    self._write_all(self._raw.removesuffix(mark))
                    self._open(mark)
            elif len(self._name) > MAX_NAME_CHARS:
                self._args.rest()
                raw, char = self._raw[:-1], self._raw[-1]
                self._raw = raw
                self._reject(char)

    def _end_name(self) -> None:
        name, _, call_id = self._name.partition(_CALL_ID)
        self._place = _Place.ARGS
        self._name = name.strip() if _CALL_ID_VALUE.fullmatch(call_id.strip()) else ""

    def _feed_args(self, char: str) -> None:
        if char in SPACE:
            self._raw += char
        elif char == "{" and self._name and not any(one in self._name for one in SPACE):
            self._call(self._name)
            self._place, self._value, self._raw = _Place.VALUE, JsonValue(), ""
            self._feed_value(char)
        else:
            self._reject(char)

    def _feed_value(self, char: str) -> None:
        value = self._value
        passed = char if value.is_in_string else self._mark.feed(char)
        if self._mark.found():
            self._open(_CALLS)
        elif value.feed(char):
            self._found.append(Arguments(passed))
            if value.is_done:
                self._place = _Place.TEXT
        else:
            self._found.append(Arguments(passed.removesuffix(char)))
            self._place = _Place.TEXT
            self._char(char)

    def _feed_array(self, char: str) -> None:
        if char == "{":
            self._begin_object(self._between, char)
        elif char in SEPARATORS:
            self._between += char
        else:
            between, self._between, self._place = self._between, "", _Place.TEXT
            if char != "]":
                self._write_all(between)
                self._char(char)
            elif not self._has_array_calls:
                self._write_all(between + char)

    def _begin_object(self, raw: str, char: str) -> None:
        self._between, self._place = "", _Place.OBJECT
        self._begin(raw)
        self._feed_object(char)

    def _end(self) -> None:
        match self._place:
            case _Place.TEXT:
                self._write_all(self._mark.rest())
            case _Place.NAME | _Place.ARGS:
                self._write_all(self._raw)
            case _Place.VALUE:
                self._found.append(Arguments(self._mark.rest()))
            case _Place.ARRAY:
                self._write_all("" if self._has_array_calls else self._between)
        super()._end()


def make_reader(tool_format: str, parameters: Mapping[str, Mapping[str, Any]]) -> CharReader:
    """The reader for the form in which a model writes calls. `parameters` are the schemas of the tools' parameters,
    by the tools' names. Raises KeyError for an unknown form."""
    if tool_format == "llama3":
        return Llama3Reader(parameters)
    if tool_format == "qwen3_coder":
        return XmlReader(parameters)
    return {"hermes": HermesReader, "mistral": MistralReader}[tool_format]()

"""Readers of the forms in which models write tool calls. Pure.

hermes (Hermes, Qwen2.5, Qwen3): text, then calls, each `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
llama3 (Llama 3.x): the whole answer is `{"name": .., "parameters": {..}}`, or several with a semicolon between them.
qwen3_coder (Qwen3-Coder, Qwen3.5): text, then calls in XML (xml_reader.py).
mistral: text, then `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`, or `[TOOL_CALLS]name[ARGS]{..}` for each call.
An object that proves not to be a call before its name is known is text. An array without calls is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, final

from pdserve.gateway.tools.call_object import JsonValue
from pdserve.gateway.tools.call_reader import SPACE, CallReader, CharReader
from pdserve.gateway.tools.events import Arguments, CallBegan, Reader
from pdserve.gateway.tools.marks import Mark
from pdserve.gateway.tools.xml_reader import XmlReader

_CALL_ID: Final = "[CALL_ID]"  # may follow a name in Mistral's second form


@final
class HermesReader(CallReader):
    def __init__(self) -> None:
        super().__init__()
        self._mark = Mark("<tool_call>")
        self._close = Mark("</tool_call>")
        self._is_after = False  # between an object and its end mark

    def _char(self, char: str) -> None:
        if self._object is not None:
            if not self._feed_object(char):
                self._is_after = self._is_named
                self._give_up()
        elif self._is_after:
            self._close.feed(char)  # anything before the end mark is dropped
            self._is_after = not self._close.found()
        else:
            self._write_all(self._mark.feed(char))
            if mark := self._mark.found():
                self._begin(mark)

    def _end(self) -> None:
        self._write_all(self._mark.rest())
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
                self._give_up()
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
        if self._object is None and not self._has_calls:
            self._write_all(rest)
        super()._end()


@final
class ArrayReader(CallReader):
    """Reads `[{..}, {..}]`, which the grammar of a required call produces."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = False

    def _char(self, char: str) -> None:
        if self._object is not None:
            if not self._feed_object(char):
                self._give_up()
        elif char == "{":
            self._begin("")
            self._feed_object(char)
        elif char == "]":
            self.is_done = True


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
class MistralReader(CallReader):
    def __init__(self) -> None:
        super().__init__()
        self._mark = Mark("[TOOL_CALLS]")
        self._args = Mark("[ARGS]")
        self._array: ArrayReader | None = None
        self._name: str | None = None  # in the second form, the name that is being read
        self._value: JsonValue | None = None

    def _char(self, char: str) -> None:
        if self._array is not None:
            self._found += self._array.feed(char)
            if self._array.is_done:
                self._array = None
        elif self._value is not None:
            self._feed_value(char)
        elif self._name is not None:
            self._feed_name(char)
        else:
            self._write_all(self._mark.feed(char))
            if mark := self._mark.found():
                self._name, self._raw = "", mark

    def _feed_name(self, char: str) -> None:
        assert self._name is not None
        self._raw += char
        if not self._name and char == "[" and not self._args.held:
            self._space, self._has_calls, self._name, self._array = "", True, None, ArrayReader()
            return
        if not self._name and char in SPACE:
            return
        if char == "{":  # some templates have no [ARGS]
            self._begin_value()
            if self._value is not None:
                self._feed_value(char)
            return
        passed = self._args.feed(char)
        self._name += passed
        if self._args.found():
            self._begin_value()

    def _begin_value(self) -> None:
        name = (self._name or "").partition(_CALL_ID)[0].strip()
        self._name = None
        self._args.rest()
        if not name:
            self._write_all(self._raw)
        else:
            self._call(name)
            self._value = JsonValue()

    def _feed_value(self, char: str) -> None:
        value = self._value
        assert value is not None
        if value.feed(char) and value.text:  # space before the array is skipped
            self._found.append(Arguments(char))
        if value.is_done:
            self._value = None

    def _end(self) -> None:
        self._write_all(self._mark.rest())
        if self._name is not None:
            self._write_all(self._raw)
        super()._end()


def make_reader(tool_format: str, parameters: Mapping[str, Mapping[str, Any]]) -> Reader:
    """The reader for the form in which a model writes calls. `parameters` are the schemas of the tools' parameters,
    by the tools' names. Raises KeyError for an unknown form."""
    if tool_format == "llama3":
        return Llama3Reader(parameters)
    if tool_format == "qwen3_coder":
        return XmlReader(parameters)
    return {"hermes": HermesReader, "mistral": MistralReader}[tool_format]()

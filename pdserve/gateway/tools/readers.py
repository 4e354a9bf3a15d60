"""Readers of the forms in which models write tool calls. Pure.

hermes (Hermes, Qwen2.5, Qwen3): text, then calls, each `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
llama3 (Llama 3.x): the whole answer is `{"name": .., "parameters": {..}}`, or several with a semicolon between them.
mistral: text, then `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`, or `[TOOL_CALLS]name[ARGS]{..}` for each call.
An object that proves not to be a call before its name is known is text. An array without calls is dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

from pdserve.gateway.tools.call_object import CallObject, JsonValue
from pdserve.gateway.tools.events import Arguments, CallBegan, Event, Reader, Text, joined
from pdserve.gateway.tools.marks import Mark

_SPACE: Final = " \t\r\n"
_CALL_ID: Final = "[CALL_ID]"  # may follow a name in Mistral's second form


class CharReader(Reader):
    """Passes one character at a time, so that the result cannot depend on where the text is split."""

    def __init__(self) -> None:
        self._found: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        for char in text:
            self._char(char)
        return self._taken()

    def end(self) -> list[Event]:
        self._end()
        return self._taken()

    def _char(self, char: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _taken(self) -> list[Event]:
        found, self._found = joined(self._found), []
        return found


class _Calls(CharReader):
    """Text, and objects of calls that a subclass finds in it."""

    def __init__(self) -> None:
        super().__init__()
        self._object: CallObject | None = None
        self._raw = ""  # becomes text if the object is not a call
        self._is_named = False
        self._space = ""  # space after text, which is dropped before a call
        self._has_calls = False

    def _write(self, char: str) -> None:
        if char in _SPACE:
            self._space += char
            return
        self._found.append(Text(self._space + char))
        self._space = ""

    def _write_all(self, text: str) -> None:
        for char in text:
            self._write(char)

    def _begin(self, raw: str) -> None:
        self._object, self._raw, self._is_named = CallObject(), raw, False

    def _feed_object(self, char: str) -> bool:
        """True while the object continues."""
        one = self._object
        assert one is not None
        self._raw += char
        one.feed(char)
        if one.name is not None and not self._is_named and not one.is_broken:
            if not self._is_tool(one.name):
                return False
            self._call(one.name)
            self._is_named = True
        if self._is_named:
            self._found.append(Arguments(one.take()))
        return not (one.is_done or one.is_broken)

    def _is_tool(self, name: str) -> bool:
        return True

    def _call(self, name: str) -> None:
        self._space, self._has_calls = "", True
        self._found.append(CallBegan(name))

    def _give_up(self) -> None:
        """The object is not a call. Its text is part of the answer, unless its name was already returned."""
        if self._object is not None and not self._is_named:
            self._write_all(self._raw)
        self._object, self._raw = None, ""

    def _end(self) -> None:
        self._give_up()
        if self._space and not self._has_calls:
            self._found.append(Text(self._space))
        self._space = ""


@final
class HermesReader(_Calls):
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
            self._is_after = not self._close.is_found()
        else:
            self._write_all(self._mark.feed(char))
            if self._mark.is_found():
                self._begin(self._mark.text)

    def _end(self) -> None:
        self._write_all(self._mark.rest())
        super()._end()


@final
class Llama3Reader(_Calls):
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
        if not self._tag.held and (char in _SPACE or (char == ";" and self._has_calls)):
            self._between += char
            return
        passed = self._tag.feed(char)
        if self._tag.is_found():
            self._between += self._tag.text
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
class ArrayReader(_Calls):
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
class MistralReader(_Calls):
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
            if self._mark.is_found():
                self._name, self._raw = "", self._mark.text

    def _feed_name(self, char: str) -> None:
        assert self._name is not None
        self._raw += char
        if not self._name and char == "[" and not self._args.held:
            self._space, self._has_calls, self._name, self._array = "", True, None, ArrayReader()
            return
        if not self._name and char in _SPACE:
            return
        if char == "{":  # some templates have no [ARGS]
            self._begin_value()
            if self._value is not None:
                self._feed_value(char)
            return
        passed = self._args.feed(char)
        self._name += passed
        if self._args.is_found():
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


def make_reader(tool_format: str, names: Collection[str]) -> Reader:
    """The reader for the form in which a model writes calls. Raises KeyError for an unknown form."""
    if tool_format == "llama3":
        return Llama3Reader(names)
    return {"hermes": HermesReader, "mistral": MistralReader}[tool_format]()

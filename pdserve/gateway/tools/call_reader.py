"""What the readers of tool calls share. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.gateway.tools.call_object import CallObject
from pdserve.gateway.tools.events import Arguments, CallBegan, Event, Reader, Text, joined

SPACE: Final = " \t\r\n"
SEPARATORS: Final = SPACE + ",;"  # may stand between calls


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


class CallReader(CharReader):
    """Text, and objects of calls that a subclass finds in it."""

    def __init__(self) -> None:
        super().__init__()
        self._object: CallObject | None = None
        self._raw = ""  # becomes text if the object is not a call
        self._is_named = False
        self._is_unread = False  # the last character broke the object
        self._space = ""  # space after text, which is dropped before a call
        self._has_calls = False

    def _write(self, char: str) -> None:
        if char in SPACE:
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
        """True while the object continues. Its end is followed by _leave_object."""
        one = self._object
        assert one is not None
        self._is_unread = not one.feed(char)
        if not self._is_named:
            self._raw += "" if self._is_unread else char
        if one.name is not None and not self._is_named and not one.is_broken:
            if not self._is_tool(one.name):
                return False
            self._call(one.name)
            self._is_named = True
        if self._is_named:
            self._found.append(Arguments(one.take()))
        return not (one.is_done or one.is_broken)

    def _leave_object(self, char: str) -> None:
        """After the last character of an object, or the one that broke it, which is then read again."""
        self._give_up()
        if self._is_unread:
            self._is_unread = False
            self._char(char)

    def _is_tool(self, name: str) -> bool:
        return True

    def _call(self, name: str) -> None:
        self._space, self._has_calls = "", True
        self._found.append(CallBegan(name))

    def _give_up(self) -> None:
        """The object is over. If its name is known, it was a call, and what is no part of a call is text. Otherwise
        all of it is text."""
        if self._object is not None:
            self._write_all(self._object.extra if self._is_named else self._raw)
        self._object, self._raw = None, ""

    def _end(self) -> None:
        if self._object is not None:
            self._object.end()
            if self._is_named:
                self._found.append(Arguments(self._object.take()))
        self._give_up()
        if self._space and not self._has_calls:
            self._found.append(Text(self._space))
        self._space = ""

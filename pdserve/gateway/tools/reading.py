"""What the readers of tool calls share: their events, reading by characters, and marks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from pdserve.gateway.tools.call_object import CallObject

# --- events ---------------------------------------------------------------------------------------------------
# What a reader finds in an answer's text.


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call; its arguments follow. Calls come one after another."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning before its answer."""

    text: str


Event = Text | CallBegan | Arguments | Reasoning


class Reader(Protocol):
    def feed(self, text: str) -> list[Event]:
        """The events that are complete after this text; may be empty."""
        ...

    def end(self) -> list[Event]:
        """After the last text, the events that were held back."""
        ...


def joined(events: Sequence[Event]) -> list[Event]:
    """Merges adjacent events of one kind, and drops empty ones."""
    found: list[Event] = []
    for one in events:
        last = found[-1] if found else None
        if isinstance(one, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + one.text)
        elif isinstance(one, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(last.text + one.text)
        elif isinstance(one, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + one.text)
        elif isinstance(one, CallBegan) or one.text:
            found.append(one)
    return found


# --- readers by character -------------------------------------------------------------------------------------

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


# --- marks ----------------------------------------------------------------------------------------------------


@final
class Mark:
    """Holds back text that may be the beginning of a mark. No mark begins with another one."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._longest = max(map(len, texts))
        self.held = ""

    def feed(self, char: str) -> str:
        """The text that is certainly not part of a mark."""
        self.held += char
        size = next(
            size
            for size in range(min(len(self.held), self._longest), -1, -1)
            if self._may_begin(self.held[len(self.held) - size :])
        )
        passed, self.held = self.held[: len(self.held) - size], self.held[len(self.held) - size :]
        return passed

    def found(self) -> str | None:
        """Once, the mark that is complete."""
        return self.rest() if self.held in self._texts else None

    def rest(self) -> str:
        held, self.held = self.held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(one.startswith(text) for one in self._texts)

"""What the readers of tool calls share: the reading of one call, events, reading by characters, and marks. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, final

# --- call object ----------------------------------------------------------------------------------------------
# Reads one call, `{"name": .., "arguments": {..}}`, character by character.
#
# The keys may come in any order, and `parameters` is Llama's name of the arguments. Other members are not lost: `extra`
# has their text, except for those that models write as a part of a call (`id`, `type`, `index`).

SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")
_IGNORED: Final = ("id", "type", "index")
_KEYS: Final = ("name", *_ARGUMENTS, *_IGNORED)
_NO_JSON: Final = "<"  # outside of a string, a mark of the next call
MAX_NAME_CHARS: Final = 256


@final
class JsonValue:
    """One JSON value. Checks only what is needed to find its end."""

    def __init__(self) -> None:
        self.text = ""  # of an object or an array, the first character
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self.is_in_string = False
        self._is_escaped = False

    @property
    def is_text(self) -> bool:
        return self.text.startswith('"')

    @property
    def is_nested(self) -> bool:
        return self.text.startswith(("{", "["))

    def feed(self, char: str) -> bool:
        """False if `char` is not part of the value: it comes after the end of a number or a literal, or breaks the
        value."""
        if not self.text and char in SPACE:
            return True
        if not self.is_in_string:
            if char in _NO_JSON or (not self.text and char in ",:]}"):
                self.is_broken = True
                return False
            if not self._depth and self.text and not self.is_text and char in SPACE + ",]}":
                self.is_done = True
                return False
        if not self.is_nested:
            self.text += char
        if self.is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.is_in_string = False
                self.is_done = self._depth == 0
        elif char == '"':
            self.is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
        return True


class _Place(Enum):
    BEFORE = "before the object"
    KEY = "before a key"
    COLON = "after a key"
    VALUE = "in a value"
    COMMA = "after a value"
    DONE = "after the object"
    BROKEN = "not such an object"


@final
class CallObject:
    def __init__(self) -> None:
        self.name: str | None = None
        self.extra = ""  # what belongs to no call: other members, and an incomplete one
        self._place = _Place.BEFORE
        self._key = JsonValue()
        self._key_text: str | None = None
        self._value = JsonValue()
        self._member = ""  # the text of a member that is not accepted yet, from its comma
        self._pending = ""  # arguments that were not taken yet
        self._seen: set[str] = set()  # the keys of accepted members

    @property
    def is_done(self) -> bool:
        return self._place is _Place.DONE

    @property
    def is_broken(self) -> bool:
        return self._place is _Place.BROKEN

    def feed(self, char: str) -> bool:
        """One character, while the object is neither done nor broken. False if `char` broke it and is not part of
        it."""
        place = self._place
        if place is _Place.VALUE:
            return self._feed_value(char)
        if place is not _Place.BEFORE:
            self._member += char
        if place is _Place.KEY and self._key.text:
            self._key.feed(char)
            if self._key.is_done:
                self._place, self._key_text = _Place.COLON, _text(self._key.text)
        elif char in SPACE:
            pass
        elif place is _Place.BEFORE and char == "{":
            self._place = _Place.KEY
        elif place is _Place.KEY and char == '"':
            self._key.feed(char)
        elif place is _Place.COLON and char == ":":
            self._place, self._value = _Place.VALUE, JsonValue()
        elif place is _Place.COMMA and char == ",":
            self._place, self._key = _Place.KEY, JsonValue()
        elif place is _Place.COMMA and char == "}":
            self._end()
        else:
            self._member = self._member[:-1]
            self._break()
            return False
        return True

    def take(self) -> str:
        """The arguments since the last take, once the name is known."""
        if self.name is None:
            return ""
        text, self._pending = self._pending, ""
        return text

    def end(self) -> None:
        """The text has ended. What may be the beginning of an accepted member was cut, and is no text."""
        if self._place is _Place.VALUE and self._key_text in _ARGUMENTS and self._is_accepted:
            self._pending += "" if self._value.is_nested else self._value.text
        elif self._place is not _Place.VALUE or not self._is_accepted:
            word = self._member.strip(SPACE + ",")
            if word and not any(f'"{key}":'.startswith(word) for key in self._missing()):
                self.extra += self._member

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _is_accepted(self) -> bool:
        """The member that is being read is part of a call."""
        return self._key_text in self._missing()

    def _missing(self) -> list[str]:
        has_arguments = not self._seen.isdisjoint(_ARGUMENTS)
        return [key for key in _KEYS if key not in self._seen and not (has_arguments and key in _ARGUMENTS)]

    def _feed_value(self, char: str) -> bool:
        value = self._value
        belongs = value.feed(char)
        is_accepted, is_arguments = self._is_accepted, self._key_text in _ARGUMENTS
        if belongs:
            self._member += char
            if is_accepted and is_arguments and value.is_nested:
                self._pending += char
                self._member = ""
        if value.is_broken:
            self._break()
        elif value.is_done:
            self._place = _Place.COMMA
            if is_accepted:
                self._accept()
            else:
                self.extra += self._member.lstrip(SPACE + ",")
            self._member = ""
            if not belongs and not self.is_broken:
                return self.feed(char)
        return belongs

    def _accept(self) -> None:
        value, key = self._value, self._key_text
        assert key is not None
        self._seen.add(key)
        if key == "name":
            name = _text(value.text) if value.is_text else None
            if not name or len(name) > MAX_NAME_CHARS:
                self._place = _Place.BROKEN
            else:
                self.name = name
        elif key in _ARGUMENTS and not value.is_nested:
            self._pending += _as_object(value.text)

    def _end(self) -> None:
        self._place = _Place.BROKEN if self.name is None else _Place.DONE
        self._member = ""
        if self._seen.isdisjoint(_ARGUMENTS):
            self._pending = "{}"

    def _break(self) -> None:
        self._place = _Place.BROKEN
        self.extra += self._member


def _as_object(raw: str) -> str:
    """Some models write the arguments' object as a string, or null or "" for an empty one. Any other value stays as
    it is, so that the client can tell the model."""
    text = _text(raw)
    if raw == "null" or (text is not None and not text.strip()):
        return "{}"
    try:
        return text if text is not None and isinstance(json.loads(text), dict) else raw
    except (ValueError, RecursionError):
        return raw


def _text(raw: str) -> str | None:
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


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

"""Reads one call, `{"name": .., "arguments": {..}}`, character by character. Pure.

The keys may come in any order; other keys are skipped. `parameters` is Llama's name of the arguments.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Final, final

_SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")
MAX_NAME_CHARS: Final = 256


@final
class JsonValue:
    """One JSON value. Checks only what is needed to find its end."""

    def __init__(self) -> None:
        self.text = ""
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_text(self) -> bool:
        return self.text.startswith('"')

    def feed(self, char: str) -> bool:
        """False if `char` comes after the value: the end of a number or a literal is only visible at the next
        character."""
        if not self.text and char in _SPACE:
            return True
        if not self._in_string and not self._depth and self.text and not self.is_text and char in _SPACE + ",]}":
            self.is_done = True
            return False
        self.text += char
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                self.is_done = self._depth == 0
        elif char == '"':
            self._in_string = True
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
        self._place = _Place.BEFORE
        self._key = JsonValue()
        self._key_text: str | None = None
        self._value = JsonValue()
        self._pending = ""  # arguments that were not taken yet
        self._has_arguments = False

    @property
    def is_done(self) -> bool:
        return self._place is _Place.DONE

    @property
    def is_broken(self) -> bool:
        return self._place is _Place.BROKEN

    def feed(self, char: str) -> None:
        """One character, while the object is neither done nor broken."""
        place = self._place
        if place is _Place.VALUE:
            self._feed_value(char)
        elif place is _Place.KEY and self._key.text:
            self._key.feed(char)
            if self._key.is_done:
                self._place, self._key_text = _Place.COLON, _text(self._key.text)
        elif char in _SPACE:
            return
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
            self._place = _Place.BROKEN

    def take(self) -> str:
        """The arguments since the last take, once the name is known."""
        if self.name is None:
            return ""
        text, self._pending = self._pending, ""
        return text

    # ------------------------------------------------------------------------------------------------------------

    def _feed_value(self, char: str) -> None:
        value, key = self._value, self._key_text
        belongs = value.feed(char)
        if key in _ARGUMENTS and belongs and value.text[:1] in ("{", "["):
            self._has_arguments = True
            self._pending += char
        if value.is_done:
            self._place = _Place.COMMA
            if key == "name":
                self._take_name()
            elif key in _ARGUMENTS and value.text[:1] not in ("{", "["):
                self._has_arguments = True
                # Some models write the object as a string, or null for an empty one.
                self._pending += (_text(value.text) or "{}") if value.is_text else "{}"
        if not belongs and self._place is _Place.COMMA:
            self.feed(char)

    def _take_name(self) -> None:
        name = _text(self._value.text) if self._value.is_text else None
        if not name or len(name) > MAX_NAME_CHARS:
            self._place = _Place.BROKEN
        else:
            self.name = name

    def _end(self) -> None:
        self._place = _Place.BROKEN if self.name is None else _Place.DONE
        if not self._has_arguments:
            self._pending = "{}"


def _text(raw: str) -> str | None:
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, str) else None

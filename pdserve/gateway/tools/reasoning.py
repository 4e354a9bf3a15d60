"""Splits reasoning between marks, at the beginning of an answer, from the rest. Pure."""

from __future__ import annotations

from enum import Enum
from typing import final

from pdserve.gateway.tools.call_reader import SPACE
from pdserve.gateway.tools.events import Event, Reader, Reasoning, Text, joined
from pdserve.gateway.tools.marks import Mark


@final
class TextReader(Reader):
    """An answer without calls."""

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def end(self) -> list[Event]:
        return []


class _Place(Enum):
    BEFORE = "before the first mark"
    INSIDE = "within the reasoning"
    AFTER = "in the space after the last mark"
    REST = "in the rest"


@final
class ReasoningReader(Reader):
    """Space around the marks is dropped. The rest is read by another reader."""

    def __init__(self, rest: Reader, *, is_open: bool, marks: tuple[str, str] = ("<think>", "</think>")) -> None:
        """`is_open`: the prompt ended with the first mark, so the answer begins within the reasoning."""
        self._rest = rest
        self._place = _Place.INSIDE if is_open else _Place.BEFORE
        self._open, self._close = map(Mark, marks)
        self._space = ""  # before the first mark, or after text of the reasoning
        self._has_text = False
        self._found: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        for index, char in enumerate(text):
            if self._place is _Place.REST:
                self._found += self._rest.feed(text[index:])
                break
            self._char(char)
        return self._taken()

    def end(self) -> list[Event]:
        if self._place is _Place.BEFORE:
            self._found += self._rest.feed(self._space + self._open.rest())
        elif self._place is _Place.INSIDE:
            self._think(self._close.rest())
        self._found += self._rest.end()
        return self._taken()

    # ------------------------------------------------------------------------------------------------------------

    def _char(self, char: str) -> None:
        if self._place is _Place.BEFORE:
            self._before(char)
        elif self._place is _Place.INSIDE:
            self._think(self._close.feed(char))
            if self._close.found():
                self._place = _Place.AFTER
        elif char not in SPACE:  # AFTER
            self._place = _Place.REST
            self._found += self._rest.feed(char)

    def _before(self, char: str) -> None:
        if not self._open.held and char in SPACE:
            self._space += char
            return
        passed = self._open.feed(char)
        if self._open.found():
            self._place, self._space = _Place.INSIDE, ""
        elif passed:
            self._place = _Place.REST
            self._found += self._rest.feed(self._space + passed + self._open.rest())

    def _think(self, text: str) -> None:
        for char in text:
            if char in SPACE:
                self._space += char if self._has_text else ""
                continue
            self._found.append(Reasoning(self._space + char))
            self._space, self._has_text = "", True

    def _taken(self) -> list[Event]:
        found, self._found = joined(self._found), []
        return found

"""The required form of an answer: a grammar of some kind, and its text. Pure: standard library only.

Admission checks whether a text compiles and can be satisfied (`pdserve.structured.checker`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

from pdserve.core.errors import InvalidRequest

MAX_GRAMMAR_BYTES: Final = 65_536
MAX_CHOICES: Final = 4096


class GrammarKind(Enum):
    """The values are the names of the request's fields."""

    JSON_SCHEMA = "json_schema"  # the text is the schema
    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    REGEX = "regex"  # the whole answer matches; Rust's syntax: no look-around, no back-references
    CHOICE = "choice"  # the text is a JSON array of the strings
    LARK = "grammar"  # Lark, as llguidance reads it


@final
@dataclass(frozen=True, slots=True)
class Grammar:
    """Raises InvalidRequest, naming the field, if the text is empty, too long or invalid for its kind."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.field, f"{size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
        if (self.kind is GrammarKind.JSON_OBJECT) != (not self.text):
            raise InvalidRequest(self.field, "a text" if self.text else "an empty text", "a grammar")
        if self.kind is GrammarKind.CHOICE:
            self.choices()

    @property
    def field(self) -> str:
        """The name of the request's field, for messages."""
        return self.kind.value

    def choices(self) -> list[str]:
        """The strings of a CHOICE."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(self.field, str(error), "a JSON array of strings") from None
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise InvalidRequest(self.field, "another value", "a JSON array of strings")
        if not 1 <= len(found) <= MAX_CHOICES:
            raise InvalidRequest(self.field, f"{len(found)} strings", f"1 to {MAX_CHOICES} strings")
        return found


def choice(strings: Sequence[str]) -> Grammar:
    if len(strings) > MAX_CHOICES:
        raise InvalidRequest(GrammarKind.CHOICE.value, f"{len(strings)} strings", f"1 to {MAX_CHOICES} strings")
    return Grammar(GrammarKind.CHOICE, json.dumps(list(strings), ensure_ascii=False))

"""The events that a reader finds in an answer's text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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

"""Finds a mark in a text that arrives character by character. Pure."""

from __future__ import annotations

from typing import final


@final
class Mark:
    """Holds back text that may be the beginning of the mark."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.held = ""

    def feed(self, char: str) -> str:
        """The text that is certainly not part of the mark."""
        self.held += char
        size = next(
            size for size in range(min(len(self.held), len(self.text)), -1, -1) if self._may_begin(self.held, size)
        )
        passed, self.held = self.held[: len(self.held) - size], self.held[len(self.held) - size :]
        return passed

    def is_found(self) -> bool:
        """True once, when the mark is complete."""
        if self.held != self.text:
            return False
        self.held = ""
        return True

    def rest(self) -> str:
        held, self.held = self.held, ""
        return held

    def _may_begin(self, text: str, size: int) -> bool:
        return size == 0 or text.endswith(self.text[:size])

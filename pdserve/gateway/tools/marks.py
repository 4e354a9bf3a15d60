"""Finds marks in a text that arrives character by character. Pure."""

from __future__ import annotations

from typing import final


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

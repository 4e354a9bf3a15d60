"""Where the reasoning of an answer ends: stop strings apply to the text after it. Pure.

The marks are those of pdserve/gateway/tools/reasoning.py, which separates the same reasoning from the answer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, final


class ReasoningState(StrEnum):
    """How the prompt ends."""

    UNMARKED = ""  # without a mark: the model may begin its reasoning itself
    OPEN = "open"  # within the reasoning
    CLOSED = "closed"  # after the end of the reasoning


THINK_MARKS: Final = ("<think>", "</think>")
MISTRAL_MARKS: Final = ("[THINK]", "[/THINK]")
_SPACE: Final = " \t\r\n"


@final
class ReasoningSplit:
    """Divides the text of one answer into its reasoning, with marks and the space around them, and the rest."""

    def __init__(self, marks: tuple[str, str], *, is_open: bool) -> None:
        self._open, self._close = marks
        self._held = ""  # text that may be the first mark, or the end of the text, in which the last mark may begin
        self._step = self._inside if is_open else self._before

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the rest that are certain after this text."""
        return self._step(text)

    def finish(self) -> str:
        """Text that was held back at the end of the answer, and is no reasoning."""
        held = self._held if self._step == self._before else ""
        self._held = ""
        return held

    def _before(self, text: str) -> tuple[str, str]:
        self._held += text
        begun = self._held.lstrip(_SPACE)
        if begun.startswith(self._open):
            whole, self._held, self._step = self._held, "", self._inside
            size = len(whole) - len(begun) + len(self._open)
            reasoning, rest = self._inside(whole[size:])
            return whole[:size] + reasoning, rest
        if self._open.startswith(begun):
            return "", ""
        whole, self._held, self._step = self._held, "", self._rest
        return "", whole

    def _inside(self, text: str) -> tuple[str, str]:
        """The reasoning is returned at once, and `_held` keeps its end to find the mark."""
        window = self._held + text
        at = window.find(self._close)
        if at < 0:
            self._held = window[-(len(self._close) - 1) :]
            return text, ""
        size = at + len(self._close) - len(self._held)
        self._held, self._step = "", self._after
        reasoning, rest = self._after(text[size:])
        return text[:size] + reasoning, rest

    def _after(self, text: str) -> tuple[str, str]:
        rest = text.lstrip(_SPACE)
        if rest:
            self._step = self._rest
        return text[: len(text) - len(rest)], rest

    def _rest(self, text: str) -> tuple[str, str]:
        return "", text

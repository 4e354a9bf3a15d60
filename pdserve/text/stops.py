"""Finds stop strings, and the end of the reasoning before them, in text that arrives in pieces. Pure.

The first complete stop string ends the text, wherever the pieces are divided; of several that end at the same
character, the longest is used. Text that may be the beginning of a stop string is held back until that is decided,
unless stop strings are part of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """`text` may be returned now. `stop` is the stop string that has ended the text, if any."""

    text: str
    stop: str | None = None


@final
class StopMatcher:
    """One answer's stop strings. After a match the matcher is used up."""

    def __init__(self, stops: Sequence[str], *, is_stop_included: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._is_stop_included = is_stop_included
        self._tail = ""  # the end of the text, in which a stop string may begin
        self._num_emitted = 0  # leading characters of the tail that were returned

    def push(self, text: str) -> ReleasedText:
        if not self._stops:
            return ReleasedText(text)
        window = self._tail + text
        match = self._first_to_end(window)
        if match is not None:
            end, stop = match
            cut = end if self._is_stop_included else end - len(stop)
            piece = ReleasedText(window[self._num_emitted : cut], stop)
            self._tail, self._num_emitted = "", 0
            return piece
        kept = self._possible_prefix(window)
        cut = len(window) if self._is_stop_included else len(window) - kept
        piece = ReleasedText(window[self._num_emitted : cut])
        self._tail = window[len(window) - kept :]
        self._num_emitted = cut - (len(window) - kept)
        return piece

    def push_unmatched(self, text: str) -> ReleasedText:
        """Text in which stop strings are ignored, before min_tokens is reached."""
        held = self.finish()
        return ReleasedText(held + text)

    def finish(self) -> str:
        """The text that is still held back, at the end of the text."""
        held, self._tail, self._num_emitted = self._tail[self._num_emitted :], "", 0
        return held

    def _first_to_end(self, window: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _possible_prefix(self, window: str) -> int:
        """Length of the longest suffix of `window` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            end = window[len(window) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


# --- end of the reasoning -------------------------------------------------------------------------------------
# Stop strings apply to the text after it. The marks are those of pdserve/gateway/tools/plan.py, which separates the
# same reasoning from the answer.


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

"""Finds stop strings in text that arrives in pieces. Pure.

The first complete stop string ends the text, wherever the pieces are divided; of several that end at the same
character, the longest is used. Text that may be the beginning of a stop string is held back until that is decided,
unless stop strings are part of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


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

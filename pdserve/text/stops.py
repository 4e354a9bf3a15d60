"""Finds stop strings in text that arrives in pieces. Pure.

The first stop string to be complete ends the text, wherever the pieces were cut; of several that end at the same
character the longest wins. Text that may be the beginning of a stop string is held back until that is decided,
unless stop strings belong to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` may go out now. `stop` is the stop string that has ended the text, if one did."""

    text: str
    stop: str | None = None


@final
class StopMatcher:
    """One answer's stop strings. After a match the matcher is used up."""

    def __init__(self, stops: Sequence[str], *, is_stop_included: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._is_stop_included = is_stop_included
        self._tail = ""  # the end of the text that a stop string may begin in
        self._num_emitted = 0  # leading characters of the tail that have gone out

    def push(self, text: str) -> Piece:
        if not self._stops:
            return Piece(text)
        window = self._tail + text
        match = self._first_to_end(window)
        if match is not None:
            end, stop = match
            cut = end if self._is_stop_included else end - len(stop)
            piece = Piece(window[self._num_emitted : cut], stop)
            self._tail, self._num_emitted = "", 0
            return piece
        kept = self._possible_prefix(window)
        cut = len(window) if self._is_stop_included else len(window) - kept
        piece = Piece(window[self._num_emitted : cut])
        self._tail = window[len(window) - kept :]
        self._num_emitted = cut - (len(window) - kept)
        return piece

    def push_unmatched(self, text: str) -> Piece:
        """Text that no stop string may end or begin in: before min_tokens is reached."""
        held = self.finish()
        return Piece(held + text)

    def finish(self) -> str:
        """What is still held back: the text ended and no stop string came of it."""
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
        """Length of the longest end of `window` that some stop string begins with."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            end = window[len(window) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

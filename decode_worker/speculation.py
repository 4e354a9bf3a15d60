"""Guesses what a sequence goes on with: what followed the last time that it said the same. Pure.

The match is the longest run of tokens, two at least, that ends the text and stands earlier in it too, the latest of
equals. While the text goes on as the match did, the match is followed and grows by each token; when it does not, the
places of the last two tokens are looked up. The index takes one entry per token, so a step costs the same at any
length.

Every token tells whether the guess was right, whether or not anybody acted on it. So the odds of each length of
match are known before a single draft is computed, and text that does not repeat itself never costs a step. Each
sequence has its own odds, at first low ones: what others copy says nothing of it, and it learns for free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

LEAST_MATCH: Final = 2
MOST_PLACES: Final = 32  # looked at, the latest first
LONGEST_COMPARED: Final = 16  # tokens of a place; what is followed may grow beyond
LONGEST_TOLD_APART: Final = 19

# A copy goes on the surer the longer it has been one. Lengths of a class share their odds.
_CLASS_OF: Final = tuple(
    sum(length > last for last in (2, 3, 4, 6, 10, 18)) for length in range(LONGEST_TOLD_APART + 1)
)
_FIRST_CHANCES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)  # by class; believed like FIRST_WEIGHT tries
FIRST_WEIGHT: Final = 3.0
DECAY: Final = 0.9  # per try, so that some ten count


@final
class Odds:
    """How often guesses were right of late, by the length of the match."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = [0.0] * len(_FIRST_CHANCES)
        self._tried = [0.0] * len(_FIRST_CHANCES)

    def record(self, length: int, *, is_right: bool) -> None:
        one = _CLASS_OF[min(length, LONGEST_TOLD_APART)]
        self._right[one] = DECAY * self._right[one] + is_right
        self._tried[one] = DECAY * self._tried[one] + 1.0

    def chance(self, length: int) -> float:
        """That the next token after a match of `length` tokens is the guessed one."""
        one = _CLASS_OF[min(length, LONGEST_TOLD_APART)]
        return (self._right[one] + FIRST_WEIGHT * _FIRST_CHANCES[one]) / (self._tried[one] + FIRST_WEIGHT)


@final
class Guesser:
    """One sequence's match and its odds. `tokens` is always the same growing text."""

    __slots__ = ("_before", "_latest", "_odds", "length", "source")

    def __init__(self) -> None:
        self._odds = Odds()
        self._latest: dict[int, int] = {}  # by the two tokens before: the latest place
        self._before: list[int] = [0, 0]  # place -> the place before it behind the same two tokens, 0 for none
        self.source = 0  # where the token stands that is guessed next; 0 without a match
        self.length = 0  # of the match

    def read(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that came since the last call."""
        latest, before = self._latest, self._before
        is_first = len(before) == 2
        for place in range(len(before), len(tokens) + 1):
            newest = tokens[place - 1]
            pair = tokens[place - 2] << 32 | newest
            earlier = latest.get(pair, 0)
            before.append(earlier)
            latest[pair] = place
            if is_first and place < len(tokens):
                continue  # a prompt is not what the model says: it tells nothing of the odds
            if self.source:
                is_right = tokens[self.source] == newest
                self._odds.record(self.length, is_right=is_right)
                if is_right:
                    self.source += 1
                    self.length += 1
                    continue
            self._look_up(tokens, place, earlier)

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens, none without a match. A match that reaches the text's end goes round in itself."""
        if not self.source:
            return []
        period = len(tokens) - self.source
        if count <= period:
            return list(tokens[self.source : self.source + count])
        return [tokens[self.source + index % period] for index in range(count)]

    def chances(self, count: int, least: float) -> list[float]:
        """That the first 1, 2, ... guesses are all right; up to `count` of them and down to `least`."""
        chances: list[float] = []
        chance = 1.0
        if self.source:
            for length in range(self.length, self.length + count):
                chance *= self._odds.chance(length)
                if chance < least:
                    break
                chances.append(chance)
        return chances

    def _look_up(self, tokens: Sequence[int], end: int, place: int) -> None:
        """The longest match of the text up to `end` among the latest places of its last two tokens."""
        self.source = self.length = 0
        for _ in range(MOST_PLACES):
            if not place:
                return
            length = LEAST_MATCH
            while (
                length < LONGEST_COMPARED and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]
            ):
                length += 1
            if length > self.length:
                self.source, self.length = place, length
                if length == LONGEST_COMPARED:
                    return
            place = self._before[place]

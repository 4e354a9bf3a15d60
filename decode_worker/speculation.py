"""N-gram speculation: predicts that a sequence continues as after an earlier occurrence of its last tokens. Pure.

The match is the longest run of at least two tokens that ends the text and also occurs earlier, the latest of equals.
While the text continues like the match, the match grows by each token; otherwise the places of the last two tokens are
looked up. The index has one entry per token, so a step costs the same at any length.

Every token shows whether the prediction was right, even if it was not used as a draft. So the acceptance rate of each
match length is known before any draft is computed, and text without repetition costs no step. Each sequence has its own
rates, which begin low: other sequences predict nothing about it, and learning is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

LEAST_MATCH: Final = 2
MOST_PLACES: Final = 32  # places considered, the latest first
LONGEST_COMPARED: Final = 16  # tokens compared at a place; a match that is followed may grow beyond
LONGEST_CLASS: Final = 19

# Longer matches are more likely to continue. Lengths of a class share their acceptance rate.
_CLASS_OF: Final = tuple(sum(length > last for last in (2, 3, 4, 6, 10, 18)) for length in range(LONGEST_CLASS + 1))
# initial acceptance rates by class, which count like INITIAL_WEIGHT tries
_INITIAL_RATES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
INITIAL_WEIGHT: Final = 3.0
DECAY: Final = 0.9  # forgetting factor per try, so that about ten tries count


@final
class AcceptanceRates:
    """How often recent predictions were right, by the length of the match."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = [0.0] * len(_INITIAL_RATES)
        self._tried = [0.0] * len(_INITIAL_RATES)

    def record(self, length: int, *, is_right: bool) -> None:
        one = _CLASS_OF[min(length, LONGEST_CLASS)]
        self._right[one] = DECAY * self._right[one] + is_right
        self._tried[one] = DECAY * self._tried[one] + 1.0

    def rate(self, length: int) -> float:
        """The probability that the next token after a match of `length` tokens is the predicted one."""
        one = _CLASS_OF[min(length, LONGEST_CLASS)]
        return (self._right[one] + INITIAL_WEIGHT * _INITIAL_RATES[one]) / (self._tried[one] + INITIAL_WEIGHT)


@final
class NgramProposer:
    """One sequence's match and its acceptance rates. `tokens` is always the same list, to which tokens are appended."""

    __slots__ = ("_before", "_latest", "_rates", "length", "source")

    def __init__(self) -> None:
        self._rates = AcceptanceRates()
        self._latest: dict[int, int] = {}  # latest place by the two tokens before it
        self._before: list[int] = [0, 0]  # place -> the previous place after the same two tokens, 0 for none
        self.source = 0  # position of the predicted next token; 0 without a match
        self.length = 0  # of the match

    def read(self, tokens: Sequence[int]) -> None:
        """Adds the tokens since the last call."""
        latest, before = self._latest, self._before
        is_first = len(before) == 2
        for place in range(len(before), len(tokens) + 1):
            newest = tokens[place - 1]
            pair = tokens[place - 2] << 32 | newest
            earlier = latest.get(pair, 0)
            before.append(earlier)
            latest[pair] = place
            if is_first and place < len(tokens):
                continue  # a prompt is not written by the model, so it does not change the acceptance rates
            if self.source:
                is_right = tokens[self.source] == newest
                self._rates.record(self.length, is_right=is_right)
                if is_right:
                    self.source += 1
                    self.length += 1
                    continue
            self._look_up(tokens, place, earlier)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens; none without a match. A match that reaches the end of the text repeats."""
        if not self.source:
            return []
        period = len(tokens) - self.source
        if count <= period:
            return list(tokens[self.source : self.source + count])
        return [tokens[self.source + index % period] for index in range(count)]

    def accept_probabilities(self, count: int, least: float) -> list[float]:
        """The probabilities that the first 1, 2, ... predictions are all right; up to `count` of them and down to
        `least`."""
        probabilities: list[float] = []
        probability = 1.0
        if self.source:
            for length in range(self.length, self.length + count):
                probability *= self._rates.rate(length)
                if probability < least:
                    break
                probabilities.append(probability)
        return probabilities

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

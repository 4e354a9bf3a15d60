"""N-gram speculation: predicts that a text continues as it did after an earlier occurrence of its last tokens. Pure.

The match is the longest run of at least two tokens at the end of the text that also occurs earlier. Among equally long
runs, the latest occurrence is used. While the text continues like the match, the match grows with each token. Otherwise
an index is searched for earlier occurrences of the last two tokens. It has one entry per token, and a search visits at
most MAX_PLACES entries, so the cost of a step does not depend on the length of the text.

Each sampled token shows whether the prediction was right, even if it was not used as a draft. So acceptance rates are
measured before any draft is computed, and text without repetition costs no drafts. Each sequence has its own rates,
because other sequences say nothing about it. Initial rates are low.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

MIN_MATCH: Final = 2
MAX_PLACES: Final = 32  # earlier occurrences considered, latest first
MAX_COMPARED: Final = 16  # tokens compared at an occurrence; a match may grow longer later
LAST_CLASS_LENGTH: Final = 19  # longer matches have the class of this length

# Longer matches are more likely to continue. Match lengths are grouped into classes; a class has one acceptance rate.
_CLASS_OF: Final = tuple(sum(length > last for last in (2, 3, 4, 6, 10, 18)) for length in range(LAST_CLASS_LENGTH + 1))
# Initial acceptance rate of each class, with the weight of INITIAL_WEIGHT predictions.
_INITIAL_RATES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
INITIAL_WEIGHT: Final = 3.0
DECAY: Final = 0.9  # forgetting factor per prediction, so about ten of them count


@final
class AcceptanceRates:
    """How often recent predictions were right, by the length of the match."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = [0.0] * len(_INITIAL_RATES)
        self._tried = [0.0] * len(_INITIAL_RATES)

    def record(self, length: int, *, is_right: bool) -> None:
        one = _CLASS_OF[min(length, LAST_CLASS_LENGTH)]
        self._right[one] = DECAY * self._right[one] + is_right
        self._tried[one] = DECAY * self._tried[one] + 1.0

    def rate(self, length: int) -> float:
        """The probability that the next token after a match of `length` tokens is the predicted one."""
        one = _CLASS_OF[min(length, LAST_CLASS_LENGTH)]
        return (self._right[one] + INITIAL_WEIGHT * _INITIAL_RATES[one]) / (self._tried[one] + INITIAL_WEIGHT)


@final
class NgramProposer:
    """The current match of one sequence, and its acceptance rates.

    Every call gets the same list `tokens`: the whole text, to which the caller appends.
    """

    __slots__ = ("_before", "_latest", "_rates", "length", "source")

    def __init__(self) -> None:
        self._rates = AcceptanceRates()
        self._latest: dict[int, int] = {}  # two tokens -> the latest place after them
        self._before: list[int] = [0, 0]  # place -> the previous place after the same two tokens; 0: none
        self.source = 0  # position of the predicted next token; 0 without a match
        self.length = 0  # length of the match in tokens

    def read(self, tokens: Sequence[int]) -> None:
        """Adds the tokens since the last call to the index."""
        latest, before = self._latest, self._before
        is_first = len(before) == 2
        for place in range(len(before), len(tokens) + 1):
            newest = tokens[place - 1]
            pair = tokens[place - 2] << 32 | newest
            earlier = latest.get(pair, 0)
            before.append(earlier)
            latest[pair] = place
            if is_first and place < len(tokens):
                continue  # the model did not write the prompt, so it does not change the acceptance rates
            if self.source:
                is_right = tokens[self.source] == newest
                self._rates.record(self.length, is_right=is_right)
                if is_right:
                    self.source += 1
                    self.length += 1
                    continue
            self._look_up(tokens, place, earlier)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Predicts the next `count` tokens; [] without a match.

        If fewer tokens follow the earlier occurrence, the prediction repeats them.
        """
        if not self.source:
            return []
        period = len(tokens) - self.source
        if count <= period:
            return list(tokens[self.source : self.source + count])
        return [tokens[self.source + index % period] for index in range(count)]

    def accept_probabilities(self, count: int, least: float) -> list[float]:
        """The probabilities that the first 1, 2, ... predicted tokens are all right.

        The list has at most `count` entries and ends before the first one below `least`.
        """
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
        """Finds the longest match for the text up to `end`, among the latest occurrences of its last two tokens."""
        self.source = self.length = 0
        for _ in range(MAX_PLACES):
            if not place:
                return
            length = MIN_MATCH
            while length < MAX_COMPARED and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self.length:
                self.source, self.length = place, length
                if length == MAX_COMPARED:
                    return
            place = self._before[place]

"""Expected lengths of answers. They are unknown at arrival, so a running mean is used. Pure.

Requests are of one class if their `max_tokens` have the same number of binary digits, because requests with a limit of
16 tokens and of 4,096 differ. A new class starts with the mean over all classes.
"""

from __future__ import annotations

from typing import Final, final

FIRST_GUESS: Final = 256.0  # tokens; before any answer has ended
ALL: Final = -1
GAIN: Final = 0.02  # weight of each new answer: the mean follows about the last fifty


@final
class OutputLengths:
    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: dict[int, tuple[int, float]] = {}  # class -> (answers seen, their mean); ALL: of every class

    def expected(self, max_tokens: int, answered: int = 0) -> float:
        """Expected remaining tokens, at least 1, of a request that has received `answered` of its `max_tokens`."""
        means = self._means
        _, mean = means.get(max_tokens.bit_length()) or means.get(ALL) or (0, FIRST_GUESS)
        return max(1.0, min(mean, max_tokens) - answered)

    def observe(self, max_tokens: int, tokens: int) -> None:
        """Learns from an answer that has ended after `tokens`."""
        for key in (max_tokens.bit_length(), ALL):
            seen, mean = self._means.get(key, (0, 0.0))
            self._means[key] = (seen + 1, mean + max(GAIN, 1.0 / (seen + 1)) * (tokens - mean))

"""How long answers turn out to be: nobody knows at arrival, so a running mean stands in. Pure.

Requests are of one class when their `max_tokens` has as many binary digits: who allows 16 tokens and who allows
4,096 wait for different answers. A class that was not seen yet is taken for the mean of all.
"""

from __future__ import annotations

from typing import Final, final

FIRST_GUESS: Final = 256.0  # tokens; before any answer has ended
ALL: Final = -1
GAIN: Final = 0.02  # of each new answer: the mean follows the last fifty or so


@final
class OutputLengths:
    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: dict[int, tuple[int, float]] = {}  # class -> (answers seen, their mean); ALL: of every class

    def expected(self, max_tokens: int, answered: int = 0) -> float:
        """Tokens that are still to come, at least 1, for a request that has got `answered` of its `max_tokens`."""
        means = self._means
        _, mean = means.get(max_tokens.bit_length()) or means.get(ALL) or (0, FIRST_GUESS)
        return max(1.0, min(mean, max_tokens) - answered)

    def observe(self, max_tokens: int, tokens: int) -> None:
        """An answer has ended after `tokens`."""
        for key in (max_tokens.bit_length(), ALL):
            seen, mean = self._means.get(key, (0, 0.0))
            self._means[key] = (seen + 1, mean + max(GAIN, 1.0 / (seen + 1)) * (tokens - mean))

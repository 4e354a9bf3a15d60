"""Beam search as a client's loop over requests of one token each. Chooses the beams; no I/O.

The server keeps no beams: every step requests the most likely next tokens of each beam, which the prefix caches make
cheap. The rules are those of transformers. Of each step's best (ends + 1) * width continuations, the best `width` that
continue are kept, and those among the first `width` that end are finished, with the score

    logprob / length ** length_penalty        of all its tokens, including the end

Ties are broken by the better beam, then by the more likely token, so results are reproducible.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

from pdserve.client.options import Options
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import MAX_LOGPROBS, FinishReason

EarlyStopping = bool | Literal["never"]
Tops = Sequence[tuple[int, float]]  # (token id, logprob), most likely first

LEAST_TIMEOUT_S: Final = 1e-3  # if it passes, the call fails with DeadlineExceeded
MAX_TOKENS: Final = 64
WIDTH: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A finished continuation; `token_ids` includes its end token, `text` does not."""

    token_ids: tuple[int, ...]
    logprob: float  # sum over its tokens
    score: float
    finish_reason: FinishReason
    text: str = ""

    @property
    def text_ids(self) -> tuple[int, ...]:
        return self.token_ids[:-1] if self.finish_reason is FinishReason.STOP else self.token_ids


@final
class BeamSearch:
    """Call `take` with an answer for each of `living`, in order, until `is_over`."""

    def __init__(
        self,
        *,
        width: int = WIDTH,
        max_tokens: int = MAX_TOKENS,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        end_ids: Iterable[int] = (),
        room: int | None = None,
    ) -> None:
        """`room`: tokens left in the context window after the prompt.

        Raises InvalidRequest if that is too little, or if the server returns too few tokens for each beam.
        """
        self._ends = frozenset(end_ids)
        self._width, self._max_tokens = width, max_tokens
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        kept = max(2, 1 + len(self._ends))
        self.num_top = kept * width
        most = MAX_LOGPROBS // kept
        if not 1 <= width <= most:
            raise InvalidRequest("width", width, f"between 1 and {most}")
        if max_tokens < 1:
            raise InvalidRequest("max_tokens", max_tokens, "at least 1")
        if room is not None and max_tokens > room:
            raise InvalidRequest("max_tokens", max_tokens, f"at most {room}, what the prompt leaves of the context")
        if early_stopping not in (True, False, "never"):
            raise InvalidRequest("early_stopping", early_stopping, 'True, False or "never"')
        self._living: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self._finished: list[Beam] = []
        self.is_over = False

    @property
    def living(self) -> list[tuple[int, ...]]:
        """Tokens of each beam to continue."""
        return [tokens for tokens, _ in self._living]

    @property
    def found(self) -> tuple[Beam, ...]:
        """Best first; `width` of them, unless fewer were found."""
        return tuple(self._finished)

    def take(self, tops: Sequence[Tops]) -> None:
        """The `num_top` most likely next tokens of each living beam."""
        every = [
            ((*tokens, token), logprob + own)
            for (tokens, logprob), top in zip(self._living, tops, strict=True)
            for token, own in top
        ]
        best = heapq.nsmallest(self.num_top, every, key=lambda one: -one[1])  # stable
        length = len(self._living[0][0]) + 1
        is_last = length == self._max_tokens
        for tokens, logprob in best[: self._width]:
            if is_last or tokens[-1] in self._ends:
                self._finish(tokens, logprob)
        self._living = [one for one in best if not is_last and one[0][-1] not in self._ends][: self._width]
        self.is_over = not self._living or (len(self._finished) == self._width and not self._may_improve(length))

    def options(self, remaining_s: float) -> Options:
        """Options of the request for one living beam's next tokens."""
        return {
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": self.num_top,
            "timeout_s": max(remaining_s, LEAST_TIMEOUT_S),
        }

    def _finish(self, tokens: tuple[int, ...], logprob: float) -> None:
        score = logprob / len(tokens) ** self._length_penalty
        reason = FinishReason.STOP if tokens[-1] in self._ends else FinishReason.LENGTH
        self._finished.append(Beam(token_ids=tokens, logprob=logprob, score=score, finish_reason=reason))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self._width :]

    def _may_improve(self, length: int) -> bool:
        """Whether the best living beam could still be better than the worst of `width` finished ones."""
        if self._early_stopping is True:
            return False
        is_patient = self._early_stopping == "never" and self._length_penalty > 0.0
        reached = self._max_tokens if is_patient else length
        best: float = self._living[0][1] / reached**self._length_penalty
        return best > self._finished[-1].score

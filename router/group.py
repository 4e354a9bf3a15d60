"""Several answers to one prompt (n, best_of) as one stream: creates their requests and merges their outputs. No I/O.

Inside the router each answer is a request of its own: placed, preempted, recovered and ended independently. The first
uses the request's own seed, so it equals the answer for n = 1; the others use seeds derived from it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Final, final

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.results import Usage
from pdserve.core.types import Sampling
from pdserve.v1 import inference_pb2
from pdserve.wire.results import USAGE
from router.answer import Answer

MAX_ANSWERS: Final = 16
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


def counts(request: inference_pb2.GenerateRequest, sampling: Sampling) -> tuple[int, int]:
    """The number of returned answers, and the number of sampled ones."""
    n = request.n if request.HasField("n") else 1
    best_of = request.best_of if request.HasField("best_of") else n
    if not 1 <= n <= MAX_ANSWERS:
        raise InvalidRequest("n", n, f"between 1 and {MAX_ANSWERS}")
    if not n <= best_of <= MAX_ANSWERS:
        raise InvalidRequest("best_of", best_of, f"between n ({n}) and {MAX_ANSWERS}")
    if best_of > 1 and sampling.is_greedy:
        field = "n" if n > 1 else "best_of"
        raise InvalidRequest(field, max(n, best_of), "1 with temperature 0, where every answer would be the same")
    return n, best_of


def samplings(sampling: Sampling, n: int, best_of: int) -> list[Sampling]:
    """One Sampling for each sampled answer. Only the first one scores the prompt. Ranking needs the logprobs of the
    sampled tokens."""
    if best_of > n and sampling.logprobs is None:
        sampling = dataclasses.replace(sampling, logprobs=0)
    others = [
        dataclasses.replace(sampling, seed=_sibling_seed(sampling.seed, index), prompt_logprobs=None)
        for index in range(1, best_of)
    ]
    return [sampling, *others]


@final
class Group:
    """Several answers with the interface of one Answer. They share `changed`."""

    def __init__(self, answers: Sequence[Answer], changed: asyncio.Event, *, num_kept: int) -> None:
        """If fewer answers are kept than sampled, those with the largest mean logprob are sent, best first, after all
        have ended."""
        self.changed = changed
        self.answers = tuple(answers)
        self._num_kept = num_kept
        self._is_total_sent = False

    @property
    def error(self) -> PdserveError | None:
        """The error of any answer fails the whole call."""
        return next((one.error for one in self.answers if one.error is not None), None)

    @property
    def is_over(self) -> bool:
        return all(one.is_over for one in self.answers)

    def drain(self) -> list[inference_pb2.GenerateResponse]:
        self.changed.clear()
        kept: Sequence[Answer] = self.answers
        if self._num_kept < len(kept):
            if not self.is_over:
                return []
            kept = sorted(kept, key=lambda one: one.mean_logprob, reverse=True)[: self._num_kept]
        if not self.answers[0].is_prompt_scored:
            return []
        messages = self.answers[0].opening()
        for sibling in self.answers[1:]:
            sibling.opening()  # dropped: the first answer has sent it
        for index, answer in enumerate(kept):
            for message in answer.drain():
                if message.HasField("delta"):
                    message.delta.index = index
                elif message.HasField("finished"):
                    message.finished.index = index
                messages.append(message)
        if self.is_over and not self._is_total_sent and self.error is None:
            self._is_total_sent = True
            messages[-1].finished.total_usage.CopyFrom(USAGE.encode(self._total()))
        return messages

    def _total(self) -> Usage:
        used = [one.usage for one in self.answers if one.usage is not None]
        return dataclasses.replace(used[0], completion_tokens=sum(one.completion_tokens for one in used))


def _sibling_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: splitmix64 (Steele, Lea, Flood 2014), `index` steps from `seed`."""
    value = (seed + index * _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


async def is_shared(first: Answer) -> None:
    """Waits until the other answers can find the prompt's KV: the decode worker has sampled from it, or the request has
    ended.

    The first token may come from a prefill worker before the KV has arrived.
    """
    while first.num_tokens < 2 and not first.is_over:
        first.changed.clear()
        await first.changed.wait()

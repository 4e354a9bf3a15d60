"""Requests to a live cluster of the engine toy, whose tokens can be computed, from three kinds of clients."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from benchmarks.kill_storm_calls import By, Senders, StormRequest
from pdserve import PdserveError
from pdserve.core.errors import Overloaded
from pdserve.core.types import Slo
from pdserve.engine.toy import answer

LIMIT_S: Final = 120.0  # of a call
REJECTED: Final = "status 429"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyRequest:
    prompt: list[int]
    max_tokens: int
    seed: int | None  # None: greedy
    by: By

    @property
    def options(self) -> dict[str, Any]:
        sampling = {"temperature": 0.0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        return {"max_tokens": self.max_tokens, **sampling}


def toy_requests(
    draw: random.Random, lengths: Sequence[int], max_tokens: int, by: Sequence[By]
) -> Iterator[ToyRequest]:
    """Without end. Prompts share no block; each of `by` in turn sends a greedy request and one with a seed."""
    number = 0
    while True:
        prompt = [draw.randrange(33, 127) for _ in range(draw.choice(lengths))]
        seed = number if number % 2 else None
        yield ToyRequest(prompt=prompt, max_tokens=max_tokens, seed=seed, by=by[number // 2 % len(by)])
        number += 1


@dataclass(slots=True, kw_only=True)
class Sent:
    """A request, and what its client has received. Times are of time.monotonic."""

    request: ToyRequest
    phase: str
    began_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    is_resumed: bool = False
    error: BaseException | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def tpot_s(self) -> float:
        rest = len(self.tokens) - 1
        return (self.ended_s - self.first_s) / rest if rest > 0 else 0.0

    @property
    def is_rejected(self) -> bool:
        error = self.error
        return isinstance(error, Overloaded) or (isinstance(error, PdserveError) and REJECTED in error.message)

    @property
    def is_failed(self) -> bool:
        return self.error is not None and not self.is_rejected

    @property
    def wrong(self) -> str:
        """Empty if its tokens are right, as far as they came."""
        request = self.request
        expected = answer(request.prompt, request.max_tokens, seed=request.seed)
        if self.tokens == (expected if self.error is None else expected[: len(self.tokens)]):
            return ""
        return f"{request.by.value}: {self.tokens}, expected {expected}"

    @property
    def error_text(self) -> str:
        return f"{self.request.by.value}: {type(self.error).__name__}: {self.error}"

    def attains(self, slo: Slo) -> bool:
        return self.error is None and self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


@final
class ToyClients:
    """One of each kind, and what they have sent."""

    def __init__(self, senders: Senders) -> None:
        self._senders = senders
        self._name = secrets.token_hex(4)
        self.sent: list[Sent] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, target: str, http_url: str = "") -> AsyncIterator[ToyClients]:
        """`http_url` is needed for requests over HTTP."""
        async with Senders.connected(target, http_url, connections=1, call_s=LIMIT_S) as senders:
            yield cls(senders)

    async def send(self, request: ToyRequest, phase: str = "") -> None:
        """Returns at the end of the answer. An error is a part of `sent`, and is judged later."""
        one = Sent(request=request, phase=phase, began_s=time.monotonic())
        self.sent.append(one)
        asked = StormRequest(prompt=request.prompt, options=request.options, by=request.by)
        seen = await self._senders.send(asked, f"{self._name}-{len(self.sent)}")
        one.ended_s = time.monotonic()
        one.first_s, one.tokens = seen.first_s, seen.part(0).token_ids
        one.is_resumed, one.error = seen.is_resumed, seen.error

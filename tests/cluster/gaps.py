"""Streams that record when each piece arrives, to show whether a failure delays other requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve import AsyncClient

TICK_S = 0.01


@dataclass
class Timed:
    """One stream: its tokens, and when each piece arrived."""

    prompt: list[int]
    max_tokens: int
    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    request_id: str = ""
    attempts: int = 0

    async def follow(self, client: AsyncClient) -> None:
        options = {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}
        stream = client.stream(self.prompt, max_tokens=self.max_tokens, **options)  # type: ignore[arg-type]
        async for piece in stream:
            self.request_id = stream.request_id
            self.tokens.extend(piece.token_ids)
            self.came_s.append(time.monotonic())
        self.attempts = stream.completion.timings.attempts

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Seconds between consecutive pieces, for gaps that overlap this interval."""
        times = self.came_s
        found = [b - a for a, b in pairwise(times) if b >= begin_s and a <= end_s]
        return found or [end_s - begin_s]


@dataclass
class Lateness:
    """Measures how late this machine schedules a process. `run` it during the measurement."""

    longest_s: float = 0.0

    async def run(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due_s)


async def until(streams: list[Timed], tokens: int, within_s: float = 60.0) -> None:
    """Waits until all streams have that many tokens."""
    ends_s = time.monotonic() + within_s
    while not all(len(one.tokens) >= tokens for one in streams):
        assert time.monotonic() < ends_s, [len(one.tokens) for one in streams]
        await asyncio.sleep(0.01)


def longest_gap(streams: list[Timed], begin_s: float, end_s: float) -> float:
    return max(gap for one in streams for gap in one.gaps(begin_s, end_s))

"""The load of the goodput benchmark: planned requests, an open loop that sends them, and what the client measured."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PATIENCE_S: Final = 60.0  # the client's timeout for a whole answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Ranges of token counts, evenly sampled."""

    prompts: tuple[int, int]
    long_prompts: tuple[int, int] = (1, 1)
    long_share: float = 0.0  # of the requests, with a long prompt
    answers: tuple[int, int]


MIXED: Final = Lengths(prompts=(24, 160), long_prompts=(400, 1000), long_share=0.25, answers=(16, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request before it is sent."""

    request_id: str
    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The client's measurements."""

    outcome: str  # served, or the status code of the error
    tokens: int = 0
    ttft_s: float = float("inf")
    tpot_s: float = float("inf")
    gaps_s: tuple[float, ...] = ()  # between two messages with tokens

    @classmethod
    def served(cls, begin_s: float, times_s: Sequence[float], tokens: int) -> Seen:
        """An answer of `tokens` tokens to a request that was sent at `begin_s`; `times_s`: its messages with tokens."""
        first_s, last_s = times_s[0], times_s[-1]
        return cls(
            outcome="served",
            tokens=tokens,
            ttft_s=first_s - begin_s,
            tpot_s=(last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0,
            gaps_s=tuple(after - before for before, after in pairwise(times_s)),
        )


def plan(rate_rps: float, seconds: float, seed: int, name: str, lengths: Lengths = MIXED) -> list[Planned]:
    """Poisson arrivals. The same lengths at every rate, as far as they are used; every prompt different, from those of
    plans of other names too, or prefix caches would know them."""
    times, rng = random.Random(f"times {seed} {rate_rps}"), random.Random(f"lengths {seed}")
    texts = random.Random(f"texts {seed} {name}")
    planned: list[Planned] = []
    at_s = times.expovariate(rate_rps)
    while at_s < seconds:
        tokens = rng.randint(*(lengths.long_prompts if rng.random() < lengths.long_share else lengths.prompts))
        planned.append(
            Planned(
                request_id=f"{name}-{len(planned)}",
                at_s=at_s,
                prompt=[texts.randrange(32, 127) for _ in range(tokens)],
                max_tokens=rng.randint(*lengths.answers),
            )
        )
        at_s += times.expovariate(rate_rps)
    return planned


async def drive(planned: Sequence[Planned], ask: Callable[[Planned], Awaitable[Seen]]) -> tuple[list[Seen], float]:
    """Sends each request at its time. Also returns the longest delay of a send, which shows whether the client is
    saturated."""
    begin_s, late_start_s, tasks = time.perf_counter(), 0.0, []
    for one in planned:
        wait_s = begin_s + one.at_s - time.perf_counter()
        late_start_s = max(late_start_s, -wait_s)
        await asyncio.sleep(max(0.0, wait_s))
        tasks.append(asyncio.ensure_future(ask(one)))
    return await asyncio.gather(*tasks), late_start_s

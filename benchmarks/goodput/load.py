"""The load of the goodput benchmark: planned requests, and what the client measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from benchmarks.openloop import poisson

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
    for at_s in poisson(times, rate_rps, seconds):
        tokens = rng.randint(*(lengths.long_prompts if rng.random() < lengths.long_share else lengths.prompts))
        planned.append(
            Planned(
                request_id=f"{name}-{len(planned)}",
                at_s=at_s,
                prompt=[texts.randrange(32, 127) for _ in range(tokens)],
                max_tokens=rng.randint(*lengths.answers),
            )
        )
    return planned

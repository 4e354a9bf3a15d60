"""Synthetic workloads: Poisson arrivals, lengths from a distribution, shared prefixes. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError
from simulator.model import TraceRequest

Draw = Callable[[random.Random], int]  # a number of tokens, at least 1
BLOCK_TOKENS: Final = 512


def lengths_of(values: tuple[int, ...]) -> Draw:
    """Each of `values` is equally likely. A list of a real service's lengths is the best distribution."""
    if not values or min(values) < 1:
        raise ConfigError("lengths", values[:5], "at least one number of tokens, each at least 1")
    return lambda rng: rng.choice(values)


def uniform(low: int, high: int) -> Draw:
    """Each number from `low` to `high` is equally likely."""
    if not 1 <= low <= high:
        raise ConfigError("lengths", f"{low}:{high}", "A:B with 1 <= A <= B")
    return lambda rng: rng.randint(low, high)


def log_normal(*, median: float, spread: float, most: int) -> Draw:
    """Half of the values are below `median`, two thirds within a factor of exp(spread) of it, none above `most`."""
    if not (1.0 <= median <= most and 0.0 <= spread < math.inf):
        raise ConfigError("lengths", (median, spread, most), "1 <= median <= most, spread at least 0")
    return lambda rng: min(most, max(1, round(median * math.exp(spread * rng.gauss(0.0, 1.0)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Requests at `rate_rps` for `duration_s`. With `num_prefixes`, each prompt begins with one of that many texts of
    `prefix_tokens`, like system prompts; the rest is unique."""

    rate_rps: float
    duration_s: float
    prompts: Draw
    outputs: Draw
    seed: int = 0
    num_prefixes: int = 0
    prefix_tokens: int = 0
    name: str = "poisson"
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        for field in ("rate_rps", "duration_s"):
            if not 0.0 < getattr(self, field) < math.inf:
                raise ConfigError(field, getattr(self, field), "a finite number above 0")
        for field, low in (("num_prefixes", 0), ("prefix_tokens", 0), ("block_tokens", 1)):
            if getattr(self, field) < low:
                raise ConfigError(field, getattr(self, field), f"at least {low}")

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self.seed)
        now_s = 0.0
        shared_blocks = self.prefix_tokens // self.block_tokens if self.num_prefixes else 0
        next_id = self.num_prefixes * shared_blocks
        while (now_s := now_s + rng.expovariate(self.rate_rps)) < self.duration_s:
            prompt = self.prompts(rng)
            ids: tuple[int, ...] = ()
            if shared_blocks:
                prompt += self.prefix_tokens
                begin = rng.randrange(self.num_prefixes) * shared_blocks
                ids = tuple(range(begin, begin + shared_blocks))
            own = -(-prompt // self.block_tokens) - len(ids)
            ids += tuple(range(next_id, next_id + own))
            next_id += own
            yield TraceRequest(arrival_s=now_s, prompt_tokens=prompt, output_tokens=self.outputs(rng), block_ids=ids)


def chat(*, rate_rps: float = 16.0, duration_s: float = 20.0, seed: int = 0) -> Poisson:
    """The default workload of `pdserve simulate`: conversations with eight system prompts, many short prompts and
    answers, and a long tail of both."""
    return Poisson(
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        prompts=log_normal(median=1000.0, spread=1.0, most=32_000),
        outputs=log_normal(median=150.0, spread=0.8, most=2_000),
        num_prefixes=8,
        prefix_tokens=1024,
        name="built-in chat",
    )

"""Loads that change: sine, step, spike, a shift of lengths, and a published hour of traffic. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from simulator.model import Trace, TraceRequest
from simulator.traces.workloads import Draw, log_normal

#: The lengths and rates of a public report of a planner that kept about 9 % of its goodput: a sine of 1 to 24
#: requests/s with prompts of 8,000 and answers of 1,000 tokens. Lengths vary around them.
LEAST_RPS: Final = 1.0
MOST_RPS: Final = 24.0
PROMPTS: Final = log_normal(median=8000.0, spread=0.3, most=32_000)
ANSWERS: Final = log_normal(median=1000.0, spread=0.3, most=4_000)
LONG_PROMPTS: Final = log_normal(median=16_000.0, spread=0.3, most=64_000)
SHORT_ANSWERS: Final = log_normal(median=200.0, spread=0.3, most=1_000)
SHORT_PROMPTS: Final = log_normal(median=1_000.0, spread=0.3, most=4_000)
LONG_ANSWERS: Final = log_normal(median=2_000.0, spread=0.3, most=8_000)

Rate = Callable[[float], float]  # requests per second at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """Poisson arrivals at a rate that changes; lengths change at `shift_s`."""

    name: str
    rate: Rate
    most_rps: float
    duration_s: float
    prompts: Draw = PROMPTS
    answers: Draw = ANSWERS
    shift_s: float = math.inf
    later_prompts: Draw = PROMPTS
    later_answers: Draw = ANSWERS
    seed: int = 0
    block_tokens: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self.seed)
        now_s = 0.0
        while (now_s := now_s + rng.expovariate(self.most_rps)) < self.duration_s:
            if rng.random() * self.most_rps >= self.rate(now_s):
                continue
            is_later = now_s >= self.shift_s
            prompts = self.later_prompts if is_later else self.prompts
            answers = self.later_answers if is_later else self.answers
            yield TraceRequest(arrival_s=now_s, prompt_tokens=prompts(rng), output_tokens=answers(rng))


def sine(duration_s: float, period_s: float, scale: float, seed: int) -> Changing:
    """Begins at its mean, and rises."""
    middle, swing = 0.5 * scale * (LEAST_RPS + MOST_RPS), 0.5 * scale * (MOST_RPS - LEAST_RPS)
    return Changing(
        name="sine",
        rate=lambda at_s: middle + swing * math.sin(2.0 * math.pi * at_s / period_s),
        most_rps=scale * MOST_RPS,
        duration_s=duration_s,
        seed=seed,
    )


def step(duration_s: float, scale: float, seed: int) -> Changing:
    """Three times the rate in the middle third."""
    return Changing(
        name="step",
        rate=lambda at_s: scale * (18.0 if duration_s / 3 <= at_s < duration_s * 2 / 3 else 6.0),
        most_rps=18.0 * scale,
        duration_s=duration_s,
        seed=seed,
    )


def spike(duration_s: float, scale: float, seed: int) -> Changing:
    """Two minutes, or a tenth, at 2.5 times the rate."""
    begin_s, width_s = 0.5 * duration_s, min(120.0, 0.1 * duration_s)
    return Changing(
        name="spike",
        rate=lambda at_s: scale * (15.0 if begin_s <= at_s < begin_s + width_s else 6.0),
        most_rps=15.0 * scale,
        duration_s=duration_s,
        seed=seed,
    )


def shift(duration_s: float, scale: float, seed: int) -> Changing:
    """From long prompts with short answers to short prompts with long answers, at an equal rate."""
    return Changing(
        name="shift",
        rate=lambda at_s: 12.0 * scale,
        most_rps=12.0 * scale,
        duration_s=duration_s,
        prompts=LONG_PROMPTS,
        answers=SHORT_ANSWERS,
        shift_s=0.5 * duration_s,
        later_prompts=SHORT_PROMPTS,
        later_answers=LONG_ANSWERS,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A trace whose requests each come `copies` times, within `width_s`: more traffic of the same shape."""

    trace: Trace
    copies: int
    until_s: float
    width_s: float = 10.0
    name: str = "azure"
    block_tokens: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(0)
        waiting: list[TraceRequest] = []
        for one in self.trace:
            if one.arrival_s >= self.until_s:
                break
            ready = [held for held in waiting if held.arrival_s <= one.arrival_s]
            if ready:
                waiting = [held for held in waiting if held.arrival_s > one.arrival_s]
                yield from sorted(ready, key=lambda held: held.arrival_s)
            copies = (replace(one, arrival_s=one.arrival_s + rng.random() * self.width_s) for _ in range(self.copies))
            waiting.extend(copies)
        yield from sorted(waiting, key=lambda held: held.arrival_s)

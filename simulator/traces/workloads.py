"""Synthetic traces: the workloads of `pdserve simulate --workload NAME`, and traces made from other traces. Pure.

chat       conversations with eight system prompts
long-tail short prompts, and occasionally a prompt of up to 100,000 tokens
bursts     chat lengths; requests come in bursts, with silence between them
short      prompts of 32 to 512 tokens and short answers, for small models and slow processors
agents     sessions that return with their whole history and a tool's output, so that prompts grow

Each is an open loop at a mean rate: no arrival depends on an answer. Equal seeds give equal requests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Final, final

from pdserve.core.errors import ConfigError
from simulator.model import Trace, TraceRequest

# --- lengths and Poisson arrivals -----------------------------------------------------------------------------
# Lengths come from a distribution; prompts share prefixes.

Draw = Callable[[random.Random], int]  # a number of tokens, at least 1
BLOCK_TOKENS: Final = 512


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


# --- other arrivals, and workloads by name --------------------------------------------------------------------

DEFAULT_RATE_RPS: Final = 16.0
DEFAULT_DURATION_S: Final = 100.0  # enough for a verdict on two workers of the default profile
LONGEST_PROMPT: Final = 100_000


def either(share: float, rare: Draw, common: Draw) -> Draw:
    """`rare` for that share of the values, otherwise `common`."""
    if not 0.0 <= share <= 1.0:
        raise ConfigError("share", share, "a number from 0 to 1")
    return lambda rng: rare(rng) if rng.random() < share else common(rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Bursts at random times, of a geometric number of requests within `width_s`."""

    rate_rps: float
    duration_s: float
    prompts: Draw
    outputs: Draw
    mean_size: float = 24.0  # mean requests per burst
    width_s: float = 0.5
    seed: int = 0
    name: str = "built-in bursts"
    block_tokens: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        _check(self, "rate_rps", "duration_s", "width_s")
        if not 1.0 <= self.mean_size < math.inf:
            raise ConfigError("mean_size", self.mean_size, "a finite number, at least 1")

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self.seed)
        coming: list[float] = []  # heap of arrivals of bursts that have begun
        burst_s = rng.expovariate(self.rate_rps / self.mean_size)
        while True:
            while burst_s < self.duration_s and (not coming or burst_s <= coming[0]):
                for _ in range(_geometric(rng, self.mean_size)):
                    heapq.heappush(coming, burst_s + rng.random() * self.width_s)
                burst_s += rng.expovariate(self.rate_rps / self.mean_size)
            if not coming:
                return
            yield TraceRequest(
                arrival_s=heapq.heappop(coming), prompt_tokens=self.prompts(rng), output_tokens=self.outputs(rng)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Sessions of a geometric number of turns. A turn's prompt is the session's whole history and new tokens."""

    rate_rps: float  # of turns
    duration_s: float  # time in which sessions begin; their last turns come later
    first_prompts: Draw
    additions: Draw  # tokens that a turn adds: tool output or user text
    outputs: Draw
    mean_turns: float = 8.0
    mean_pause_s: float = 4.0  # from one turn's arrival to the next
    longest_prompt: int = LONGEST_PROMPT  # a session that would exceed it ends
    seed: int = 0
    name: str = "built-in agents"
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        _check(self, "rate_rps", "duration_s", "mean_pause_s")
        if not 1.0 <= self.mean_turns < math.inf:
            raise ConfigError("mean_turns", self.mean_turns, "a finite number, at least 1")

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self.seed)
        coming: list[tuple[float, int, int, int]] = []  # heap: (arrival, session, prompt tokens, turns that are left)
        session, session_s = 0, rng.expovariate(self.rate_rps / self.mean_turns)
        longest_blocks = -(-self.longest_prompt // self.block_tokens)
        while True:
            while session_s < self.duration_s and (not coming or session_s <= coming[0][0]):
                prompt = min(self.first_prompts(rng), self.longest_prompt)
                heapq.heappush(coming, (session_s, session, prompt, _geometric(rng, self.mean_turns) - 1))
                session, session_s = session + 1, session_s + rng.expovariate(self.rate_rps / self.mean_turns)
            if not coming:
                return
            at_s, owner, prompt, turns_left = heapq.heappop(coming)
            output = self.outputs(rng)
            begin = owner * longest_blocks
            yield TraceRequest(
                arrival_s=at_s,
                prompt_tokens=prompt,
                output_tokens=output,
                block_ids=tuple(range(begin, begin + -(-prompt // self.block_tokens))),
            )
            grown = prompt + output + self.additions(rng)
            pause_s = rng.expovariate(1.0 / self.mean_pause_s)
            if turns_left and grown <= self.longest_prompt:
                heapq.heappush(coming, (at_s + pause_s, owner, grown, turns_left - 1))


def long_tail(*, rate_rps: float, duration_s: float, seed: int = 0) -> Trace:
    """Two percent of the prompts have 8,000 to 100,000 tokens; they contain half of all tokens."""
    return Poisson(
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        prompts=either(
            0.02,
            log_normal(median=40_000.0, spread=0.6, most=LONGEST_PROMPT),
            log_normal(median=700.0, spread=0.8, most=8_000),
        ),
        outputs=log_normal(median=150.0, spread=0.8, most=2_000),
        name="built-in long-tail",
    )


def bursts(*, rate_rps: float, duration_s: float, seed: int = 0) -> Trace:
    return Bursts(
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        prompts=log_normal(median=1000.0, spread=1.0, most=32_000),
        outputs=log_normal(median=150.0, spread=0.8, most=2_000),
    )


def agents(*, rate_rps: float, duration_s: float, seed: int = 0) -> Trace:
    return Agents(
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        first_prompts=log_normal(median=4_000.0, spread=0.7, most=32_000),
        additions=log_normal(median=1_000.0, spread=1.2, most=30_000),
        outputs=log_normal(median=120.0, spread=0.8, most=2_000),
    )


def short(*, rate_rps: float, duration_s: float, seed: int = 0) -> Trace:
    return Poisson(
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        prompts=lambda rng: rng.randint(32, 512),
        outputs=lambda rng: rng.randint(16, 64),
        name="built-in short",
    )


Workload = Callable[..., Trace]  # (rate_rps, duration_s, seed)
WORKLOADS: Final[Mapping[str, Workload]] = {
    "chat": chat,
    "long-tail": long_tail,
    "bursts": bursts,
    "agents": agents,
    "short": short,
}


def make_workload(name: str, *, rate_rps: float | None = None, duration_s: float | None = None, seed: int = 0) -> Trace:
    """Raises ConfigError on an unknown name, and on a rate or a duration that is not above 0."""
    if name not in WORKLOADS:
        raise ConfigError("workload", name, "one of " + ", ".join(WORKLOADS))
    return WORKLOADS[name](
        rate_rps=DEFAULT_RATE_RPS if rate_rps is None else rate_rps,
        duration_s=DEFAULT_DURATION_S if duration_s is None else duration_s,
        seed=seed,
    )


def _geometric(rng: random.Random, mean: float) -> int:
    """At least 1."""
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))


def _check(workload: object, *fields: str) -> None:
    for field in fields:
        value = getattr(workload, field)
        if not 0.0 < value < math.inf:
            raise ConfigError(field, value, "a finite number above 0")


# --- traces made from other traces ----------------------------------------------------------------------------
# Steps change the rate, spread arrivals, cut and join. Each step reads and yields requests in order of arrival, one by
# one, so that steps can be chained without holding a trace in memory. Reshaped applies them at each iteration; equal
# seeds give equal traces.

Step = Callable[[Iterable[TraceRequest]], Iterator[TraceRequest]]


@final
class Reshaped:
    """`trace` with `steps` applied in their order."""

    def __init__(self, trace: Trace, *steps: Step, name: str = "") -> None:
        self._trace = trace
        self._steps = steps
        self.name = name or trace.name
        self.block_tokens = trace.block_tokens

    def __iter__(self) -> Iterator[TraceRequest]:
        requests = iter(self._trace)
        for step in self._steps:
            requests = step(requests)
        return requests


def rate_scaled(rate_scale: float) -> Step:
    """Multiplies the arrival rate; the requests stay the same."""
    _check_reshaped("rate_scale", rate_scale, 0.0 < rate_scale < math.inf, "a finite number above 0")
    return lambda requests: (replace(one, arrival_s=one.arrival_s / rate_scale) for one in requests)


def jittered(seed: int, quantum_s: float) -> Step:
    """Spreads each group of equal arrivals uniformly over `quantum_s`, or up to the next group if that is earlier.

    Otherwise a trace with rounded timestamps would send whole groups at once, which the clients did not.
    """
    _check_reshaped("quantum_s", quantum_s, 0.0 < quantum_s < math.inf, "a finite number above 0")

    def step(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        rng = random.Random(seed)
        group: list[TraceRequest] = []
        for _, members in groupby(requests, key=lambda one: one.arrival_s):
            arrived = list(members)
            if group:
                yield from _spread(group, min(quantum_s, arrived[0].arrival_s - group[0].arrival_s), rng)
            group = arrived
        if group:
            yield from _spread(group, quantum_s, rng)

    return step


def _spread(group: list[TraceRequest], width_s: float, rng: random.Random) -> Iterator[TraceRequest]:
    offsets_s = sorted(rng.random() * width_s for _ in group)
    for one, offset_s in zip(group, offsets_s, strict=True):
        yield replace(one, arrival_s=one.arrival_s + offset_s)


def first(count: int) -> Step:
    """The first `count` requests."""
    _check_reshaped("limit", count, count >= 1, "at least 1")
    return lambda requests: islice(requests, count)


def window(start_s: float, end_s: float) -> Step:
    """The requests that arrive in [start_s, end_s); times are relative to start_s."""
    _check_reshaped("window", f"[{start_s}, {end_s})", 0.0 <= start_s < end_s, "0 <= start < end")

    def step(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        for one in requests:
            if one.arrival_s >= end_s:
                return
            if one.arrival_s >= start_s:
                yield replace(one, arrival_s=one.arrival_s - start_s)

    return step


@final
class Joined:
    """`before` until `at_s`, from then on `after` from its beginning: a change of traffic at a known time.

    The two share no prefixes: ids of one become even, of the other odd.
    """

    def __init__(self, before: Trace, after: Trace, at_s: float) -> None:
        _check_reshaped("at_s", at_s, 0.0 <= at_s < math.inf, "a finite number, at least 0")
        sizes = {one.block_tokens for one in (before, after)} - {0}
        if len(sizes) > 1:
            raise ConfigError("block_tokens", " and ".join(map(str, sorted(sizes))), "the same in both traces")
        self._before, self._after, self._at_s = before, after, at_s
        self.name = f"{before.name} then {after.name}"
        self.block_tokens = max(sizes, default=0)

    def __iter__(self) -> Iterator[TraceRequest]:
        for one in self._before:
            if one.arrival_s >= self._at_s:
                break
            yield replace(one, block_ids=tuple(2 * held for held in one.block_ids))
        for one in self._after:
            ids = tuple(2 * held + 1 for held in one.block_ids)
            yield replace(one, arrival_s=one.arrival_s + self._at_s, block_ids=ids)


def _check_reshaped(field: str, seen: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(field, seen, expected)

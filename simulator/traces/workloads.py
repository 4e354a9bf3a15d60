"""Synthetic traces: the workloads of `pdserve simulate --workload NAME`. Pure.

chat       conversations with eight system prompts
long-tail short prompts, and occasionally a prompt of up to 100,000 tokens
bursts     chat lengths; requests come in bursts, with silence between them
short      prompts of 32 to 512 tokens and short answers, for small models and slow processors
agents     sessions of coding agents, which return with their whole history and a tool's output, so that prompts grow

Each is an open loop at a mean rate, except that a turn of an agent follows an answer. Equal seeds give equal requests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Final

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


@dataclass(slots=True)
class _Agent:
    """A session, or a subagent of it."""

    session: str
    ids: list[int]  # of the blocks of its last prompt
    prompt_tokens: int
    turns_left: int
    prefix: list[int]  # common to many sessions
    parent: _Agent | None = None  # waits for its end
    forks_at: frozenset[int] = frozenset()  # numbers of turns that are left when it starts a subagent
    last: int | None = None  # number of the request before
    pause_s: float = 0.0  # between its answer and the next request


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Sessions of coding agents. A turn's prompt is the session's whole history and new tokens: a tool's output or a
    user's text. In some sessions subagents run meanwhile, each with a few turns, which begin with the common prefix or
    with the whole context of their parent.

    A turn follows the answer before it (`TraceRequest.follows`). Its `arrival_s` is that of answers that take no time.
    """

    rate_rps: float  # of turns, about
    duration_s: float  # time in which sessions begin; their last turns come later
    prefix: int  # tokens of instructions and tools; each of `num_prefixes` is common to many sessions
    first_prompts: Draw  # tokens after it
    additions: Draw  # tokens that a turn adds
    outputs: Draw
    mean_turns: float = 36.0  # of a session, without those of subagents
    turns_spread: float = 0.6
    pause_s: float = 6.0  # median time of a tool
    pause_spread: float = 1.2
    away_share: float = 0.04  # of the pauses, that wait for a person
    away_s: float = 240.0  # their mean
    subagent_share: float = 0.44  # of the sessions
    num_prefixes: int = 3
    longest_prompt: int = LONGEST_PROMPT  # a session that would exceed it ends
    ended_share: float = 0.0  # of the sessions, whose client says after the last turn that they have ended
    most_sessions: float = math.inf
    seed: int = 0
    name: str = "built-in agents"
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        _check(self, "rate_rps", "duration_s", "pause_s", "away_s")
        if not 1.0 <= self.mean_turns < math.inf:
            raise ConfigError("mean_turns", self.mean_turns, "a finite number, at least 1")
        if not 0.0 <= self.ended_share <= 1.0:
            raise ConfigError("ended_share", self.ended_share, "0 to 1")
        for field in ("num_prefixes", "block_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "at least 1")

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self.seed)
        ids = count()
        shared = [list(islice(ids, self.prefix // self.block_tokens)) for _ in range(self.num_prefixes)]
        session_rate = self.rate_rps / self.mean_turns
        ends = random.Random(f"{self.seed} ends")  # of its own: the requests do not depend on `ended_share`
        coming: list[tuple[float, int, _Agent]] = []  # heap: arrival, a number to break ties, agent
        order, number, sessions = count(), 0, 0
        session_s = rng.expovariate(session_rate)
        while True:
            while (
                session_s < self.duration_s
                and sessions < self.most_sessions
                and (not coming or session_s <= coming[0][0])
            ):
                sessions += 1
                session = self._session(f"s{sessions}", rng, rng.choice(shared))
                heapq.heappush(coming, (session_s, next(order), session))
                session_s += rng.expovariate(session_rate)
            if not coming:
                return
            at_s, _, agent = heapq.heappop(coming)
            agent.ids += islice(ids, -(-agent.prompt_tokens // self.block_tokens) - len(agent.ids))
            output = self.outputs(rng)
            request = TraceRequest(
                arrival_s=at_s,
                prompt_tokens=agent.prompt_tokens,
                output_tokens=output,
                block_ids=tuple(agent.ids),
                follows=agent.last,
                pause_s=agent.pause_s,
                session=agent.session,
            )
            agent.last, number = number, number + 1
            agent.turns_left -= 1
            agent.prompt_tokens += output + self.additions(rng)
            following = self._following(rng, agent)
            is_told = following is None and ends.random() < self.ended_share
            yield replace(request, ends_session=True) if is_told else request
            if following is not None:
                heapq.heappush(coming, (at_s + following.pause_s, next(order), following))

    def _session(self, name: str, rng: random.Random, prefix: list[int]) -> _Agent:
        turns = max(1, round(log_mean(rng, self.mean_turns, self.turns_spread)))
        has_subagents = turns > 1 and rng.random() < self.subagent_share
        forks = rng.sample(range(1, turns), min(turns - 1, rng.randint(1, 3))) if has_subagents else []
        prompt = min(self.prefix + self.first_prompts(rng), self.longest_prompt)
        return _Agent(name, list(prefix), prompt, turns, prefix=prefix, forks_at=frozenset(forks))

    def _following(self, rng: random.Random, agent: _Agent) -> _Agent | None:
        """Who sends the next request when the one of `agent` is answered."""
        if agent.turns_left in agent.forks_at:  # it continues when the subagent has ended
            has_context = rng.random() < 0.5
            begin = list(agent.ids if has_context else agent.prefix)
            prompt = len(begin) * self.block_tokens + self.additions(rng)
            turns = rng.randint(2, 8)
            sub = _Agent(agent.session, begin, prompt, turns, prefix=agent.prefix, parent=agent, last=agent.last)
            if prompt <= self.longest_prompt:
                return sub
        if agent.turns_left == 0 or agent.prompt_tokens > self.longest_prompt:
            if agent.parent is None:
                return None
            agent.parent.last = agent.last
            agent = agent.parent
            if agent.prompt_tokens > self.longest_prompt:
                return None
        away_s = rng.expovariate(1.0 / self.away_s) if rng.random() < self.away_share else 0.0
        agent.pause_s = away_s + self.pause_s * math.exp(self.pause_spread * rng.gauss(0.0, 1.0))
        return agent


def log_mean(rng: random.Random, mean: float, spread: float) -> float:
    """A log-normal value with that mean."""
    return mean * math.exp(spread * rng.gauss(0.0, 1.0) - 0.5 * spread**2)


def scaled(scale: float, draw: Draw) -> Draw:
    """`scale` times the drawn numbers of tokens."""
    if not 0.0 < scale < math.inf:
        raise ConfigError("scale", scale, "a finite number above 0")
    return lambda rng: max(1, round(scale * draw(rng)))


def coding_agents(*, rate_rps: float, duration_s: float, seed: int = 0, scale: float = 1.0) -> Agents:
    """Sessions as published for coding agents (vllm issue 57103): 43 requests of a session, 142,000 tokens in and 444
    out for each, more than 96 % of the input seen before, subagents in 44 % of the sessions. `scale` multiplies the
    numbers of tokens."""
    return Agents(
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        prefix=max(1, round(20_000 * scale)),
        first_prompts=scaled(scale, log_normal(median=12_000.0, spread=0.8, most=60_000)),
        additions=scaled(scale, log_normal(median=2_400.0, spread=1.0, most=30_000)),
        outputs=scaled(scale, log_normal(median=320.0, spread=0.8, most=4_000)),
        longest_prompt=max(1, round(400_000 * scale)),
        block_tokens=BLOCK_TOKENS if scale > 0.1 else 64,
    )


def assisted_agents(*, rate_rps: float, duration_s: float, seed: int = 0, scale: float = 1.0) -> Agents:
    """Shorter sessions that wait more often for a person, after the published mean of 22 calls, 49,100 tokens in and
    659 out (inference-perf's catalogue)."""
    return replace(
        coding_agents(rate_rps=rate_rps, duration_s=duration_s, seed=seed, scale=scale),
        prefix=max(1, round(8_000 * scale)),
        first_prompts=scaled(scale, log_normal(median=6_000.0, spread=1.0, most=40_000)),
        outputs=scaled(scale, log_normal(median=480.0, spread=0.8, most=4_000)),
        mean_turns=18.0,
        turns_spread=1.0,
        away_share=0.2,
        num_prefixes=8,
        longest_prompt=max(1, round(200_000 * scale)),
        name="built-in assisted agents",
    )


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


def agents(*, rate_rps: float, duration_s: float, seed: int = 0) -> Agents:
    """A quarter of the published lengths, for models with contexts of 131,072 tokens."""
    return coding_agents(rate_rps=rate_rps, duration_s=duration_s, seed=seed, scale=0.25)


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

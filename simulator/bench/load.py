"""Plans the load of a benchmark: levels, and the requests of a turn with arrivals, lengths and prompts. Pure.

A synthetic load has the same lengths in the same order at every rate. A trace keeps its order; a rate scales its
arrival times so that their mean rate is the given one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Final, final

from pdserve.core.errors import ConfigError
from simulator.model import Trace, TraceRequest
from simulator.traces.workloads import BLOCK_TOKENS, Agents, Poisson, agents, uniform

MAX_REQUESTS: Final = 1_000_000  # of one turn
MAX_PROMPT_TOKENS: Final = 200_000_000  # of one open-loop turn, whose prompts are prepared before it begins
MAX_CONCURRENCY: Final = 65_536
MAX_SESSIONS: Final = 100_000
_ENDLESS_S: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """An open loop at `rate_rps`, a closed loop of `concurrency` callers, or the arrival times of a trace if neither
    is set."""

    rate_rps: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.rate_rps is not None and not 0.0 < self.rate_rps < math.inf:
            raise ConfigError("rate", self.rate_rps, "requests per second, above 0")
        if self.concurrency is not None and not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ConfigError("concurrency", self.concurrency, f"1 to {MAX_CONCURRENCY} callers")

    @property
    def is_open(self) -> bool:
        return self.concurrency is None

    @property
    def label(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return "as in the trace" if self.rate_rps is None else f"{self.rate_rps:g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """Lengths are uniform in a range. With `num_prefixes`, each prompt begins with one of that many texts of
    `prefix_tokens`."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    prefix_tokens: int = 0
    num_prefixes: int = 0
    seed: int = 0

    def trace(self, rate_rps: float, duration_s: float) -> Poisson:
        return Poisson(
            rate_rps=rate_rps,
            duration_s=duration_s,
            prompts=uniform(*self.input_tokens),
            outputs=uniform(*self.output_tokens),
            seed=self.seed,
            num_prefixes=self.num_prefixes if self.prefix_tokens else 0,
            prefix_tokens=self.prefix_tokens,
            block_tokens=self.prefix_tokens or BLOCK_TOKENS,  # a prefix is one block
            name="synthetic",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """The simulator's workload of coding agents, with the same sessions at every rate."""

    num_sessions: int | None  # of each turn of a level; None: endless
    ended_share: float = 0.0  # of the sessions, whose ends the server is told
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.num_sessions is not None and not 1 <= self.num_sessions <= MAX_SESSIONS:
            raise ConfigError("sessions", self.num_sessions, f"1 to {MAX_SESSIONS}")
        if not 0.0 <= self.ended_share <= 1.0:
            raise ConfigError("ended-sessions", self.ended_share, "0 to 1")

    @property
    def trace(self) -> Agents:
        """About one turn per second."""
        most = math.inf if self.num_sessions is None else self.num_sessions
        made = agents(rate_rps=1.0, duration_s=_ENDLESS_S, seed=self.seed)
        return replace(made, most_sessions=most, ended_share=self.ended_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The requests of every turn of a level. At least one of `num_requests` and `duration_s` bounds a synthetic
    load."""

    source: SyntheticLoad | AgentLoad | Trace
    num_requests: int | None
    duration_s: float | None
    length_scale: float = 1.0  # of prompts and answers of a trace
    speed: float = 1.0  # of arrivals and pauses of a trace
    has_sessions: bool = False  # turns follow the ends of others

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not 1e-3 <= self.speed <= 1e6:
            raise ConfigError("speed", self.speed, "0.001 to 1000000")
        if self.num_requests is not None and not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ConfigError("requests", self.num_requests, f"1 to {MAX_REQUESTS}")
        if self.duration_s is not None and not 0.0 < self.duration_s <= _ENDLESS_S:
            raise ConfigError("duration", self.duration_s, f"seconds above 0, at most {_ENDLESS_S:g}")
        if not 0.0 < self.length_scale <= 1000.0:
            raise ConfigError("length-scale", self.length_scale, "a number above 0, at most 1000")

    @property
    def num_planned(self) -> int | None:
        """Requests of a turn; None if they are not known before it."""
        if not isinstance(self.source, AgentLoad) or self.source.num_sessions is None:
            return self.num_requests
        return sum(1 for _ in islice(self.source.trace, self.num_requests))

    @property
    def block_tokens(self) -> int:
        """Prompt tokens per block id; 0 without ids."""
        if isinstance(self.source, SyntheticLoad):
            return self.source.prefix_tokens
        trace = self.source.trace if isinstance(self.source, AgentLoad) else self.source
        return max(1, round(trace.block_tokens * self.length_scale)) if trace.block_tokens else 0

    def requests(self, level: LoadLevel) -> Iterator[TraceRequest]:
        """In order of arrival. A closed loop ignores the arrival times, and may be endless where a duration ends it.
        Raises ConfigError, also while iterating."""
        most = MAX_REQUESTS if self.num_requests is None else self.num_requests
        if isinstance(self.source, SyntheticLoad):
            is_timed = level.is_open and self.duration_s is not None
            span_s = self.duration_s if is_timed and self.duration_s is not None else _ENDLESS_S
            return islice(self.source.trace(level.rate_rps or 1.0, span_s), most)
        trace = self.source.trace if isinstance(self.source, AgentLoad) else self.source
        scaled = (self._scaled(one) for one in islice(trace, most))
        if level.rate_rps is not None:
            is_unscaled = isinstance(self.source, AgentLoad)
            factor = level.rate_rps / (1.0 if is_unscaled else mean_rate_rps(islice(trace, most)))
            scaled = (replace(one, arrival_s=one.arrival_s / factor) for one in scaled)
        if level.is_open and self.duration_s is not None:
            return _until(scaled, self.duration_s)
        return scaled

    def _scaled(self, one: TraceRequest) -> TraceRequest:
        if self.length_scale == self.speed == 1.0:
            return one
        return replace(
            one,
            arrival_s=one.arrival_s / self.speed,
            pause_s=one.pause_s / self.speed,
            prompt_tokens=max(1, round(one.prompt_tokens * self.length_scale)),
            output_tokens=max(1, round(one.output_tokens * self.length_scale)),
        )


def mean_rate_rps(requests: Iterator[TraceRequest]) -> float:
    """Raises ConfigError if all arrive at once."""
    arrivals_s = [one.arrival_s for one in requests]
    span_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    if span_s <= 0.0:
        raise ConfigError("rate", "a trace whose requests all arrive at once", "a trace with a rate, or --concurrency")
    return (len(arrivals_s) - 1) / span_s


def check_planned(requests: list[TraceRequest]) -> None:
    """Raises ConfigError if their prompts would fill the memory."""
    tokens = sum(one.prompt_tokens for one in requests)
    if tokens > MAX_PROMPT_TOKENS:
        expected = f"at most {MAX_PROMPT_TOKENS} prompt tokens in a turn of an open loop; send fewer --requests"
        raise ConfigError("requests", f"{tokens} prompt tokens", expected)


def _until(requests: Iterator[TraceRequest], duration_s: float) -> Iterator[TraceRequest]:
    begin_s: float | None = None
    for one in requests:
        begin_s = one.arrival_s if begin_s is None else begin_s
        if one.arrival_s - begin_s >= duration_s:
            return
        yield one


# --- prompts --------------------------------------------------------------------------------------------------
# A prompt is a list of random token ids. Requests with equal block ids in the trace share those tokens. Each turn has
# new texts, so that prompts of earlier turns are not in a prefix cache. Both servers of a comparison get the same
# texts.

#: These ids are ordinary tokens in all tokenizers that we know: neither special nor out of range.
DEFAULT_IDS: Final = (32, 127)
MAX_ID: Final = 2**31
_KEPT_BLOCKS: Final = 4096
_WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
    *("story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law"),
    *("car", "city", "name", "team", "minute", "idea", "body", "back", "parent", "face", "level", "office", "door"),
)


@final
class PromptMaker:
    def __init__(self, *, seed: int, turn: str, block_tokens: int, ids: tuple[int, int] = DEFAULT_IDS) -> None:
        """`ids`: the first id and the one after the last. Raises ConfigError."""
        low, high = ids
        if not 0 <= low < high <= MAX_ID:
            raise ConfigError("token-ids", f"{low}:{high}", f"A:B with 0 <= A < B <= {MAX_ID}")
        self._ids = range(low, high)
        self._texts = f"{seed} {turn}"
        self._block_tokens = block_tokens
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._make_block)

    def token_ids(self, number: int, request: TraceRequest) -> list[int]:
        """The prompt of the request. `number` counts the requests of a turn."""
        found: list[int] = []
        for block_id in request.block_ids if self._block_tokens else ():
            if len(found) >= request.prompt_tokens:
                break
            found += self._block(block_id)
        del found[request.prompt_tokens :]
        if rest := request.prompt_tokens - len(found):
            found += random.Random(f"{self._texts} request {number}").choices(self._ids, k=rest)
        return found

    def _make_block(self, block_id: int) -> list[int]:
        return random.Random(f"{self._texts} block {block_id}").choices(self._ids, k=self._block_tokens)


def as_text(token_ids: Sequence[int]) -> str:
    """A word for each token id: a text of about as many tokens, for servers that take no token ids."""
    return " ".join([_WORDS[one % len(_WORDS)] for one in token_ids])

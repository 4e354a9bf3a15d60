"""Computes the figures of a benchmark from its answers, and compares two servers. Pure.

Definitions are those of `vllm bench serve`, so that figures can be compared: percentiles interpolate linearly between
two values (numpy's default), the standard deviation is that of the whole population, TPOT has one value per request,
and ITL one per gap between two parts of an answer. Times are of completed requests. Goodput counts requests that
completed within both targets; rejected and failed ones are misses.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdserve.core.types import Slo
from simulator.bench.load import LoadLevel
from simulator.bench.server import BenchAnswer, BenchOutcome

SHARES: Final = (0.5, 0.9, 0.95, 0.99)
LATE_S: Final = 0.010  # p99 lag of the generator above which the figures are doubtful
LATE_SHARE: Final = 0.05  # the same as a share of the median TTFT; the larger of the two limits applies


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Figures of `of` values; nan if there are none. `shares` has the percentiles of SHARES."""

    of: int
    mean: float = math.nan
    std: float = math.nan
    shares: tuple[float, ...] = (math.nan,) * len(SHARES)

    @property
    def median(self) -> float:
        return self.shares[SHARES.index(0.5)]

    @property
    def p99(self) -> float:
        return self.shares[SHARES.index(0.99)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTurn:
    """One period of load on one server. `lasted_s`: from its start to the end of its last request."""

    answers: Sequence[BenchAnswer]
    lasted_s: float
    loop_delays_s: Sequence[float] = ()  # how late timers of the generator fired, sampled all the time
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """Sessions with all of their turns that were sent. Times are of those whose turns all completed."""

    tasks: int
    completed: int
    met: int | None  # completed within their deadline; None without one
    task_s: Distribution  # from the time when the first turn was due to the last token
    served_s: Distribution  # the same without the pauses between turns
    reusable_tokens: int  # of prompts, that an earlier prompt or answer had
    reused_tokens: int  # those of them that the server found in a cache

    @property
    def attainment(self) -> float | None:
        return None if self.met is None else self.met / self.tasks if self.tasks else 0.0

    @property
    def reused_share(self) -> float:
        return self.reused_tokens / self.reusable_tokens if self.reusable_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSummary:
    requests: int  # without interrupted ones
    completed: int
    rejected: int
    failed: int
    errors: dict[str, int]  # failed requests by their error
    total_input_tokens: int  # of completed requests
    total_cached_tokens: int  # those of them that the server found in a prefix cache
    total_output_tokens: int
    duration_s: float  # sum over its turns
    met: int | None  # requests that met both targets; None without targets
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2el_s: Distribution
    max_output_tokens_per_s: float  # in a second of a turn
    max_concurrent_requests: int
    send_lag_s: Distribution
    loop_delay_s: Distribution
    server_ttft_s: Distribution  # of requests with the server's own timings
    server_tpot_s: Distribution
    tasks: TaskSummary | None = None  # of a load of sessions
    rejection: str = ""  # an example of the server's words for a rejection
    details: dict[str, str] = field(default_factory=dict)  # an example of the server's words for each error

    def rate(self, count: float) -> float:
        """Per second of the benchmark."""
        return count / self.duration_s if self.duration_s > 0.0 else 0.0

    @property
    def attainment(self) -> float | None:
        """Share of all requests that met both targets."""
        return None if self.met is None else self.met / self.requests if self.requests else 0.0

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were in a prefix cache."""
        return self.total_cached_tokens / self.total_input_tokens if self.total_input_tokens else 0.0

    @property
    def is_generator_late(self) -> bool:
        """If true, the figures include delays of the generator itself."""
        bar_s = max(LATE_S, LATE_SHARE * (self.ttft_s.median if self.ttft_s.of else 0.0))
        return any(one.of > 0 and one.p99 > bar_s for one in (self.send_lag_s, self.loop_delay_s))


def summarise_bench(turns: Sequence[BenchTurn], slo: Slo | None, slo_task_s: float | None = None) -> BenchSummary:
    """The figures of all turns of one server at one load."""
    counted = [one for turn in turns for one in turn.answers if one.outcome is not BenchOutcome.INTERRUPTED]
    done = [one for one in counted if one.outcome is BenchOutcome.COMPLETED]
    failed = [one for one in counted if one.outcome is BenchOutcome.FAILED]
    rejected = [one for one in counted if one.outcome is BenchOutcome.REJECTED]
    return BenchSummary(
        requests=len(counted),
        completed=len(done),
        rejected=len(rejected),
        tasks=_summarise_tasks(turns, slo_task_s),
        rejection=next((one.detail for one in rejected if one.detail), ""),
        failed=len(failed),
        errors=dict(Counter(one.error for one in failed).most_common()),
        details={one.error: one.detail for one in reversed(failed) if one.detail},
        total_input_tokens=sum(one.prompt_tokens for one in done),
        total_cached_tokens=sum(one.cached_tokens for one in done),
        total_output_tokens=sum(one.output_tokens for one in done),
        duration_s=sum(turn.lasted_s for turn in turns),
        met=None if slo is None else sum(one.has_met(slo) for one in counted),
        ttft_s=distribution(one.ttft_s for one in done),
        tpot_s=distribution(tpot_s for one in done if (tpot_s := one.tpot_s) is not None),
        itl_s=distribution(gap for one in done for gap in one.itl_s),
        e2el_s=distribution(one.e2el_s for one in done),
        max_output_tokens_per_s=max((_busiest_second(turn) for turn in turns), default=0.0),
        max_concurrent_requests=max((_most_at_once(turn) for turn in turns), default=0),
        send_lag_s=distribution(one.lag_s for one in counted),
        loop_delay_s=distribution(delay for turn in turns for delay in turn.loop_delays_s),
        server_ttft_s=distribution(one.server_ttft_s for one in done if one.server_ttft_s is not None),
        server_tpot_s=distribution(
            one.server_tpot_s for one in done if one.server_tpot_s is not None and one.output_tokens > 1
        ),
    )


def _summarise_tasks(turns: Sequence[BenchTurn], slo_task_s: float | None) -> TaskSummary | None:
    tasks: dict[tuple[int, int], list[BenchAnswer]] = {}
    for number, turn in enumerate(turns):
        for one in turn.answers:
            if one.task is not None:
                tasks.setdefault((number, one.task), []).append(one)
    if not tasks:
        return None
    # The answers of a turn that was interrupted belong to tasks without an end.
    counted = [held for held in tasks.values() if all(one.outcome is not BenchOutcome.INTERRUPTED for one in held)]
    done = [held for held in counted if all(one.outcome is BenchOutcome.COMPLETED for one in held)]
    lasted_s = [max(one.ended_s for one in held) - min(one.due_s for one in held) for held in done]
    completed = [one for held in tasks.values() for one in held if one.outcome is BenchOutcome.COMPLETED]
    return TaskSummary(
        tasks=len(counted),
        completed=len(done),
        met=None if slo_task_s is None else sum(one <= slo_task_s for one in lasted_s),
        task_s=distribution(lasted_s),
        served_s=distribution(math.fsum(one.ended_s - one.due_s for one in held) for held in done),
        reusable_tokens=sum(one.reusable_tokens for one in completed),
        reused_tokens=sum(min(one.cached_tokens, one.reusable_tokens) for one in completed),
    )


def distribution(values: Iterable[float]) -> Distribution:
    ordered = sorted(values)
    if not ordered:
        return Distribution(of=0)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        of=len(ordered),
        mean=mean,
        std=math.sqrt(math.fsum((one - mean) ** 2 for one in ordered) / len(ordered)),
        shares=tuple(quantile(ordered, share) for share in SHARES),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of at least one sorted value: interpolates linearly between the two values around the rank."""
    rank = share * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _busiest_second(turn: BenchTurn) -> float:
    """Most tokens in one second. The tokens of an answer are spread evenly over its parts."""
    seconds: Counter[int] = Counter()
    for one in turn.answers:
        if one.outcome is BenchOutcome.COMPLETED:
            each = one.output_tokens / len(one.chunk_s)
            for at_s in one.chunk_s:
                seconds[int(at_s)] += each  # type: ignore[assignment]
    return float(max(seconds.values(), default=0.0))


def _most_at_once(turn: BenchTurn) -> int:
    """A request that ends exactly when another one is sent does not overlap it."""
    edges = [(one.sent_s, 1) for one in turn.answers] + [(one.ended_s, -1) for one in turn.answers]
    at_once = most = 0
    for _, change in sorted(edges):
        at_once += change
        most = max(most, at_once)
    return most


# --- comparison of two servers --------------------------------------------------------------------------------
# The servers took turns with the same requests.
#
# Each pair of turns gives one ratio, first server to second. The two turns of a pair are close together in time, so
# other load on the machine affects both nearly equally; the spread of the ratios shows the rest of its effect. The
# result is their median.


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMetric:
    """`is_time`: smaller is better. `name` is that of vLLM's benchmark."""

    name: str
    label: str
    is_time: bool
    of: Callable[[BenchSummary], float]


METRICS: Final = (
    ComparedMetric(name="median_ttft_ms", label="TTFT, median", is_time=True, of=lambda one: one.ttft_s.median),
    ComparedMetric(name="p99_ttft_ms", label="TTFT, p99", is_time=True, of=lambda one: one.ttft_s.p99),
    ComparedMetric(name="median_tpot_ms", label="TPOT, median", is_time=True, of=lambda one: one.tpot_s.median),
    ComparedMetric(name="median_itl_ms", label="ITL, median", is_time=True, of=lambda one: one.itl_s.median),
    ComparedMetric(name="p99_itl_ms", label="ITL, p99", is_time=True, of=lambda one: one.itl_s.p99),
    ComparedMetric(name="median_e2el_ms", label="end to end, median", is_time=True, of=lambda one: one.e2el_s.median),
    ComparedMetric(
        name="request_throughput", label="requests/s", is_time=False, of=lambda one: one.rate(one.completed)
    ),
    ComparedMetric(
        name="output_throughput",
        label="output tokens/s",
        is_time=False,
        of=lambda one: one.rate(one.total_output_tokens),
    ),
    ComparedMetric(
        name="request_goodput",
        label="goodput/s",
        is_time=False,
        of=lambda one: math.nan if one.met is None else one.rate(one.met),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """First server to second; `ratios` has one per pair of turns, in order."""

    metric: ComparedMetric
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def least(self) -> float:
        return min(self.ratios)

    @property
    def most(self) -> float:
        return max(self.ratios)


def compare_turns(pairs: Sequence[tuple[BenchSummary, BenchSummary]]) -> list[Ratio]:
    """Metrics that both servers have in at least one pair."""
    found = []
    for metric in METRICS:
        values = [(metric.of(first), metric.of(second)) for first, second in pairs]
        ratios = tuple(a / b for a, b in values if math.isfinite(a) and math.isfinite(b) and b > 0.0)
        if ratios:
            found.append(Ratio(metric=metric, ratios=ratios))
    return found


# --- result of a benchmark ------------------------------------------------------------------------------------
# The turns of each server at each level of load.


@dataclass(slots=True, kw_only=True)
class LevelResult:
    """The turns of one server at one level."""

    level: LoadLevel
    server: str
    turns: list[BenchTurn] = field(default_factory=list)
    slo: Slo | None = None
    slo_task_s: float | None = None

    @property
    def summary(self) -> BenchSummary:
        return summarise_bench(self.turns, self.slo, self.slo_task_s)


@dataclass(slots=True, kw_only=True)
class BenchResult:
    servers: list[tuple[str, str, str]]  # name, address, model
    slo: Slo | None
    levels: list[LevelResult] = field(default_factory=list)
    slo_task_s: float | None = None
    is_interrupted: bool = False
    has_shared_prefixes: bool = False  # the load has; otherwise no prompt should be found in a prefix cache

    def ratios(self, level: LoadLevel) -> list[Ratio]:
        """First server to second, from pairs of whole turns; empty for a single server."""
        at_level = [one for one in self.levels if one.level == level]
        if len(at_level) < 2:
            return []
        pairs = [
            (summarise_bench([first], self.slo), summarise_bench([second], self.slo))
            for first, second in zip(at_level[0].turns, at_level[1].turns, strict=False)
            if not (first.is_interrupted or second.is_interrupted)
        ]
        return compare_turns(pairs)

    @property
    def shown_levels(self) -> list[LoadLevel]:
        return list(dict.fromkeys(one.level for one in self.levels))

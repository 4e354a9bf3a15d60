"""Observed arrivals, and the demand of the next minutes that follows from them. Pure.

The rate is a straight line through the newest arrivals. The window is the longest one whose line agrees with the newest
arrivals in each shorter window: a step shortens it at once, and steady traffic lengthens it. A trend is continued
as far ahead as it was seen. The error of the line is part of the prediction, so an uncertain trend needs more workers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias, final

from pdserve.core.types import Slo
from router.scaling.interface import Demand, Interval
from router.state.interface import (
    Command,
    EmitTokens,
    EndCancelled,
    Event,
    FailRequest,
    FinishRequest,
    Outcome,
    RequestArrived,
    WorkerConnected,
)

# --- observation ----------------------------------------------------------------------------------------------


@final
class ArrivalLog:
    """Sums up the events and commands of a router, for `Interval`."""

    def __init__(self, began_s: float = 0.0) -> None:
        self._began_s = began_s
        self._sums = SumsOfRequests()
        self._running: dict[str, int] = {}  # tokens of each answer that has not ended
        self._block_size = 0  # of the newest worker; all that share a prefix index have the same

    def handled(self, event: Event, commands: Iterable[Command]) -> None:
        """Called with each event of the router and the commands that followed."""
        match event:
            case WorkerConnected():
                self._block_size = event.block_size
            case RequestArrived():
                cached = max(event.cached_blocks.values(), default=0) * self._block_size
                prompt = event.num_prompt_tokens
                self._sums.arrived(prompt, max(0, min(cached, prompt - 1)), event.slo)
            case _:
                pass
        for command in commands:
            match command:
                case EmitTokens():
                    count = len(command.tokens)
                    self._sums.tokens += count
                    self._running[command.request_id] = self._running.get(command.request_id, 0) + count
                case FinishRequest():
                    self._sums.answers += 1
                    self._sums.answer_tokens += command.usage.completion_tokens
                    self._sums.ended(command.outcome is Outcome.SERVED)
                    self._running.pop(command.request_id, None)
                case FailRequest():
                    self._sums.ended(False)
                    self._running.pop(command.request_id, None)
                case EndCancelled():
                    self._running.pop(command.request_id, None)

    def running_tokens(self) -> tuple[int, int]:
        """The number of answers that have begun and not ended, and their tokens so far."""
        return len(self._running), sum(self._running.values())

    def so_far(self, now_s: float) -> Interval:
        """The interval since the last `take`, which goes on."""
        return self._sums.interval(self._began_s, now_s)

    def take(self, now_s: float) -> Interval:
        """The interval since the last call."""
        sums, self._sums = self._sums, SumsOfRequests()
        began_s, self._began_s = self._began_s, now_s
        return sums.interval(began_s, now_s)


@dataclass(slots=True)
class SumsOfRequests:
    requests: int = 0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    uncached_squared: float = 0.0
    token_context: float = 0.0
    ttft_targets_s: float = 0.0
    tpot_targets_s: float = 0.0
    tokens: float = 0.0
    answers: int = 0
    answer_tokens: float = 0.0
    met: int = 0
    missed: int = 0

    def arrived(self, prompt: int, cached: int, slo: Slo) -> None:
        uncached = prompt - cached
        self.requests += 1
        self.prompt_tokens += prompt
        self.uncached_tokens += uncached
        self.uncached_squared += uncached * uncached
        self.token_context += uncached * (cached + 0.5 * uncached)
        self.ttft_targets_s += slo.ttft_s
        self.tpot_targets_s += slo.tpot_s

    def ended(self, has_met_slo: bool) -> None:
        if has_met_slo:
            self.met += 1
        else:
            self.missed += 1

    def interval(self, begin_s: float, end_s: float) -> Interval:
        held = {name: getattr(self, name) for name in self.__slots__}
        return Interval(begin_s=begin_s, end_s=end_s, **held)


def true_interval(begin_s: float, end_s: float, requests: Iterable[tuple[int, int, int, Slo]]) -> Interval:
    """Of known requests: (prompt tokens, cached tokens, output tokens, targets) each."""
    sums = SumsOfRequests()
    for prompt, cached, output, slo in requests:
        sums.arrived(prompt, cached, slo)
        sums.tokens += output
        sums.answers += 1
        sums.answer_tokens += output
    return sums.interval(begin_s, end_s)


# --- forecast -------------------------------------------------------------------------------------------------

WINDOWS_S: Final = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
KEPT_S: Final = WINDOWS_S[-1] + 60.0
MOST_INTERVALS: Final = 4096
SIGMAS: Final = 3.0  # the newest arrivals disagree with a line that is further away
CHI_SQUARED_MEDIAN: Final = 0.455  # with one degree of freedom
FEWEST_DIFFERENCES: Final = 8
TREND_S: Final = 80.0  # shorter windows have no trend, unless they rise clearly
RISE_S: Final = 40.0  # shorter windows have none at all
CLEAR_SIGMAS: Final = 2.0
TREND_REACH: Final = 1.0  # of the window: how far ahead a trend is continued
FEWEST_ANSWERS: Final = 20
FIRST_S: Final = 30.0  # nothing is decided in this time
NO_ANSWERS_S: Final = 120.0  # after this time, a rate without answers is believed
FIRST_OUTPUT_TOKENS: Final = 256.0  # before any answer was seen
FEWEST_REQUESTS: Final = 8


@dataclass(frozen=True, slots=True)
class Line:
    """A rate of `level` now that changes by `slope` per second. `reach_s`: how far ahead it is continued."""

    level: float
    slope: float
    level_variance: float
    slope_variance: float
    window_s: float
    dispersion: float
    misfit: float = 0.0  # above 1: the arrivals scatter around the line by more than chance

    def at(self, ahead_s: float) -> tuple[float, float]:
        """The rate, and its standard deviation."""
        reached_s = min(ahead_s, TREND_REACH * self.window_s)
        rate = max(0.0, self.level + self.slope * reached_s)
        return rate, math.sqrt(self.level_variance + reached_s * reached_s * self.slope_variance)


@final
class ArrivalHistory:
    def __init__(self) -> None:
        self._kept: deque[Interval] = deque(maxlen=MOST_INTERVALS)

    def add(self, interval: Interval) -> None:
        if not interval.width_s > 0.0:
            return
        self._kept.append(interval)
        while self._kept[0].end_s < interval.end_s - KEPT_S:
            self._kept.popleft()

    @property
    def has_enough(self) -> bool:
        """Whether a rate and a length can be said: enough time has passed, and answers have ended."""
        kept = self._kept
        if not kept:
            return False
        seen_s = kept[-1].end_s - kept[0].begin_s
        has_answers = sum(one.answers for one in kept) >= FEWEST_ANSWERS
        return seen_s >= FIRST_S and (has_answers or seen_s >= NO_ANSWERS_S)

    def forecast(self, ahead_s: Sequence[float], tokens_so_far: float) -> list[Demand]:
        """The demand at each of `ahead_s` seconds from now; empty without any request. `tokens_so_far`: mean over the
        running answers."""
        kept = list(self._kept)
        requests = [(one.begin_s, one.end_s, float(one.requests), float(one.requests)) for one in kept]
        prompts = [(one.begin_s, one.end_s, one.uncached_tokens, one.uncached_squared) for one in kept]
        line = newest_line(requests)
        window_s = min(line.window_s, newest_line(prompts).window_s)
        mix = _mix(kept, window_s)
        if mix is None:
            return []
        demands = []
        for at_s in ahead_s:
            rate, deviation = line.at(at_s)
            rate = max(rate, deviation)  # a rate below its own error could as well be that
            demands.append(_demand(at_s, rate, deviation / rate, mix, line.dispersion, tokens_so_far))
        return demands


def foreseen(future: Sequence[Interval], edges_s: Sequence[float], now_s: float) -> list[Demand]:
    """The demand between each two `edges_s` (seconds from now) according to the true arrivals."""
    demands: list[Demand] = []
    last: Interval | None = None
    for begin_s, end_s in pairwise(edges_s):
        parts = [one for one in future if begin_s <= 0.5 * (one.begin_s + one.end_s) - now_s < end_s]
        mix = joined(parts)
        if mix is not None and mix.requests:
            last = mix
        if last is None:
            continue
        rate = mix.requests / mix.width_s if mix is not None else 0.0
        demands.append(_demand(0.5 * (begin_s + end_s), rate, 0.0, last, 1.0))
    return demands


#: (begin, end, sum, sum of squares) of what arrived in an interval.
Bin: TypeAlias = tuple[float, float, float, float]


def newest_line(bins: Sequence[Bin]) -> Line:
    """`bins` in order of time."""
    dispersion, now_s = _dispersion(bins), bins[-1][1]
    found = _fit(bins, WINDOWS_S[0], dispersion)
    for window_s in WINDOWS_S[1:]:
        if now_s - bins[0][0] < 0.75 * window_s:
            break
        line = _fit(bins, window_s, dispersion)
        if line.misfit > 1.0 or not all(_agrees(line, bins, one) for one in WINDOWS_S if one < window_s):
            break
        found = line
    return found


def _dispersion(bins: Sequence[Bin]) -> float:
    """How many times the variance of the arrivals is that of independent ones. From the median of successive
    differences, in which a trend or a step hardly shows."""
    ratios = sorted(
        (later[2] - earlier[2]) ** 2 / (later[3] + earlier[3])
        for earlier, later in pairwise(bins)
        if later[3] + earlier[3] > 0.0
    )
    return max(1.0, ratios[len(ratios) // 2] / CHI_SQUARED_MEDIAN) if len(ratios) >= FEWEST_DIFFERENCES else 1.0


def _fit(bins: Sequence[Bin], window_s: float, dispersion: float) -> Line:
    """Least squares through the bins of the window; the error is that of sums of arrivals with this dispersion."""
    now_s = bins[-1][1]
    held = [one for one in bins if 0.5 * (one[0] + one[1]) > now_s - window_s] or bins[-1:]  # it may be long
    width_s = sum(end - begin for begin, end, _, _ in held)
    mean = sum(total for _, _, total, _ in held) / width_s
    # Per second. At least that of one arrival: nothing seen for a while does not mean that nothing comes.
    variance = max(sum(squared for _, _, _, squared in held), 1.0) / width_s * dispersion
    points = [(0.5 * (begin + end) - now_s, end - begin, total / (end - begin)) for begin, end, total, _ in held]
    middle_s = sum(at * width for at, width, _ in points) / width_s
    moment = sum(width * (at - middle_s) ** 2 for at, width, _ in points)
    slope = misfit = slope_variance = 0.0
    if window_s >= RISE_S and moment > 0.0:
        slope = sum(width * (at - middle_s) * (rate - mean) for at, width, rate in points) / moment
        slope_variance = variance / moment
    # A missed rise costs misses, a missed fall only worker-seconds.
    if slope_variance > 0.0 and (window_s >= TREND_S or slope > CLEAR_SIGMAS * math.sqrt(slope_variance)):
        residual = sum(width * (rate - mean - slope * (at - middle_s)) ** 2 for at, width, rate in points)
        freedom = max(len(points) - 2, 1)
        misfit = residual / (variance * freedom) / (1.0 + SIGMAS * math.sqrt(2.0 / freedom))
        slope *= slope * slope / (slope * slope + slope_variance)  # a slope within its error is mostly chance
    else:
        slope = slope_variance = 0.0
    return Line(
        level=max(0.0, mean - slope * middle_s),
        slope=slope,
        level_variance=variance / width_s + middle_s * middle_s * slope_variance,
        slope_variance=slope_variance,
        window_s=window_s,
        dispersion=dispersion,
        misfit=misfit,
    )


def _agrees(line: Line, bins: Sequence[Bin], span_s: float) -> bool:
    """Whether the arrivals of the last `span_s` are what the line says."""
    now_s = bins[-1][1]
    held = [one for one in bins if 0.5 * (one[0] + one[1]) > now_s - span_s]
    expected = sum(
        (end - begin) * max(0.0, line.level + line.slope * (0.5 * (begin + end) - now_s)) for begin, end, _, _ in held
    )
    seen = sum(total for _, _, total, _ in held)
    squares = sum(squared for _, _, _, squared in held)
    if seen > 0.0:
        squares *= max(1.0, expected / seen)  # fewer arrivals than expected vary as the expected ones would
    variance = max(squares * line.dispersion, 1.0)
    return (seen - expected) ** 2 <= SIGMAS * SIGMAS * variance


def joined(parts: Sequence[Interval]) -> Interval | None:
    """The sums of intervals that follow each other; None without any."""
    if not parts:
        return None
    names = [name for name in Interval.__slots__ if name not in ("begin_s", "end_s")]
    return Interval(
        begin_s=parts[0].begin_s,
        end_s=parts[-1].end_s,
        **{name: sum(getattr(one, name) for one in parts) for name in names},
    )


def _mix(kept: Sequence[Interval], window_s: float) -> Interval | None:
    """The sums of the window; of a longer one where it has too few requests or answers."""
    now_s = kept[-1].end_s
    found: Interval | None = None
    for longer_s in (one for one in WINDOWS_S if one >= window_s):
        found = joined([one for one in kept if one.begin_s >= now_s - longer_s - 1e-9])
        if found is not None and found.requests >= FEWEST_REQUESTS and found.answers >= FEWEST_ANSWERS:
            return found
    return found if found is not None and found.requests else None


def _demand(
    at_s: float, rate: float, error: float, mix: Interval, dispersion: float, tokens_so_far: float = 0.0
) -> Demand:
    count = mix.requests
    uncached = max(mix.uncached_tokens / count, 1.0)
    output = mix.answer_tokens / mix.answers if mix.answers else FIRST_OUTPUT_TOKENS
    # Completed answers are the short ones where answers have become longer. The tokens per completed answer are then
    # too many, and what running answers have, which are half done on average, grows until the first long ones end.
    output = max(output, min(mix.tokens / max(mix.answers, 1), 2.0 * tokens_so_far))
    return Demand(
        at_s=at_s,
        rate_rps=rate,
        error=error,
        prompt_tokens=mix.prompt_tokens / count,
        uncached_tokens=uncached,
        token_context=mix.token_context / count,
        output_tokens=max(1.0, output),
        prompt_spread=max(1.0, mix.uncached_squared / count / (uncached * uncached)),
        dispersion=dispersion,
        ttft_s=mix.ttft_targets_s / count,
        tpot_s=mix.tpot_targets_s / count,
    )

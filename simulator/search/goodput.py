"""Goodput: the highest rate at which enough requests meet both targets. Pure: the caller provides the function that
runs a rate.

Open loop: a run replays the same requests with their arrivals closer together or further apart (`scale` times the
trace's own rate). A request counts only if it was served completely and met its TTFT and TPOT targets; rejected,
failed, expired and cancelled ones are misses.

Attainment is noisy and, near the limit, not monotone in the rate. The search keeps one invariant: every tried rate up
to `scale` met the target, and the next tried one, at most `tolerance` above, missed it. So the answer is a rate that
was shown to meet the target. With several seeds the rows of all runs are pooled before they are compared with the
target.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.results import nearest_rank
from simulator.metrics import LATE_TOKENS, miss
from simulator.model import RequestRow, SimConfig, Simulate, Trace, TraceRequest
from simulator.traces.reshaped import Reshaped, Step, rate_scaled

# --- length of a run ------------------------------------------------------------------------------------------
# A run begins and ends with an empty cluster, and few requests give only a rough attainment. So a run supports a
# verdict on its rate only if
#
#     it lasts  SPANS times as long as a request stays, and as the TTFT target: otherwise overload cannot show
#     it has    ENOUGH requests after the first has left: otherwise the attainment is not known to MARGIN
#
# ENOUGH is the number at which the 95 % confidence interval of an attainment of TARGET is MARGIN to either side.

SPANS: Final = 10.0
MARGIN: Final = 0.03
TARGET: Final = 0.9  # share of all requests that must meet both targets for a rate to be sustained
_Z: Final = 1.96  # 95 %, both sides
ENOUGH: Final = math.ceil(_Z**2 * TARGET * (1.0 - TARGET) / MARGIN**2)  # 385


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a verdict on a rate requires, and what the runs have."""

    rate_rps: float
    requests: int
    lasted_s: float
    needed_requests: int
    needed_s: float

    @property
    def text(self) -> str:
        return (
            f"{self.requests} requests last {self.lasted_s:.3g} s at {self.rate_rps:.3g} requests/s; a verdict needs "
            f"about {self.needed_requests} requests and {self.needed_s:.3g} s"
        )


def shortage(*, requests: int, rate_rps: float, stay_s: float, slo_ttft_s: float, num_runs: int = 1) -> Shortage | None:
    """None: the runs suffice. `requests` is the sum over all `num_runs`, each of which ran at `rate_rps`.

    `stay_s`: mean time of a request in the cluster at that rate, from arrival to its end.
    """
    if not rate_rps > 0.0:
        return None
    each = requests / num_runs
    lasted_s = each / rate_rps
    needed_s = SPANS * max(stay_s, slo_ttft_s)
    steady = num_runs * max(0.0, each - rate_rps * stay_s)
    if lasted_s >= needed_s and steady >= ENOUGH:
        return None
    needed = num_runs * max(rate_rps * needed_s, ENOUGH / num_runs + rate_rps * stay_s)
    return Shortage(
        rate_rps=rate_rps,
        requests=requests,
        lasted_s=lasted_s,
        needed_requests=math.ceil(needed),
        needed_s=max(needed_s, needed / num_runs / rate_rps),
    )


def surely_misses(met: int, requests: int) -> bool:
    """Whether so few met their targets that chance does not explain it: the upper end of Wilson's interval is below
    TARGET. Few requests may be enough to show that a target cannot be met."""
    if not requests:
        return False
    share, z2 = met / requests, _Z**2
    middle = share + z2 / (2 * requests)
    spread = _Z * math.sqrt(share * (1.0 - share) / requests + z2 / (4 * requests**2))
    return (middle + spread) / (1.0 + z2 / requests) < TARGET


# --- search for the highest rate ------------------------------------------------------------------------------

TOLERANCE: Final = 0.03  # relative, between the rate that meets the target and the one that does not
# if a rate this many times below the first guess misses too: not attainable; if one this many times above meets it: no
# limit
TRICKLE: Final = 64.0
STEP: Final = 1.3  # factor between two rates until the limit is bracketed; grows with each


@dataclass(slots=True, kw_only=True)
class Probe:
    """The results of the runs at one rate. `num_rows` counts every request, ended or not."""

    scale: float
    rate_rps: float
    num_rows: int
    target: float = TARGET
    num_met: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # by simulator.metrics.miss
    is_whole: bool = True  # False: stopped as soon as the target was out of reach; the other figures are partial
    prompt_tokens: int = 0  # of all that ended
    prompt_tokens_met: int = 0  # of those that met both targets
    ttfts_s: list[float] = field(default_factory=list)  # of those that had a first token
    tpots_s: list[float] = field(default_factory=list)  # of those that had a second
    times_s: list[tuple[float, float]] = field(default_factory=list)  # TTFT and TPOT of those that were served whole
    stayed_s: float = 0.0  # from arrival to end, over all that ended
    num_ended: int = 0

    def count(self, row: RequestRow) -> bool:
        """False once the target cannot be reached, whatever the remaining requests do."""
        self.prompt_tokens += row.prompt_tokens
        if row.ended_s is not None:
            self.stayed_s += row.ended_s - row.arrival_s
            self.num_ended += 1
        if row.ttft_s is not None:
            self.ttfts_s.append(row.ttft_s)
        if row.tpot_s is not None and row.tokens > 1:
            self.tpots_s.append(row.tpot_s)
        if row.outcome in ("served", "late") and row.ttft_s is not None and row.tpot_s is not None:
            self.times_s.append((row.ttft_s, row.tpot_s))
        if reason := miss(row):
            self.misses[reason] += 1
        else:
            self.num_met += 1
            self.prompt_tokens_met += row.prompt_tokens
        return self.can_meet

    @property
    def num_missed(self) -> int:
        return self.misses.total()

    @property
    def can_meet(self) -> bool:
        """Whether the target was reached or still can be. Compares numbers of rows, which avoids rounding."""
        return self.num_rows - self.num_missed >= math.ceil(self.target * self.num_rows - 1e-9)

    @property
    def has_met(self) -> bool:
        return self.is_whole and self.can_meet

    @property
    def attainment(self) -> float:
        """For a stopped run, the highest attainment that it could have reached."""
        return (self.num_rows - self.num_missed) / self.num_rows

    @property
    def token_attainment(self) -> float:
        """Share of prompt tokens whose requests met both targets. The share of requests alone would favour a policy
        that gives up the longest prompts."""
        return self.prompt_tokens_met / max(1, self.prompt_tokens)

    @property
    def stay_s(self) -> float:
        """Mean time of a request in the cluster."""
        return self.stayed_s / self.num_ended if self.num_ended else 0.0

    @property
    def limit(self) -> str:
        """The target that most misses broke: "ttft", "tpot", or "" if there are no misses.

        Rejected and incomplete requests count for TTFT.
        """
        tpot = self.misses[LATE_TOKENS]
        return "" if not self.num_missed else "tpot" if tpot > self.num_missed - tpot else "ttft"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """The requests of a trace, held in memory, because a search runs them many times."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError if they have no duration."""
        span_s = self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0
        if not span_s > 0.0:
            expected = "arrivals that take some time"
            raise ConfigError("trace", f"{len(self.requests)} requests within {span_s:g} s", expected)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def rate_rps(self) -> float:
        return len(self.requests) / (self.requests[-1].arrival_s - self.requests[0].arrival_s)


def cut(trace: Trace, *steps: Step) -> TraceWindow:
    """`trace` after the steps; one of them should limit its length."""
    reshaped = Reshaped(trace, *steps)
    return TraceWindow(name=reshaped.name, block_tokens=reshaped.block_tokens, requests=tuple(reshaped))


class RunAtScale(Protocol):
    """A run at `scale`; `to_end`: even if the target is out of reach, for complete figures."""

    def __call__(self, scale: float, to_end: bool = False) -> Probe: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestRate:
    """`scale` and `rate_rps` are 0 if no rate met the target."""

    scale: float
    rate_rps: float
    held: Probe | None  # at the goodput
    missed: Probe | None  # at the lowest rate above it that was tried
    probes: tuple[Probe, ...]  # in the order they ran
    is_bound: bool = False  # the search stopped early: the goodput is below the rate of `missed`

    @property
    def limit(self) -> str:
        return self.missed.limit if self.missed is not None else ""

    @property
    def bounds(self) -> dict[str, float | None]:
        """Of the goodput, as fields of a JSON object."""
        return {
            "goodput_rps": None if self.is_bound else self.rate_rps,
            "below_rps": None if self.missed is None else self.missed.rate_rps,
        }

    @property
    def rate_text(self) -> str:
        """Of the goodput, for tables: "2.5", or "< 2.5"."""
        if self.is_bound and self.missed is not None:
            return f"< {self.missed.rate_rps:.3g}"
        return f"{self.rate_rps:.3g}"

    def shortage(self, slo_ttft_s: float, num_runs: int = 1) -> Shortage | None:
        """Why the runs are too short to support this answer; None: they are long enough."""
        one = self.held or self.missed
        assert one is not None
        if self.held is None and (self.is_bound or surely_misses(one.num_rows - one.num_missed, one.num_rows)):
            return None
        return shortage(
            requests=one.num_rows,
            rate_rps=one.rate_rps,
            stay_s=one.stay_s,
            slo_ttft_s=slo_ttft_s,
            num_runs=num_runs,
        )

    @property
    def verdict(self) -> str:
        """One line of text."""
        if self.held is not None:
            if self.missed is None:
                return f"at least {self.rate_rps:.4g} requests/s: so few requests never overload this cluster"
            return f"{self.rate_rps:.4g} requests/s"
        assert self.missed is not None
        if self.is_bound:
            return f"below {self.missed.rate_rps:.4g} requests/s"
        one = self.missed
        times = ", ".join(
            f"p{100 * one.target:.0f} {name} alone is {nearest_rank(sorted(values), one.target):.3g} s"
            for name, values in (("TTFT", one.ttfts_s), ("TPOT", one.tpots_s))
            if values
        )
        held = f"{one.attainment:.0%} meet both targets at {one.rate_rps:.3g} requests/s"
        return f"not attainable: {held}" + (f"; {times}" if times else "; no request was answered")


def find_goodput(
    run: RunAtScale, first: float, *, tolerance: float = TOLERANCE, floor: float = 0.0, step: float = STEP
) -> HighestRate:
    """Searches from the scale `first` on; use a smaller `step` for a better first guess. Scales at or below `floor` are
    of no interest: if the rate just above misses, the search ends with `is_bound`.

    Raises ConfigError on a `first` or `tolerance` that is not above 0.
    """
    for name, value in (("first", first), ("tolerance", tolerance)):
        if not 0.0 < value < math.inf:
            raise ConfigError(name, value, "a finite number above 0")
    probes: list[Probe] = []

    def probe(scale: float) -> Probe:
        probes.append(run(scale, scale <= lowest))
        return probes[-1]

    def answer(held: Probe | None, missed: Probe | None, is_bound: bool = False) -> HighestRate:
        scale, rate_rps = (held.scale, held.rate_rps) if held is not None else (0.0, 0.0)
        return HighestRate(
            scale=scale, rate_rps=rate_rps, held=held, missed=missed, probes=tuple(probes), is_bound=is_bound
        )

    begin = floor * (1.0 + tolerance) if floor > 0.0 else first
    lowest, highest = min(begin, first) / TRICKLE, first * TRICKLE
    here = probe(begin)
    if floor > 0.0 and not here.has_met:
        return answer(None, here, is_bound=True)
    held, missed = (here, None) if here.has_met else (None, here)
    while missed is None:
        assert held is not None
        if held.scale >= highest:
            return answer(held, None)
        here = probe(min(held.scale * step, highest))
        held, missed, step = (here, None, min(step * STEP, 2.0)) if here.has_met else (held, here, step)
    while held is None:
        if missed.scale <= lowest:
            return answer(None, missed)
        here = probe(max(missed.scale / step, lowest))
        held, missed, step = (here, missed, step) if here.has_met else (None, here, min(step * STEP, 4.0))
    while missed.scale > held.scale * (1.0 + tolerance):
        here = probe(math.sqrt(held.scale * missed.scale))
        held, missed = (here, missed) if here.has_met else (held, here)
    return answer(held, missed)


def runner(
    windows: Sequence[TraceWindow], config: SimConfig, simulate: Simulate, *, target: float = TARGET
) -> RunAtScale:
    """Runs every window (one per seed) at a scale, each with a seed of its own, and pools their rows.

    A run ends early only if the remaining requests cannot change that the target is missed.
    """
    if not windows:
        raise ConfigError("windows", 0, "at least one")
    mean_rps = sum(window.rate_rps for window in windows) / len(windows)

    def run(scale: float, to_end: bool = False) -> Probe:
        probe = Probe(
            scale=scale, rate_rps=mean_rps * scale, num_rows=sum(len(window) for window in windows), target=target
        )
        for number, window in enumerate(windows):
            seeded = dataclasses.replace(config, seed=config.seed + number)
            result = simulate(Reshaped(window, rate_scaled(scale)), seeded, lambda row: probe.count(row) or to_end)
            if not probe.can_meet and not to_end:
                probe.is_whole = False
                break
            # Requests that never ended were not counted in any row.
            probe.misses["unfinished"] += sum(row.outcome == "unfinished" for row in result.requests)
        return probe

    return run

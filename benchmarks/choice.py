"""The choice between loading and computing, by predicted seconds, beside fixed rules: `python -m benchmarks.agents
--choice`.

Simulates one H100 that prefills and decodes, with one tier below its pool, over all mixes of the tier's bandwidth, the
length of sessions and the load. Each mix is run with our rule and with fixed ones: never load, always load, and load if
at least so many tokens are found. All rules have the same traces, tiers and give-up times; only the choice differs.

The schedules of two rules diverge with the first choice that differs, and then queues differ by chance. So each mix is
repeated with further seeds, until two standard errors of the ratio to the best fixed rule are less than its distance
from the bar, or `--most-seeds` are used. If the bar is still within them, the mix is undecided.

The figure of a mix is the mean TTFT of all seeds, because the choice is about seconds, and each of them counts the same
in a mean; a percentile would hide what most requests lose. Beside it is the share of requests within a target. The load
is the time to compute all prompts without any cache, over the time of the trace.

Bars: in each mix at most 1.03 times the mean TTFT of the best fixed rule of that mix; and over all mixes, in the
geometric mean, at least 10 % below the one fixed rule that is best over all of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from benchmarks.harness import table
from pdserve.core.attempt import Attempt
from pdserve.core.cost.latency import CostModel
from pdserve.core.kv.fetch import BlockSource
from pdserve.core.kv.host_tier import LoadRule
from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from simulator.cluster.tiers import SimulatedSource, TierRules
from simulator.cluster.world import World
from simulator.model import SimConfig, TraceRequest, WorkerShape
from simulator.search.layouts import make_workers
from simulator.traces.workloads import log_normal

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
PATIENT: Final = Slo(ttft_s=36_000.0, tpot_s=600.0)
BANDWIDTHS_GB_S: Final = (0.3, 1.0, 3.0, 10.0, 25.0)
LOADS: Final = (0.1, 0.7, 2.0)
TIERS: Final = ("disk", "host")
LEAST_TOKENS: Final = (1_024, 8_192, 32_768)  # of the fixed rules, beside "always" and "never"
WITHIN: Final = 1.03
LEAST_SEEDS: Final = 2
HELPS: Final = 0.97  # of the mean TTFT without a tier
SHARE_OF_SINGLE: Final = 0.90
OURS: Final = "ours"
NEVER: Final = "never"
TIER_POOLS: Final = 8  # size of the tier
WORKING_POOLS: Final = 4  # of the first prompts of all sessions
OUTPUT_TOKENS: Final = 16

# --- fixed rules ----------------------------------------------------------------------------------------------


@final
class FixedSource:
    """Says that it is fast if it has enough, and that it has nothing otherwise."""

    def __init__(self, source: SimulatedSource, least_blocks: float) -> None:
        self.name = source.name
        self._source, self._least_blocks = source, least_blocks

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        count = self._source.num_found(attempt, hashes, first)
        return count if count >= self._least_blocks else 0

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class FixedLoad(LoadRule):
    least_blocks: float = 0.0

    def loads(self, num_blocks: int, *, cached_tokens: int, block_size: int) -> bool:
        return num_blocks >= self.least_blocks

    def saves(self, computed_s: float, chance: float | None) -> bool:
        return True

    def is_worthwhile(self, block_size: int) -> bool:
        return True


@final
class FixedRules(TierRules):
    def __init__(self, least_tokens: float, block_size: int) -> None:
        self._least_blocks = least_tokens / block_size

    def host(self, rule: LoadRule) -> LoadRule:
        return FixedLoad(rule.block_s, rule.prefill_s, rule.is_beside, self._least_blocks)

    def has_disk(self, read_s: float, computed_s: float) -> bool:
        return True

    def source(self, source: SimulatedSource) -> BlockSource:
        return FixedSource(source, self._least_blocks)


#: The least tokens of each rule; None: by predicted seconds.
RULES: Final[dict[str, float | None]] = {
    OURS: None,
    NEVER: math.inf,
    "always": 0.0,
    **{f">= {one} tokens": float(one) for one in LEAST_TOKENS},
}

# --- mixes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Sessions whose prompts begin with everything before, and grow."""

    name: str
    first_tokens: int  # median of the first prompt
    added_tokens: int  # median of what a turn adds
    most_tokens: int
    pool_tokens: int
    block_tokens: int
    ttft_s: float  # target

    @property
    def num_sessions(self) -> int:
        return WORKING_POOLS * self.pool_tokens // self.first_tokens


LENGTHS: Final = (
    Length(
        name="chats",
        first_tokens=1_000,
        added_tokens=200,
        most_tokens=8_000,
        pool_tokens=12_800,
        block_tokens=64,
        ttft_s=0.2,
    ),
    Length(
        name="assistants",
        first_tokens=8_000,
        added_tokens=600,
        most_tokens=32_000,
        pool_tokens=100_352,
        block_tokens=512,
        ttft_s=0.5,
    ),
    Length(
        name="agents",
        first_tokens=32_000,
        added_tokens=1_200,
        most_tokens=100_000,
        pool_tokens=400_384,
        block_tokens=512,
        ttft_s=2.0,
    ),
)


@final
class Turns:
    """`count` turns of random sessions, at random times, so that computing every prompt completely takes `load` times
    as long as the trace. A turn follows the one before it in its session."""

    def __init__(self, length: Length, load: float, count: int, seed: int, cost: CostModel) -> None:
        self.name, self.block_tokens = f"{length.name} at {load}", length.block_tokens
        rng, ids = random.Random(seed), itertools.count()
        held: list[tuple[int, list[int], int | None]] = []
        for _ in range(length.num_sessions):
            tokens = round(log_normal(median=length.first_tokens, spread=0.6, most=length.most_tokens)(rng))
            held.append((tokens, [], None))
        added = log_normal(median=length.added_tokens, spread=0.8, most=length.first_tokens)
        rows: list[TraceRequest] = []
        for number in range(count):
            index = rng.randrange(len(held)) if number >= len(held) else number
            tokens, blocks, last = held[index]
            tokens = min(tokens, length.most_tokens)
            blocks = [*blocks, *itertools.islice(ids, -(-tokens // self.block_tokens) - len(blocks))]
            one = TraceRequest(
                arrival_s=0.0, prompt_tokens=tokens, output_tokens=OUTPUT_TOKENS, block_ids=tuple(blocks), follows=last
            )
            rows.append(one)
            held[index] = tokens + OUTPUT_TOKENS + round(added(rng)), blocks, number
        mean_s = statistics.mean(cost.prefill_s(one.prompt_tokens) for one in rows) / load
        at_s = 0.0
        self.requests: list[TraceRequest] = []
        for one in rows:
            at_s += rng.expovariate(1.0 / mean_s)
            self.requests.append(replace(one, arrival_s=at_s))

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


# --- runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mix:
    length: Length
    load: float
    tier: str
    gb_s: float

    @property
    def text(self) -> str:
        return f"{self.length.name}, load {self.load:g}, {self.tier} {self.gb_s:g} GB/s"


@dataclass(frozen=True, slots=True)
class Figure:
    times_s: tuple[float, ...]  # mean TTFT, of each seed
    attained: float  # share of the requests within the target

    @property
    def ttft_s(self) -> float:
        return statistics.mean(self.times_s)


@dataclass(frozen=True, slots=True)
class Compared:
    mix: Mix
    figures: dict[str, Figure]  # by rule

    @property
    def best(self) -> str:
        """The best fixed rule."""
        return min((name for name in self.figures if name != OURS), key=lambda name: self.figures[name].ttft_s)

    def ratio(self, rule: str) -> float:
        """Our mean TTFT over that of another rule."""
        return self.figures[OURS].ttft_s / self.figures[rule].ttft_s

    @property
    def error(self) -> float:
        """The standard error of the ratio to the best rule, over seeds; infinite with one."""
        ours, best = self.figures[OURS].times_s, self.figures[self.best]
        if len(ours) < 2:
            return math.inf
        ratio = self.ratio(self.best)
        rests = [mine - ratio * theirs for mine, theirs in zip(ours, best.times_s, strict=True)]
        return math.sqrt(sum(one**2 for one in rests) / (len(ours) * (len(ours) - 1))) / best.ttft_s

    @property
    def is_within(self) -> bool | None:
        """Whether it meets the bar; None: that is not decided."""
        ratio = self.ratio(self.best)
        return ratio <= WITHIN if abs(ratio - WITHIN) >= 2.0 * self.error else None


def simulated(turns: Turns, mix: Mix, rule: str, shape: WorkerShape, seed: int) -> Figure:
    length, least = mix.length, RULES[rule]
    size = TIER_POOLS * length.pool_tokens * shape.kv_bytes_per_token
    shape = replace(shape, kv_capacity_tokens=length.pool_tokens)
    if least == math.inf:
        pass
    elif mix.tier == "disk":
        shape = replace(shape, disk_bytes=size, disk_bytes_per_s=mix.gb_s * 1e9)
    else:
        shape = replace(shape, host_bytes=size, host_bytes_per_s=mix.gb_s * 1e9)
    config = SimConfig(workers=(shape,), slo=PATIENT, block_size=length.block_tokens, seed=seed)
    rules = None if least is None else FixedRules(least, length.block_tokens)
    times_s = [one.ttft_s for one in World(turns, config, tier_rules=rules).run().requests if one.ttft_s is not None]
    assert len(times_s) == len(turns.requests), f"{len(turns.requests) - len(times_s)} requests have no answer"
    return Figure((statistics.mean(times_s),), sum(one <= length.ttft_s for one in times_s) / len(times_s))


def compare(
    *,
    lengths: Sequence[Length] = LENGTHS,
    loads: Sequence[float] = LOADS,
    tiers: Sequence[str] = TIERS,
    bandwidths_gb_s: Sequence[float] = BANDWIDTHS_GB_S,
    count: int,
    seed: int,
    least_seeds: int = LEAST_SEEDS,
    most_seeds: int = 1,
) -> Iterator[Compared]:
    shape = make_workers(load_profile(PROFILE), 0, 1)[0]
    for length, load in itertools.product(lengths, loads):
        turns: list[Turns] = []
        nevers: list[Figure] = []  # of each seed
        for tier, gb_s in itertools.product(tiers, bandwidths_gb_s):
            mix = Mix(length, load, tier, gb_s)
            runs: list[dict[str, Figure]] = []
            while True:
                number = len(runs)
                if number == len(turns):
                    turns.append(Turns(length, load, count, seed + number, CostModel(shape.cost)))
                    none = Mix(length, load, "none", 0.0)
                    nevers.append(simulated(turns[number], none, NEVER, shape, seed + number))
                found = {NEVER: nevers[number]}
                for rule in RULES:
                    if rule != NEVER:
                        found[rule] = simulated(turns[number], mix, rule, shape, seed + number)
                runs.append(found)
                compared = Compared(mix, {rule: _joined([one[rule] for one in runs]) for rule in RULES})
                if len(runs) >= most_seeds or (compared.is_within is not None and len(runs) >= least_seeds):
                    break
            yield compared


def _joined(figures: Sequence[Figure]) -> Figure:
    times_s = itertools.chain.from_iterable(one.times_s for one in figures)
    return Figure(tuple(times_s), statistics.mean(one.attained for one in figures))


def one_for_all(several: Sequence[Compared]) -> str:
    """The fixed rule whose mean TTFT is the lowest, in the geometric mean of all mixes."""
    return min((rule for rule in RULES if rule != OURS), key=lambda rule: overall(several, rule))


def overall(several: Sequence[Compared], rule: str) -> float:
    """The geometric mean of a rule's mean TTFT over that of ours."""
    return math.exp(statistics.mean(-math.log(one.ratio(rule)) for one in several))


def report(arguments: argparse.Namespace) -> None:
    began_s, several = time.monotonic(), []
    for one in compare(
        lengths=[one for one in LENGTHS if one.name in arguments.lengths],
        loads=arguments.loads,
        tiers=arguments.tiers,
        bandwidths_gb_s=arguments.gb_per_s,
        count=arguments.requests,
        seed=arguments.seed,
        least_seeds=arguments.least_seeds,
        most_seeds=arguments.most_seeds,
    ):
        several.append(one)
        ratio, since_s, num_seeds = one.ratio(one.best), time.monotonic() - began_s, len(one.figures[OURS].times_s)
        print(
            f"{one.mix.text}: ours / best fixed {ratio:.3f} +- {one.error:.3f} ({num_seeds} seeds), {one.best} "
            f"({since_s:.0f} s)",
            flush=True,
        )
    head = ["mix", *RULES, "ours / best", "attained: ours", "best"]
    rows = [
        [
            one.mix.text,
            *(f"{1000.0 * one.figures[rule].ttft_s:.0f}" for rule in RULES),
            f"{one.ratio(one.best):.3f} +- {one.error:.3f} {one.best}",
            f"{100.0 * one.figures[OURS].attained:.0f} %",
            f"{100.0 * max(each.attained for name, each in one.figures.items() if name != OURS):.0f} %",
        ]
        for one in several
    ]
    print("mean TTFT in ms, by rule")
    print(table([head, *rows]))
    for rule in RULES:
        if rule != OURS:
            print(f"{rule}: {overall(several, rule):.3f} times our mean TTFT, in the geometric mean of all mixes")
    worst = max(one.ratio(one.best) for one in several)
    within = sum(one.ratio(one.best) <= WITHIN for one in several)
    beyond = sum(one.is_within is False for one in several)
    undecided = sum(one.is_within is None for one in several)
    print(
        f"within {100 * (WITHIN - 1):.0f} % of the best fixed rule of the mix in {within} of {len(several)} mixes, "
        f"worst {worst:.3f}, {beyond} beyond it by two standard errors, {undecided} undecided: "
        f"{'met' if within == len(several) else 'missed'}"
    )
    helped = sum(min(one.figures[rule].ttft_s for rule in RULES) < HELPS * one.figures[NEVER].ttft_s for one in several)
    print(f"in {helped} of {len(several)} mixes some rule is at least {100 * (1 - HELPS):.0f} % better than no tier")
    single = one_for_all(several)
    share = 1.0 / overall(several, single)
    print(
        f"{share:.3f} of the best threshold for all, {single} (infinite: never; 0: always); bar {SHARE_OF_SINGLE}: "
        f"{'met' if share <= SHARE_OF_SINGLE else 'missed'}"
    )

"""The traffic, SLO targets and clusters of benchmarks.schedule, with the same constants for every trace and policy."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.results import nearest_rank
from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.state.interface import RouterSettings
from simulator.model import Trace, TraceRequest
from simulator.search.bound import upper_bound
from simulator.search.goodput import TARGET, TRICKLE, TraceWindow, cut
from simulator.search.plan import CHUNK_TOKENS, Question, demand
from simulator.traces.files import FileTrace
from simulator.traces.workloads import Joined, Reshaped, Step, first, jittered, rate_scaled

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
LINK: Final = "ib400"  # sixteen workers are two hosts
NUM_WORKERS: Final = 16
BLOCK_TOKENS: Final = 64  # of the trace that names no blocks
SEED: Final = 0
SEARCH_REQUESTS: Final = 1000  # the split is chosen on this many requests, to 8 %
SEARCH_TOLERANCE: Final = 0.08
FINAL_REQUESTS: Final = 2000  # and its goodput is measured on this many, to 3 %
FINAL_TOLERANCE: Final = 0.03
OVERLOAD: Final = 3.0  # times the peak
OVERLOAD_REQUESTS: Final = 4000

POLICIES: Final = (
    "goodput",
    "colocated",
    "round-robin",
    "least-loaded",
    "dynamo",
    "lmetric",
    "mooncake",
    "mooncake-pd",  # as published, with both kinds of workers; "mooncake" may also be aggregated, which helps it
    "least-ttft",
)
DISAGGREGATED: Final = "-pd"
TRACES: Final = ("mooncake", "mooncake-jittered", "azure", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """SLO targets as multiples of the model's unloaded times: a prefill of the trace's p90 prompt, a decode step of
    one sequence at its mean prompt. So they mean the same for another model and another trace."""

    name: str
    ttft: float
    tpot: float
    source: str


# OPT-13B on one A100: 93 ms for a prompt of 700 tokens, 20 ms a step, and targets of 0.25 / 0.1 s. OPT-66B: 139 ms on
# four, 41 ms a step on two stages of two (132 GB at 1.6 TB/s each), and 0.4 / 0.1 s. LLaMA3-70B on eight A800: 4 s for
# 28,000 tokens, 17 ms a step, and 30 / 0.3 s. Multiples are rounded.
PAIRS: Final = (
    Pair(name="chat-66b", ttft=2.5, tpot=2.5, source="DistServe, 66B ShareGPT: 0.4 / 0.1 s"),
    Pair(name="chat-13b", ttft=2.5, tpot=5.0, source="DistServe, 13B ShareGPT: 0.25 / 0.1 s"),
    Pair(name="mooncake-70b", ttft=7.5, tpot=17.0, source="Mooncake, 70B: 30 / 0.3 s"),
)


@lru_cache
def profile() -> Profile:
    return load_profile(PROFILE)


def folder() -> Path:
    found = Path(os.environ.get("PDSERVE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
    if not found.is_dir():
        raise ConfigError(
            "PDSERVE_TRACES", found, "the folder that holds mooncake_conversation.jsonl and azure_2023_conv.csv"
        )
    return found


@lru_cache
def published(name: str) -> FileTrace:
    return FileTrace(folder() / {"mooncake": "mooncake_conversation.jsonl", "azure": "azure_2023_conv.csv"}[name])


@lru_cache
def slo(name: str, pair: str) -> Slo:
    """From the lengths of the whole trace, not of a window."""
    prompts = sorted(one.prompt_tokens for one in published(name))
    cost, times = CostModel(profile().cost), next(one for one in PAIRS if one.name == pair)
    return Slo(
        ttft_s=round(times.ttft * cost.prefill_s(nearest_rank(prompts, 0.9), 0, CHUNK_TOKENS), 3),
        tpot_s=round(times.tpot * cost.decode_s(1, sum(prompts) / len(prompts)), 4),
    )


def promised(limits: Slo) -> Step:
    return lambda requests: (replace(one, slo=limits) for one in requests)


@lru_cache
def window(trace: str, pair: str, num_requests: int) -> TraceWindow:
    """`step`: half of the requests are Mooncake's, then half are Azure's, each part with its own promises; the second
    part comes so fast that both ask for the same share of the cluster."""
    if trace != "step":
        name = trace.removesuffix("-jittered")
        steps = [jittered(SEED, published(name).quantum_s)] if trace.endswith("-jittered") else []
        return cut(published(name), first(num_requests), *steps, promised(slo(name, pair)))
    before = window("mooncake-jittered", pair, num_requests // 2)
    after = window("azure", pair, num_requests // 2)
    needs = [one.rate_rps * _worker_s(one) for one in (before, after)]
    at_s = before.requests[-1].arrival_s
    joined: Trace = Joined(before, Reshaped(after, rate_scaled(needs[0] / needs[1])), at_s)
    return cut(joined)


def _worker_s(one: TraceWindow) -> float:
    needed = demand(Question(windows=(one,), profile=profile(), num_workers=NUM_WORKERS, slo=Slo()))
    return needed.prefill_s + needed.decode_s


def question(
    trace: str, pair: str, policy: str, num_requests: int, tolerance: float, rules_off: tuple[str, ...] = ()
) -> Question:
    one = window(trace, pair, num_requests)
    return Question(
        windows=(one,),
        profile=profile(),
        num_workers=NUM_WORKERS,
        slo=Slo(),  # each request has its own targets
        router=RouterSettings(policy=policy.removesuffix(DISAGGREGATED), rules_off=rules_off),
        link=LINK,
        block_size=one.block_tokens or BLOCK_TOKENS,
        seed=SEED,
        tolerance=tolerance,
    )


def highest_possible_rps(asked: Question, num_prefill: int, rate_rps: float) -> float:
    """The highest rate, to FINAL_TOLERANCE, at which some scheduler might serve the target share of the requests in
    time on this split; `rate_rps` is a rate at which a policy does."""
    [only], config = asked.windows, asked.config(num_prefill)

    def is_possible(rate_rps: float) -> bool:
        bound = upper_bound(Reshaped(only, rate_scaled(rate_rps / only.rate_rps)), config)
        return bound.most >= TARGET * bound.requests

    low, high = rate_rps, 1.1 * rate_rps
    while rate_rps and high < TRICKLE * rate_rps and is_possible(high):
        low, high = high, 1.5 * high
    while high > low * (1.0 + FINAL_TOLERANCE):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return high


def mixed(seed: int) -> Step:
    """A tenant with an eighth of the requests beside one with the rest; a tenth of all in a higher class."""

    def step(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        rng = random.Random(seed)
        for one in requests:
            tenant = "small" if rng.random() < 0.125 else "big"
            yield replace(one, tenant=tenant, priority=int(rng.random() < 0.1))

    return step

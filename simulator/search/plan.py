"""Finds the best split of a number of workers into prefill and decode workers, by simulation instead of averages. Pure.

Every split runs the same requests, with their full distribution of lengths, and is judged by their arrival rate
(simulator/search/goodput.py). With the goodput policy, decode workers may also prefill, and 0:K is the cluster without
disaggregation.

There are two searches. `sweep` covers all splits, coarse to fine, and gives a curve; its rounds can run in parallel,
and the answer does not depend on the number of processes. `climb` finds only the best split; of each other split it
tests only whether that sustains a higher rate than the best so far. `compare` does the same for layouts of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.types import Slo
from router.policy import find_policy
from router.state.interface import RouterSettings
from simulator.model import SimConfig, Simulate
from simulator.search.goodput import STEP, TOLERANCE, HighestRate, RunAtScale, TraceWindow, find_goodput, runner
from simulator.search.layouts import MAX_WORKERS, Layout, by_degrees, make_workers

MARGIN: Final = 0.03  # gain required for disaggregation, because it needs a network for KV
SHARE_OF_CAPACITY: Final = 0.8  # share of all workers' time at which the search for the highest rate begins
NEAR: Final = 1.1  # the first step from the rate of another window
CHUNK_TOKENS: Final = 2048
MAX_ROWS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The input of a plan. `windows`: the requests, once per seed."""

    windows: tuple[TraceWindow, ...]
    profile: Profile
    num_workers: int
    slo: Slo
    router: RouterSettings = field(default_factory=lambda: RouterSettings(policy="goodput"))
    link: str = ""  # name of the profile's link; "": its first
    block_size: int = 64
    seed: int = 0
    tolerance: float = TOLERANCE
    decode_profile: Profile | None = None  # of the decode workers, if it is not `profile`

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError("workers", self.num_workers, f"1 to {MAX_WORKERS}")

    @property
    def splits(self) -> range:
        """The valid numbers of prefill workers."""
        return range(self.num_workers if find_policy(self.router.policy).uses_prefill else 1)

    def resized(self, num_workers: int) -> Question:
        return replace(self, num_workers=num_workers)

    def config(self, num_prefill: int) -> SimConfig:
        workers = make_workers(
            self.profile,
            num_prefill,
            self.num_workers - num_prefill,
            link=self.link,
            decode_profile=self.decode_profile,
        )
        return SimConfig(
            # The estimates from which the search begins are without pulls.
            workers=tuple(replace(one, pulls_kv=False) for one in workers),
            slo=self.slo,
            router=self.router,
            block_size=self.block_size,
            seed=self.seed,
        )

    def run(self, num_prefill: int, simulate: Simulate) -> RunAtScale:
        return runner(self.windows, self.config(num_prefill), simulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDemand:
    """Mean seconds of a worker's time that one request needs, without waiting. A search begins from it."""

    prefill_s: float
    decode_s: float

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / (self.prefill_s + self.decode_s)


def demand(question: Question) -> MeanDemand:
    """The mean over the whole distribution, without caches, with as many rows per decode step as fit."""
    decoding = question.decode_profile or question.profile
    cost, decode, num_requests, prefill_s, decode_s, context = question.profile.cost, decoding.cost, 0, 0.0, 0.0, 0.0
    for one in question.windows[0]:
        tokens, rows_context = one.prompt_tokens, one.prompt_tokens + 0.5 * one.output_tokens
        prefill_s += cost.prefill_base_s * -(-tokens // CHUNK_TOKENS)
        prefill_s += tokens * (cost.prefill_per_token_s + cost.prefill_per_token_context_s * 0.5 * tokens)
        decode_s += one.output_tokens * (decode.decode_per_row_s + decode.decode_per_context_token_s * rows_context)
        context += rows_context
        num_requests += 1
    rows = min(MAX_ROWS, max(1.0, decoding.kv_capacity_tokens * num_requests / context))
    decode_s += sum(one.output_tokens for one in question.windows[0]) * decode.decode_base_s / rows
    return MeanDemand(prefill_s=prefill_s / num_requests, decode_s=decode_s / num_requests)


def first_guess(question: Question) -> float:
    """A first guess of the scale of the highest rate."""
    needed = demand(question)
    capacity_rps = question.num_workers / (needed.prefill_s + needed.decode_s)
    return SHARE_OF_CAPACITY * capacity_rps / question.windows[0].rate_rps


def measure(
    question: Question, num_prefill: int, simulate: Simulate, *, first: float = 0.0, floor: float = 0.0
) -> HighestRate:
    """The goodput of one split, if above the scale `floor`; `first`: a scale near which it is expected."""
    run = question.run(num_prefill, simulate)
    begin, step = (first, NEAR) if first else (first_guess(question), STEP)
    return find_goodput(run, begin, tolerance=question.tolerance, floor=floor, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    num_workers: int
    curve: dict[int, HighestRate]  # by number of prefill workers, for the tested splits

    @property
    def best(self) -> int:
        """The number of prefill workers of the split with the highest goodput; the fewest of equal ones."""
        return max(self.curve, key=lambda one: (self.curve[one].rate_rps, -one))

    @property
    def advice(self) -> int:
        """`best`, or 0 if the cluster without disaggregation is within MARGIN of it."""
        whole = self.curve.get(0)
        is_close = whole is not None and whole.rate_rps * (1.0 + MARGIN) >= self.curve[self.best].rate_rps
        return 0 if is_close else self.best

    @property
    def is_attainable(self) -> bool:
        return self.curve[self.best].rate_rps > 0.0

    def split(self, num_prefill: int) -> str:
        return f"{num_prefill}:{self.num_workers - num_prefill}"


Evaluate = Callable[[Sequence[int], float], Iterable[HighestRate]]  # (splits, floor) -> the goodput of each, in order


def sweep(num_workers: int, splits: range, evaluate: Evaluate) -> Plan:
    """Runs a quarter of all splits, then ever finer around the best disaggregated one; 0:K is separate, because it is
    not part of that curve. A split that misses at the first rate above the best so far has only a bound in the
    curve."""
    curve: dict[int, HighestRate] = {}
    step = max(1, len(splits) // 4)
    wanted = list(splits[::step])
    floor = 0.0
    while wanted:
        curve.update(zip(wanted, evaluate(wanted, floor), strict=True))
        top = _top(curve)
        floor = max(one.scale for one in curve.values())
        wanted = _near(top, step, splits, curve)
        while not wanted and step > 1:
            step //= 2
            wanted = _near(top, step, splits, curve)
    return Plan(num_workers=num_workers, curve=curve)


def climb(num_workers: int, splits: range, begin: int, evaluate: Evaluate) -> Plan:
    """Runs 0:K if it is one of `splits`, then goes from `begin` towards more goodput, in steps that halve."""
    curve: dict[int, HighestRate] = {}

    def measure_split(one: int) -> None:
        floor = max((seen.scale for seen in curve.values()), default=0.0)
        [curve[one]] = evaluate([one], floor)

    if 0 in splits:
        measure_split(0)
    top, step = min(max(begin, 1), splits[-1]), max(1, len(splits) // 4)
    if top:
        measure_split(top)
    while step:
        found = next(iter(_near(top, step, splits, curve)), None)
        if found is None:
            step //= 2
            continue
        measure_split(found)
        top = _top(curve)
    return Plan(num_workers=num_workers, curve=curve)


def _near(top: int, step: int, splits: range, curve: Mapping[int, HighestRate]) -> list[int]:
    return [one for one in (top - step, top + step) if one > 0 and one in splits and one not in curve]


def _top(curve: Mapping[int, HighestRate]) -> int:
    """The best disaggregated split; among bounds, the one whose run lasted longest, which came closest."""

    def worth(one: int) -> tuple[float, int, int]:
        found = curve[one]
        return found.rate_rps, found.missed.num_met if found.is_bound and found.missed is not None else 0, -one

    return max((one for one in curve if one), key=worth, default=0)


def workers_for(
    rate_rps: float, plan: Plan, sustains: Callable[[int, int], bool], most: int = MAX_WORKERS
) -> tuple[int, int] | None:
    """The fewest workers, as (prefill, decode), that sustain `rate_rps` in simulation; None: not even `most` do.

    `sustains(num_prefill, num_decode)` runs it. The search begins with the plan's best split, scaled to the rate, and
    keeps its proportion, give or take one worker.
    """
    if not 0.0 < rate_rps < math.inf:
        raise ConfigError("rate", rate_rps, "a finite number above 0")
    if not plan.is_attainable:
        return None
    share = plan.advice / plan.num_workers
    found: dict[int, tuple[int, int] | None] = {}

    def split_of(count: int) -> tuple[int, int] | None:
        if count not in found:
            middle = round(share * count)
            tries = [one for one in (middle, middle + 1, middle - 1) if 0 <= one < count] if share else [0]
            found[count] = next(((one, count - one) for one in tries if sustains(one, count - one)), None)
        return found[count]

    per_worker = plan.curve[plan.advice].rate_rps / plan.num_workers
    count = min(max(1, math.ceil(rate_rps / per_worker)), most)
    while split_of(count) is None:
        if count >= most:
            return None
        count = min(count + max(1, count // 16), most)
    while count > 1 and split_of(count - 1) is not None:
        count -= 1
    return split_of(count)


# --- layouts of GPUs ------------------------------------------------------------------------------------------
# They form two families, with and without prefill workers. Each is searched by itself, so that the best of both are
# known: within a family, a layout runs above the best rate so far, and is abandoned if it misses there.

RELAXED: Final = 1.1  # factor by which a target is relaxed, to see whether it is the one that limits
DECISIVE: Final = 0.01  # share of the requests by which one relaxed target must beat the other


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """`found`: the result of every layout that was run."""

    found: Mapping[Layout, HighestRate]

    def best(self, *, colocated: bool) -> Layout | None:
        """Of that family; None: no layout of it was run."""
        family = [one for one in self.found if one.is_colocated is colocated]
        return max(family, key=lambda one: self.found[one].rate_rps, default=None)

    @property
    def top(self) -> Layout:
        return max(self.found, key=lambda one: (self.found[one].rate_rps, one.is_colocated))

    @property
    def is_attainable(self) -> bool:
        return self.found[self.top].rate_rps > 0.0

    @property
    def ratio(self) -> float | None:
        """Goodput of the best disaggregated layout over the best colocated one. None: one of them has none."""
        pair = self.best(colocated=False), self.best(colocated=True)
        rates = [self.found[one].rate_rps for one in pair if one is not None]
        return rates[0] / rates[1] if len(rates) == 2 and min(rates) > 0.0 else None

    @property
    def disaggregates(self) -> bool:
        """Whether the best disaggregated layout gains more than MARGIN, which must pay for its network."""
        if self.top.is_colocated or not self.is_attainable:
            return False
        return self.ratio is None or self.ratio > 1.0 + MARGIN


EvaluateLayouts = Callable[[Sequence[Layout], float], Iterable[HighestRate]]  # (layouts, floor) -> the goodput of each


def compare(layouts: Sequence[Layout], evaluate: EvaluateLayouts) -> LayoutPlan:
    """Layouts that differ only in the number of prefill workers are searched coarse to fine (`plan.sweep`)."""
    found: dict[Layout, HighestRate] = {}
    for is_colocated in (True, False):
        floor = 0.0
        for options in by_degrees([one for one in layouts if one.is_colocated is is_colocated]):

            def run(
                splits: Sequence[int], own: float, options: list[Layout] = options, floor: float = floor
            ) -> list[HighestRate]:
                return list(evaluate([options[one - 1] for one in splits], max(own, floor)))

            plan = sweep(len(options), range(1, len(options) + 1), run)
            found |= {options[one - 1]: result for one, result in plan.curve.items()}
            floor = max([floor, *(one.scale for one in plan.curve.values())])
    return LayoutPlan(found=found)


def question_of(question: Question, layout: Layout, profiles: Mapping[int, Profile]) -> Question:
    """`question` for the workers of this layout."""
    return replace(
        question,
        profile=profiles[layout.prefill_degree],
        decode_profile=profiles[layout.decode_degree],
        num_workers=layout.prefill + layout.decode,
    )


def measure_layout(
    question: Question, layout: Layout, profiles: Mapping[int, Profile], simulate: Simulate, floor: float
) -> HighestRate:
    return measure(question_of(question, layout, profiles), layout.prefill, simulate, floor=floor)


def limiting_target(
    question: Question, layout: Layout, profiles: Mapping[int, Profile], simulate: Simulate, scale: float
) -> str:
    """The target that limits this layout at `scale`, a rate that it misses: "ttft", "tpot" or "both".

    Each target in turn is relaxed by RELAXED; the limiting one is that whose relaxation serves more requests. Missed
    targets cannot be counted instead, because a router that predicts a miss rejects the request before it has a TTFT
    or a TPOT.
    """
    slo = question.slo
    met = []
    for relaxed in (
        Slo(ttft_s=slo.ttft_s * RELAXED, tpot_s=slo.tpot_s),
        Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s * RELAXED),
    ):
        asked = question_of(replace(question, slo=relaxed), layout, profiles)
        probe = asked.run(layout.prefill, simulate)(scale, True)
        met.append(probe.num_met / probe.num_rows)
    if abs(met[0] - met[1]) < DECISIVE:
        return "both"
    return "ttft" if met[0] > met[1] else "tpot"


def verdict(plan: LayoutPlan, limits: Mapping[Layout, str]) -> str:
    """One sentence: whether to disaggregate, how much it gains or loses, and which target limits the loser."""
    colocated, apart = plan.best(colocated=True), plan.best(colocated=False)
    top = plan.top
    if not plan.is_attainable:
        return plan.found[top].verdict
    held = f"{top.text} sustains {plan.found[top].verdict}"
    if plan.disaggregates:
        if colocated is None or plan.ratio is None:
            return f"disaggregate: {held}, and no colocated layout meets these targets at any rate"
        return (
            f"disaggregate: {held}, {plan.ratio:.2f} times the best colocated layout, {colocated.text}, "
            f"which {_limit(limits, colocated)}"
        )
    assert colocated is not None
    held = f"{colocated.text} sustains {plan.found[colocated].verdict}"
    if apart is None:
        return f"do not disaggregate: {held}; there is no disaggregated layout of these GPUs"
    if plan.ratio is None:
        return f"do not disaggregate: {held}, and {apart.text} meets these targets at no rate"
    return (
        f"do not disaggregate: {held}; the best disaggregated layout, {apart.text}, "
        f"sustains {plan.ratio:.2f} times that, and {_limit(limits, apart)} it"
    )


def _limit(limits: Mapping[Layout, str], layout: Layout) -> str:
    name = limits.get(layout, "")
    if not name:
        return "no target limits"
    return "both targets limit" if name == "both" else f"the {name.upper()} target limits"

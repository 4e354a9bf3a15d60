"""Compares layouts of a number of GPUs, with and without prefill workers, by goodput. Pure.

The layouts form two families, colocated and disaggregated. Each is searched by itself, so that the best of both are
known: within a family, a layout runs above the best rate so far, and is abandoned if it misses there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.profile import Profile
from pdserve.core.types import Slo
from simulator.goodput import HighestRate
from simulator.layouts import Layout, by_degrees
from simulator.model import Simulate
from simulator.plan import MARGIN, Question, measure, sweep

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


Evaluate = Callable[[Sequence[Layout], float], Iterable[HighestRate]]  # (layouts, floor) -> the goodput of each


def compare(layouts: Sequence[Layout], evaluate: Evaluate) -> LayoutPlan:
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

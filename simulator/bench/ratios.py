"""Compares two servers that took turns with the same requests. Pure.

Each pair of turns gives one ratio, first server to second. The two turns of a pair are close together in time, so other
load on the machine affects both nearly equally; the spread of the ratios shows the rest of its effect. The result is
their median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.bench.statistics import BenchSummary


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

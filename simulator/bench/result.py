"""The result of a benchmark: the turns of each server at each level of load. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.core.types import Slo
from simulator.bench.load import LoadLevel
from simulator.bench.ratios import Ratio, compare_turns
from simulator.bench.statistics import BenchSummary, BenchTurn, summarise_bench


@dataclass(slots=True, kw_only=True)
class LevelResult:
    """The turns of one server at one level."""

    level: LoadLevel
    server: str
    turns: list[BenchTurn] = field(default_factory=list)
    slo: Slo | None = None

    @property
    def summary(self) -> BenchSummary:
        return summarise_bench(self.turns, self.slo)


@dataclass(slots=True, kw_only=True)
class BenchResult:
    servers: list[tuple[str, str, str]]  # name, address, model
    slo: Slo | None
    levels: list[LevelResult] = field(default_factory=list)
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

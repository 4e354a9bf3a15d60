"""Tables of the comparison, as the page docs/benchmarks/router.md shows them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.harness import table_head, table_row
from benchmarks.peers.client import SERVED, LoadResult
from benchmarks.peers.systems import DYNAMO, OWN, SMG

Load = tuple[str, float]  # the workload, and requests per second
REJECTIONS: Final = ("429", "503")
QUIET_CORES: Final = 0.1  # taken by other processes
CPU_BARS: Final[Mapping[Load, float]] = {("w1", 25.0): 1.3, ("w1", 100.0): 1.0, ("w2", 25.0): 1.0, ("w3", 2.0): 0.8}
TTFT_BARS: Final[Mapping[Load, tuple[float, float]]] = {("w1", 100.0): (2.0, 4.0), ("w1", 200.0): (3.0, 4.0)}
HELD_BAR: Final = 0.95
REJECTED_BAR_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load on one system."""

    system: str
    repetition: int
    workload: str
    rate_rps: float
    seconds: float
    result: LoadResult
    routing_cpu_s: Mapping[str, float]  # of each routing process, for each request that was sent
    engine_cpu_s: Mapping[str, float]  # of the workers and the launcher, too
    foreign_cores: float  # taken by processes that are not of this run

    @property
    def load(self) -> Load:
        return self.workload, self.rate_rps

    @property
    def cpu_s(self) -> float:
        return sum(self.routing_cpu_s.values())

    @property
    def served(self) -> int:
        return self.result.outcomes.get(SERVED, 0)


def row_of(held: Mapping[str, Any]) -> Row:
    """From JSON, where tuples are lists and nan is null."""
    result = dict(held["result"])
    for name in ("ttft_s", "whole_s"):
        result[name] = tuple(math.nan if one is None else one for one in result[name])
    return Row(**{**held, "result": LoadResult(**result)})


def markdown(conditions: Mapping[str, Any], rows: Sequence[Row]) -> str:
    parts = [
        f"{conditions['date']}, pdserve {conditions['version']}, {conditions['cores']} cores shared by all, Python "
        f"{conditions['python']}, {conditions['seconds']:g} s for each load; repetitions follow each other in a cell. "
        + quietness(rows),
        "CPU of the routing processes, ms per request that was sent. A star: not all were served, and the others cost "
        "less.",
        by_load(
            [row for row in rows if row.routing_cpu_s],
            lambda row: f"{row.cpu_s * 1e3:.1f}{'' if is_all_served(row) else '*'}",
        ),
        "Of pdserve, by process:",
        by_load(
            [row for row in rows if row.system in OWN],
            lambda row: ", ".join(f"{name} {one * 1e3:.1f}" for name, one in sorted(row.routing_cpu_s.items())),
        ),
        "TTFT p50 · p95 ms:",
        by_load(rows, lambda row: " · ".join(f"{one * 1e3:.1f}" for one in row.result.ttft_s[:2])),
        "Bars. Ratios are within a repetition, and the median decides:",
        bars(rows),
        "The highest rate of W1:",
        overload(rows),
    ]
    return "\n\n".join(filter(None, parts))


def quietness(rows: Sequence[Row]) -> str:
    most = max((row.foreign_cores for row in rows), default=0.0)
    if most <= QUIET_CORES:
        return "The machine was quiet: other processes took at most 0.1 of a core."
    return (
        f"**The machine was not quiet**: other processes took up to {most:.1f} cores. CPU is inflated, and TTFT more."
    )


def by_load(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """A row for each system, and a column for each load. Repetitions follow each other in a cell."""
    loads, systems = sorted({row.load for row in rows}), list(dict.fromkeys(row.system for row in rows))
    lines = [table_head(["", *(f"{workload.upper()} {rate:g}/s" for workload, rate in loads)])]
    for system in systems:
        cells = [[cell(row) for row in rows if row.system == system and row.load == load] for load in loads]
        lines.append(table_row([system, *(" / ".join(one) or "—" for one in cells)]))
    return "\n".join(lines)


def bars(rows: Sequence[Row]) -> str:
    lines = [table_head(["system", "load", "figure", "bar", "seen", ""])]
    for system in OWN:
        for load, most in CPU_BARS.items():
            seen = ratios(rows, system, DYNAMO, load, lambda row: row.cpu_s)
            lines += _bar(system, load, "CPU over Dynamo's", most, seen, is_served=is_served(rows, system, load))
        for load, allowed in TTFT_BARS.items():
            for index, most in enumerate(allowed):
                seen = ratios(rows, system, SMG, load, lambda row, at=index: row.result.ttft_s[at])  # type: ignore[misc]
                lines += _bar(
                    system,
                    load,
                    f"TTFT p{(50, 95)[index]} over smg's",
                    most,
                    seen,
                    is_served=is_served(rows, system, load),
                )
    return "\n".join(lines)


def ratios(rows: Sequence[Row], system: str, peer: str, load: Load, figure: Callable[[Row], float]) -> list[float]:
    """Of each repetition that has both."""
    found = {(row.system, row.repetition): figure(row) for row in rows if row.load == load}
    numbers = sorted(repetition for name, repetition in found if name == system)
    pairs = [(found[system, one], found[peer, one]) for one in numbers if found.get((peer, one))]
    return [ours / theirs for ours, theirs in pairs]


def is_all_served(row: Row) -> bool:
    return row.served == row.result.sent


def is_served(rows: Sequence[Row], system: str, load: Load) -> bool:
    return all(is_all_served(row) for row in rows if row.system == system and row.load == load)


def _bar(system: str, load: Load, figure: str, most: float, seen: Sequence[float], *, is_served: bool) -> list[str]:
    """A figure over fewer requests than were sent meets no bar."""
    if not seen:
        return []
    verdict = "met" if statistics.median(seen) <= most else "**missed**"
    verdict = verdict if is_served else "**not all served**"
    at = f"{load[0].upper()} {load[1]:g}/s"
    return [table_row([system, at, figure, f"{most:g}", " / ".join(f"{one:.2f}" for one in seen), verdict])]


def overload(rows: Sequence[Row]) -> str:
    """Each system at the highest rate of W1, beside the highest rate that it held without a rejection."""
    of_w1 = [row for row in rows if row.workload == "w1"]
    top_rps = max((row.rate_rps for row in of_w1), default=0.0)
    columns = ["system", "sent/s", "outcomes", "median of a rejection ms", "served/s", "held before/s", ""]
    lines = [table_head(columns)]
    for row in of_w1:
        if row.rate_rps != top_rps:
            continue
        held_rps = held(of_w1, row.system, row.repetition)
        served_rps = row.served / row.seconds
        outcomes = ", ".join(f"{kind} {count}" for kind, count in sorted(row.result.outcomes.items()))
        failed = row.result.sent - row.served - sum(row.result.outcomes.get(kind, 0) for kind in REJECTIONS)
        is_met = not failed and served_rps >= HELD_BAR * held_rps and row.result.rejected_s <= REJECTED_BAR_S
        verdict = ("met" if is_met else "**missed**") if row.system in OWN else ""
        sent_rps, rejected_ms = row.result.sent / row.seconds, row.result.rejected_s * 1e3
        figures = (f"{rejected_ms:.1f}" if rejected_ms else "—", f"{served_rps:.0f}", f"{held_rps:.0f}")
        lines.append(table_row([row.system, f"{sent_rps:.0f}", outcomes, *figures, verdict]))
    return "\n".join(lines)


def held(rows: Sequence[Row], system: str, repetition: int) -> float:
    """The highest rate, in requests per second, at which all requests were served; 0 if there is none."""
    mine = [row for row in rows if row.system == system and row.repetition == repetition]
    return max((row.served / row.seconds for row in mine if is_all_served(row)), default=0.0)

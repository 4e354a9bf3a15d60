"""Charts of the times of requests, simulated or measured: attainment frontiers, predictions against actual times, and
the figure of a plan, whose layouts are compared by them. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.results import nearest_rank
from pdserve.core.types import Slo
from pdserve.plot.charts import NamedBar, Rule, Series, bar_chart, bar_legend, line_chart
from pdserve.plot.drawing import CONTENT, HALF, Axis, Drawing, Figure, Panel, swatch, thinned
from simulator.search.goodput import TARGET, HighestRate

# --- attainment frontier --------------------------------------------------------------------------------------
# Which pairs of targets a set of requests met. A pair of a TTFT and a TPOT target is attained if at least `share` of
# all requests met both. Requests without an answer are misses of every pair.


def frontier(times: Iterable[tuple[float, float]], total: int, share: float) -> list[tuple[float, float]]:
    """The tightest attained pairs (TTFT, TPOT), TTFT ascending and TPOT descending; empty if too few were answered.
    `times`: TTFT and TPOT of each answered request, of `total` requests."""
    needed = max(1, math.ceil(share * total - 1e-9))
    kept: list[float] = []  # the `needed` lowest TPOTs so far, negated
    found: list[tuple[float, float]] = []
    for ttft_s, tpot_s in sorted(times):
        if len(kept) < needed:
            heapq.heappush(kept, -tpot_s)
        else:
            heapq.heappushpop(kept, -tpot_s)
        if len(kept) == needed and (not found or -kept[0] < found[-1][1]):
            if found and found[-1][0] == ttft_s:
                found.pop()
            found.append((ttft_s, -kept[0]))
    return found


def staircase(corners: list[tuple[float, float]], most_x: float, most_y: float) -> list[tuple[float, float]]:
    """The points of the line between attained and missed pairs, up to the ends of the axes."""
    if not corners:
        return []
    points = [(corners[0][0], most_y)]
    for ttft_s, tpot_s in corners:
        points += [(ttft_s, points[-1][1]), (ttft_s, tpot_s)]
    return [*points, (most_x, points[-1][1])]


# --- panels ---------------------------------------------------------------------------------------------------

_LEVELS: Final = (0.5, TARGET, 0.99)  # of a single run
_MOST_DOTS: Final = 300  # of one series
_WIDTH: Final = 976
_SPAN: Final = 1.6  # how far the axes go beyond the data


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequests:
    """The requests of one policy or server. `times`: TTFT and TPOT of the answered ones of `total`.

    `ttft` and `tpot`: pairs (actual, predicted), where there is a prediction.
    """

    name: str
    colour: int
    total: int
    times: Sequence[tuple[float, float]]
    ttft: Sequence[tuple[float, float]] = ()
    tpot: Sequence[tuple[float, float]] = ()


def frontier_panel(groups: Sequence[TimedRequests], slo: Slo | None, where: str) -> Panel | None:
    """Several groups have a line each at TARGET; a single one has a line for each of _LEVELS. None: nothing was
    answered by enough."""
    lines = [(one.name, one.colour, frontier(one.times, one.total, TARGET)) for one in groups]
    if len(groups) == 1:
        [only] = groups
        lines = [
            (f"{share:.0%} of the requests", number, frontier(only.times, only.total, share))
            for number, share in enumerate(_LEVELS)
        ]
    missing = [name for name, _, corners in lines if not corners]
    shown = [(name, number, corners) for name, number, corners in lines if corners]
    if not shown:
        return None
    x, y = (_axis(shown, slo, part) for part in (0, 1))
    series = [
        Series(name=name, points=thinned(staircase(corners, x.high, y.high)), colour=number)
        for name, number, corners in shown
    ]
    rules = []
    if slo is not None:
        rules = [Rule(at=slo.tpot_s, label="TPOT target"), Rule(at=slo.ttft_s, label="TTFT target", is_vertical=True)]
    chart = line_chart(series, x, y, title=f"attainment frontier {where}", rules=rules, width=_WIDTH, height=340)
    who = f"{TARGET:.0%} of all requests" if len(groups) > 1 else "that share of all requests"
    note = (
        f"Each pair of targets above and to the right of a line was met by {who}. The answers are those of this run, "
        "whose scheduler worked for the run's own targets."
    )
    if missing:
        note += f" No line: {', '.join(missing)}, because too few requests were answered."
    names = tuple((name, swatch(number)) for name, number, _ in shown)
    return Panel(title=f"Attainment frontier {where}", drawings=(chart,), note=note, legend=names)


def _axis(shown: Sequence[tuple[str, int, list[tuple[float, float]]]], slo: Slo | None, part: int) -> Axis:
    values = [corner[part] for _, _, corners in shown for corner in corners if corner[part] > 0.0]
    if slo is not None:
        values.append((slo.ttft_s, slo.tpot_s)[part])
    values = [one for one in values if math.isfinite(one)] or [1.0]
    label = ("TTFT target", "TPOT target")[part]
    return Axis(low=min(values) / _SPAN, high=max(values) * _SPAN, label=f"{label}, logarithmic", is_log=True, unit="s")


def prediction_panel(groups: Sequence[TimedRequests], where: str) -> Panel | None:
    """None: there are no predictions."""
    charts: list[Drawing] = []
    notes = []
    for name, pairs_of in (("TTFT", [one.ttft for one in groups]), ("TPOT", [one.tpot for one in groups])):
        known = [[pair for pair in pairs if min(pair) > 0.0 and math.isfinite(max(pair))] for pairs in pairs_of]
        if not any(known):
            continue
        values = [value for pairs in known for pair in pairs for value in pair]
        axis = {"low": min(values) / 1.2, "high": max(values) * 1.2, "is_log": True, "unit": "s"}
        series = [
            Series(name=one.name, points=thinned(pairs, _MOST_DOTS), colour=one.colour, is_scattered=True)
            for one, pairs in zip(groups, known, strict=True)
        ]
        chart = line_chart(
            series,
            Axis(**axis, label=f"actual {name}, logarithmic"),  # type: ignore[arg-type]
            Axis(**axis, label=f"predicted {name}"),  # type: ignore[arg-type]
            title=f"predicted against actual {name} {where}",
            width=HALF,
            height=340,
            has_diagonal=True,
        )
        charts.append(chart)
        for one, pairs in zip(groups, known, strict=True):
            if pairs:
                notes.append(f"{one.name} {name} {_error(pairs):.1%}")
    if not charts:
        return None
    return Panel(
        title=f"Predicted against actual {where}",
        drawings=charts,
        note="A request on the diagonal took as long as predicted when it was placed; below it, longer. Median error: "
        f"{', '.join(notes)}.",
        legend=tuple((one.name, swatch(one.colour, has_line=False)) for one in groups),
    )


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    return nearest_rank(sorted(abs(predicted - actual) / actual for actual, predicted in pairs), 0.5)


# --- figure of a plan -----------------------------------------------------------------------------------------
# The goodput of each layout, with the rates that were tried, and attainment frontiers.

MAX_LAYOUTS: Final = 60
DISAGGREGATED, COLOCATED = 0, 1  # colours
_FAR: Final = 1.4  # tried rates beyond this multiple of the goodput are not shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    name: str
    found: HighestRate
    is_colocated: bool


def plan_figure(layouts: Sequence[PlannedLayout], slo: Slo, *, title: str, caption: Sequence[str]) -> Figure:
    """`layouts` in the order in which they are shown. `caption` names the profile, the machine, the commit and the
    seed."""
    panels = [_rates(layouts), frontier_panel(_best(layouts), slo, "at the highest rate that was sustained")]
    return Figure(title=title, caption=caption, panels=[one for one in panels if one is not None])


def _rates(layouts: Sequence[PlannedLayout]) -> Panel:
    shown = layouts
    if len(layouts) > MAX_LAYOUTS:
        kept = {id(one) for one in sorted(layouts, key=lambda one: -one.found.rate_rps)[:MAX_LAYOUTS]}
        shown = [one for one in layouts if id(one) in kept]
    bars = [_bar(one) for one in shown]
    most = max((value for one in bars for value in (one.value, *one.held, *one.missed)), default=0.0)
    axis = Axis(low=0.0, high=1.05 * most or 1.0, label="requests per second")
    chart = bar_chart(bars, axis, title="goodput of each layout", width=CONTENT)
    note = (
        "The goodput of a layout is the highest rate of arrival at which 90% of all requests met both targets. A "
        "search that ended as soon as it could not beat the best so far gives only an upper bound."
    )
    if len(shown) < len(layouts):
        note += f" The best {len(shown)} of {len(layouts)} layouts."
    families = (("with prefill workers", DISAGGREGATED), ("without", COLOCATED))
    return Panel(title="Goodput", drawings=(chart,), note=note, legend=bar_legend(families))


def _bar(one: PlannedLayout) -> NamedBar:
    found = one.found
    is_bound = found.is_bound and found.missed is not None
    value = found.missed.rate_rps if is_bound and found.missed is not None else found.rate_rps
    return NamedBar(
        name=one.name,
        value=value,
        text=found.rate_text,
        is_bound=is_bound,
        colour=COLOCATED if one.is_colocated else DISAGGREGATED,
        held=[probe.rate_rps for probe in found.probes if probe.has_met],
        missed=[probe.rate_rps for probe in found.probes if not probe.has_met and probe.rate_rps <= _FAR * value],
    )


def _best(layouts: Sequence[PlannedLayout]) -> list[TimedRequests]:
    """The best layout of each family, at its goodput."""
    groups = []
    for is_colocated in (False, True):
        family = [one for one in layouts if one.is_colocated is is_colocated and one.found.held is not None]
        best = max(family, key=lambda one: one.found.rate_rps, default=None)
        if best is not None and best.found.held is not None:
            held = best.found.held
            name = f"{best.name} at {held.rate_rps:.3g} requests/s"
            colour = COLOCATED if is_colocated else DISAGGREGATED
            groups.append(TimedRequests(name=name, colour=colour, total=held.num_rows, times=held.times_s))
    return groups

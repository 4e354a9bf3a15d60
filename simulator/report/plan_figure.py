"""The figure of a plan: the goodput of each layout, with the rates that were tried, and attainment frontiers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.types import Slo
from pdserve.plot.charts import NamedBar, bar_chart, bar_legend
from pdserve.plot.drawing import Axis
from pdserve.plot.figure import CONTENT, Figure, Panel
from simulator.report.time_charts import TimedRequests, frontier_panel
from simulator.search.goodput import HighestRate

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

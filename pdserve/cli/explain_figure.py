"""The figure of an explanation: the compared placements by predicted TTFT and TPOT, the targets, and what then
happened. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pdserve.client.results import ExplainedCandidate, Explanation
from pdserve.plot.axis import Axis
from pdserve.plot.figure import CONTENT, Figure, Panel
from pdserve.plot.line_chart import Rule, Series, line_chart
from pdserve.plot.marks import swatch

_SPAN: Final = 1.5  # how far the axes go beyond the data
#: Series with their place in the palette, which also decides the marker.
_FEASIBLE, _CHOSEN, _INFEASIBLE, _ACTUAL = 2, 0, 7, 1


def explain_figure(found: Sequence[Explanation], *, origin: str) -> Figure:
    """`found`: the explanation of each router that knows the request, at least one."""
    caption = [f"{len(one.candidates)} placements were compared: {one.reason}" for one in found] + [origin]
    title = f"Placement of {found[0].request_id}"
    return Figure(title=title, caption=caption, panels=[_placements(one) for one in found])


def _placements(one: Explanation) -> Panel:
    chosen = one.chosen
    others = [candidate for candidate in one.candidates if candidate is not chosen]
    series = [
        _series("meets both targets", _FEASIBLE, one, [each for each in others if each.is_feasible]),
        _series("misses a target", _INFEASIBLE, one, [each for each in others if not each.is_feasible], is_hollow=True),
        _series("chosen, as predicted", _CHOSEN, one, [] if chosen is None else [chosen]),
    ]
    if one.actual_ttft_s is not None and one.actual_tpot_s is not None:
        actual = [(one.actual_ttft_s, one.actual_tpot_s)]
        series.append(Series(name="what then happened", points=actual, colour=_ACTUAL, is_marked=True, has_line=False))
    series = [each for each in series if each.points]
    points = [point for each in series for point in each.points]
    x = _axis("TTFT from arrival", [ttft_s for ttft_s, _ in points], one.slo_ttft_s)
    y = _axis("TPOT", [tpot_s for _, tpot_s in points], one.slo_tpot_s)
    rules = [
        Rule(at=one.slo_ttft_s, label="TTFT target", is_vertical=True),
        Rule(at=one.slo_tpot_s, label="TPOT target"),
    ]
    chart = line_chart(
        series, x, y, title=f"placements of {one.request_id} by TTFT and TPOT", rules=rules, width=CONTENT, height=360
    )
    return Panel(
        title=f"Predicted and actual times, {one.router_id}" if one.router_id else "Predicted and actual times",
        drawings=(chart,),
        note=_note(one),
        legend=tuple((each.name, swatch(each.colour, has_line=False, is_hollow=each.is_hollow)) for each in series),
    )


def _series(
    name: str, colour: int, one: Explanation, candidates: Sequence[ExplainedCandidate], *, is_hollow: bool = False
) -> Series:
    """The predictions count from arrival, like the actual times. Infinite ones have no place."""
    points = [(one.waited_s + each.predicted_ttft_s, each.predicted_tpot_s) for each in candidates]
    return Series(
        name=name,
        points=[point for point in points if math.isfinite(sum(point))],
        colour=colour,
        is_marked=True,
        has_line=False,
        is_hollow=is_hollow,
    )


def _axis(name: str, values: Sequence[float], target_s: float) -> Axis:
    """Long targets of short requests would leave no room for the placements, so the axis is logarithmic."""
    known = [one for one in (*values, target_s) if one > 0.0 and math.isfinite(one)] or [1.0]
    return Axis(low=min(known) / _SPAN, high=max(known) * _SPAN, label=f"{name}, logarithmic", is_log=True, unit="s")


def _note(one: Explanation) -> str:
    words = [f"{one.decision}, {one.outcome or one.stage}; {one.prompt_tokens} prompt tokens."]
    if one.chosen is not None:
        prefill = one.chosen.prefill_worker or one.chosen.decode_worker
        words.append(f"Prefill on {prefill}, decode on {one.chosen.decode_worker}.")
    for name, predicted_s, actual_s in (
        ("TTFT", one.predicted_ttft_s, one.actual_ttft_s),
        ("TPOT", one.predicted_tpot_s, one.actual_tpot_s),
    ):
        if predicted_s is not None and actual_s:
            words.append(
                f"{name}: predicted {1000 * predicted_s:.1f} ms, actual {1000 * actual_s:.1f} ms "
                f"({(predicted_s - actual_s) / actual_s:+.0%})."
            )
    return " ".join(words)

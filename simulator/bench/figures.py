"""The figure of a benchmark: the panels of `pdserve bench --plot`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdserve.core.types import Slo
from pdserve.plot.drawing import Drawing
from pdserve.plot.figure import Figure, Panel
from pdserve.plot.gantt import gantt_legend
from pdserve.plot.line_chart import Rule
from pdserve.plot.marks import line_legend
from simulator.bench.answer import BenchOutcome
from simulator.bench.charts import (
    KINDS,
    distribution_chart,
    load_chart,
    ratio_chart,
    timeline_chart,
    workers_chart,
)
from simulator.bench.load import LoadLevel
from simulator.bench.result import BenchResult, LevelResult
from simulator.bench.statistics import BenchSummary
from simulator.bench.text import NO_TARGET_S, comparison_title, level_named, slo_text
from simulator.tables import count
from simulator.time_charts import TimedRequests, frontier_panel, prediction_panel

GOOD_SHARE: Final = 0.9  # attainment at which a rate counts as served, as in the simulator


def bench_figure(result: BenchResult, *, caption: Sequence[str]) -> Figure:
    """`caption` names the command, the time, the machine and the commit."""
    title = "pdserve bench: " + ", ".join(name for name, _, _ in result.servers)
    return Figure(title=title, caption=[*caption, *caption_lines(result)], panels=panels(result))


def caption_lines(result: BenchResult) -> list[str]:
    lines = [f"{name}: {model} at {address}" for name, address, model in result.servers]
    return [*lines, f"Targets: {slo_text(result)}."] if result.slo is not None else lines


def panels(result: BenchResult) -> list[Panel]:
    if not result.levels:
        return []
    colour_of = {name: number for number, (name, _, _) in enumerate(result.servers)}
    focus = focus_level(result)
    found = [_by_load(result, colour_of)] if len(result.shown_levels) > 1 else []
    found += _comparisons(result)
    if focus is not None:
        found += _times(result, focus, colour_of)
        shown = level_named(result.levels, focus)
        groups = [_timed(one, colour_of[one.server]) for one in shown]
        where = f"at {focus.label}"
        optional = [frontier_panel(groups, _finite(result.slo), where), prediction_panel(groups, where)]
        found += [one for one in optional if one is not None]
        for number, one in enumerate(shown):
            found += _timelines(one, is_folded=number > 0)
    return found


def focus_level(result: BenchResult) -> LoadLevel | None:
    """The level whose distributions and timelines are shown: the highest at which a server still served 90 % within
    its targets, or the last one."""
    levels = result.shown_levels
    good = [one.level for one in result.levels if (one.summary.attainment or 0.0) >= GOOD_SHARE]
    return good[-1] if good else levels[-1] if levels else None


def _by_load(result: BenchResult, colour_of: dict[str, int]) -> Panel:
    """Levels of a sweep; a trace's own rate is one level and has no curve."""
    levels = result.levels

    def chart(
        value: Callable[[BenchSummary], float], title: str, unit: str = "", rules: Sequence[Rule] = ()
    ) -> Drawing:
        return load_chart(levels, colour_of, value, title, unit=unit, rules=rules)

    charts = [
        chart(lambda one: one.rate(one.total_output_tokens), "output tokens per second"),
        chart(lambda one: one.ttft_s.median, "median TTFT", "s"),
        chart(lambda one: one.tpot_s.median, "median TPOT", "s"),
    ]
    if result.slo is None:
        charts.insert(0, chart(lambda one: one.rate(one.completed), "requests completed per second"))
    else:
        rule = Rule(at=GOOD_SHARE, label=f"{GOOD_SHARE:.0%}")
        charts.insert(0, chart(lambda one: one.rate(one.met or 0), "goodput, requests per second"))
        charts.insert(1, chart(lambda one: one.attainment or 0.0, "met the targets", "%", [rule]))
    return Panel(title="By load", drawings=charts, legend=line_legend(colour_of))


def _comparisons(result: BenchResult) -> list[Panel]:
    found = []
    for level in result.shown_levels:
        ratios = result.ratios(level)
        chart = ratio_chart(ratios, f"ratios at {level.label}") if ratios else None
        if chart is not None:
            note = (
                f"{comparison_title(result)}. The servers took turns with the same requests. Each dot is one of "
                f"{count(len(ratios[0].ratios), 'pair')} of turns, and the bar is their median."
            )
            found.append(Panel(title=f"Comparison at {level.label}", drawings=(chart,), note=note))
    return found


def _times(result: BenchResult, focus: LoadLevel, colour_of: dict[str, int]) -> list[Panel]:
    """Distributions of each server at one level, or of each level of a single server."""
    if len(result.servers) > 1:
        chosen = [(one.server, colour_of[one.server], one) for one in level_named(result.levels, focus)]
        title = f"Times at {focus.label}"
    else:
        chosen = [(one.level.label, number, one) for number, one in enumerate(result.levels)]
        title = "Times"
    ttft = [(name, colour, _ttfts(one), max(one.summary.requests, 1)) for name, colour, one in chosen]
    itl = [(name, colour, gaps, max(len(gaps), 1)) for name, colour, one in chosen if (gaps := _gaps(one)) is not None]
    target_s = result.slo.ttft_s if result.slo is not None and result.slo.ttft_s < NO_TARGET_S else None
    charts = (
        distribution_chart(ttft, "time to first token", target_s=target_s),
        distribution_chart(itl, "time between two parts of an answer (ITL)"),
    )
    drawn = [one for one in charts if one is not None]
    if not drawn:
        return []
    note = "TTFT is a share of all requests: a curve that ends below 100% belongs to requests without a first token."
    names = line_legend({name: colour for name, colour, _ in chosen})
    return [Panel(title=title, drawings=drawn, note=note, legend=names)]


def _ttfts(one: LevelResult) -> Sequence[float]:
    return [answer.chunk_s[0] - answer.sent_s for turn in one.turns for answer in turn.answers if answer.chunk_s]


def _gaps(one: LevelResult) -> Sequence[float]:
    return [gap for turn in one.turns for answer in turn.answers for gap in answer.itl_s]


def _timelines(one: LevelResult, *, is_folded: bool) -> list[Panel]:
    answers, about = one.turns[0].answers, f"{one.server} at {one.level.label}, first turn"
    charts = (
        ("Requests over time", KINDS, timeline_chart(answers, f"requests of {one.server} over time")),
        ("Requests on the workers", KINDS[:2], workers_chart(answers, f"requests on each worker of {one.server}")),
    )
    return [
        Panel(title=f"{title}: {about}", drawings=(chart,), legend=gantt_legend(kinds), is_folded=is_folded)
        for title, kinds, chart in charts
        if chart is not None
    ]


def _timed(one: LevelResult, colour: int) -> TimedRequests:
    answers = [answer for turn in one.turns for answer in turn.answers]
    done = [answer for answer in answers if answer.outcome is BenchOutcome.COMPLETED]
    return TimedRequests(
        name=one.server,
        colour=colour,
        total=sum(answer.outcome is not BenchOutcome.INTERRUPTED for answer in answers),
        times=[(answer.ttft_s, answer.tpot_s or 0.0) for answer in done],
        ttft=_pairs((answer.server_ttft_s, answer.predicted_ttft_s) for answer in done),
        tpot=_pairs((answer.server_tpot_s, answer.predicted_tpot_s) for answer in done if answer.output_tokens > 1),
    )


def _pairs(found: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(actual, predicted) for actual, predicted in found if actual is not None and predicted is not None]


def _finite(slo: Slo | None) -> Slo | None:
    """None unless both targets were set."""
    return slo if slo is not None and max(slo.ttft_s, slo.tpot_s) < NO_TARGET_S else None

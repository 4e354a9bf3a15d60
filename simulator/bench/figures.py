"""The figure of a benchmark, for `pdserve bench --plot`: its charts, its panels, and its page. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pdserve.core.types import Slo
from pdserve.plot.charts import Bar, BarKind, GanttRow, Rule, Series, gantt, gantt_legend, line_chart, place_in_lanes
from pdserve.plot.drawing import (
    CONTENT,
    HALF,
    WIDE,
    Axis,
    Drawing,
    Figure,
    Panel,
    document,
    key,
    line_at,
    line_legend,
    safe,
    section,
    table,
    text_at,
    thinned,
    tiles,
)
from pdserve.plot.drawing import caption as caption_html
from pdserve.plot.drawing import colour as shade_of
from simulator.bench.load import LoadLevel
from simulator.bench.server import BenchAnswer, BenchOutcome
from simulator.bench.statistics import BenchResult, BenchSummary, LevelResult, Ratio
from simulator.bench.text import (
    NO_TARGET_S,
    bench_row,
    better_text,
    comparison_title,
    level_named,
    notes,
    ratio_text,
    slo_text,
    time_text,
)
from simulator.report.comparison import count
from simulator.report.time_charts import TimedRequests, frontier_panel, prediction_panel

# --- charts ---------------------------------------------------------------------------------------------------

_MOST_SPANS: Final = 240  # of the timeline; more would not be visible
_SPAN_HEIGHT: Final = 6
_MOST_PLACED: Final = 80  # requests of a timeline of workers
_MOST_WORKERS: Final = 24
_MOST_LANES: Final = 14  # of one worker
_RATIO_ROW: Final = 30


def load_chart(
    levels: Sequence[LevelResult],
    colour_of: Mapping[str, int],
    value: Callable[[BenchSummary], float],
    title: str,
    *,
    unit: str = "",
    rules: Sequence[Rule] = (),
) -> Drawing:
    """One figure of each server over the load, which is arrivals per second or concurrent requests."""
    is_open = levels[0].level.is_open
    series = []
    for name, colour in colour_of.items():
        points = [(load_of(one), value(one.summary)) for one in levels if one.server == name]
        known = sorted(point for point in points if math.isfinite(point[1]))
        series.append(Series(name=name, points=known, colour=colour, is_marked=True))
    highest = max((y for one in series for _, y in one.points), default=1.0)
    if unit == "%":
        y_axis = Axis(low=0.0, high=1.0, unit=unit, label=title)
    else:
        y_axis = Axis(low=0.0, high=1.1 * highest or 1.0, unit=unit, label=title)
    x_label = "requests per second that arrived" if is_open else "requests at once"
    most = max(map(load_of, levels))
    x_axis = Axis(low=0.0, high=1.05 * most or 1.0, label=x_label)
    return line_chart(series, x_axis, y_axis, title=f"{title} by load", rules=rules, width=HALF, height=240)


def load_of(one: LevelResult) -> float:
    """Concurrent requests, or arrivals per second. For a trace at its own rate, the measured rate."""
    if one.level.concurrency is not None:
        return float(one.level.concurrency)
    if one.level.rate_rps is not None:
        return one.level.rate_rps
    return one.summary.rate(one.summary.requests)


def distribution_chart(
    shown: Sequence[tuple[str, int, Sequence[float], int]], title: str, *, target_s: float | None = None
) -> Drawing | None:
    """The share of requests whose time was at most x. `shown`: name, colour, times in seconds, number of requests. A
    curve ends below 100% if requests failed."""
    every = [one for _, _, values, _ in shown for one in values if one > 0.0]
    if target_s is not None:
        every.append(target_s)
    if not every:
        return None
    series = []
    for name, colour, values, total in shown:
        ordered = sorted(values)
        points = [(one, (rank + 1) / total) for rank, one in enumerate(ordered)]
        series.append(Series(name=name, points=thinned(points), colour=colour, is_stepped=True))
    low, high = max(min(every), max(every) / 1e4), max(every)
    rules = [] if target_s is None else [Rule(at=target_s, label="target", is_vertical=True)]
    return line_chart(
        series,
        Axis(low=low * 0.9, high=high * 1.1, label=f"{title}, logarithmic", is_log=True, unit="s"),
        Axis(low=0.0, high=1.0, label="share", unit="%"),
        title=f"distribution of {title}",
        rules=rules,
        width=HALF,
        height=260,
    )


WAIT: Final = BarKind(name="until the first token", colour=3, height=0.4)
TOKENS: Final = BarKind(name="tokens", colour=2)
FAILED: Final = BarKind(name="rejected, failed or interrupted", colour=7, is_hollow=True)
KINDS: Final = (WAIT, TOKENS, FAILED)


def timeline_chart(answers: Sequence[BenchAnswer], title: str) -> Drawing | None:
    """A bar for each request in order of sending: the wait for the first token, then the tokens."""
    chosen = sorted(answers, key=lambda one: one.sent_s)
    size = math.ceil(len(chosen) / _MOST_SPANS) if chosen else 1
    chosen = chosen[::size]
    if not chosen:
        return None
    bars = [
        Bar(begin=begin_s, end=end_s, kind=kind, lane=lane, about=_about(one))
        for lane, one in enumerate(chosen)
        for begin_s, end_s, kind in _spans(one)
    ]
    x_axis = Axis(low=0.0, high=max(one.ended_s for one in chosen) or 1.0, label="seconds since the turn began")
    return gantt([GanttRow(name="", bars=bars)], x_axis, title=title, width=CONTENT, lane_height=_SPAN_HEIGHT)


def workers_chart(answers: Sequence[BenchAnswer], title: str) -> Drawing | None:
    """The requests on each worker. None: the server does not report the placement; only a router does."""
    chosen = sorted((one for one in answers if one.decode_worker), key=lambda one: one.sent_s)[:_MOST_PLACED]
    if not chosen:
        return None
    spans: dict[str, list[tuple[float, float, BarKind, str]]] = {}
    for one in chosen:
        wait_s, first_s, last_s = one.sent_s, one.chunk_s[0], one.chunk_s[-1]
        spans.setdefault(one.prefill_worker or one.decode_worker, []).append((wait_s, first_s, WAIT, _about(one)))
        spans.setdefault(one.decode_worker, []).append((first_s, last_s, TOKENS, _about(one)))
    rows = []
    for worker, held in sorted(spans.items())[:_MOST_WORKERS]:
        ordered = sorted(held, key=lambda one: one[:2])
        lanes = place_in_lanes([one[:2] for one in ordered], _MOST_LANES)
        bars = [
            Bar(begin=begin, end=end, kind=kind, lane=lane, about=about)
            for (begin, end, kind, about), lane in zip(ordered, lanes, strict=True)
            if lane is not None
        ]
        rows.append(GanttRow(name=worker, bars=bars))
    begin_s = chosen[0].sent_s
    x_axis = Axis(low=begin_s, high=max(one.ended_s for one in chosen), label="seconds since the turn began")
    return gantt(rows, x_axis, title=title, width=CONTENT)


def _spans(one: BenchAnswer) -> list[tuple[float, float, BarKind]]:
    if one.outcome is not BenchOutcome.COMPLETED:
        return [(one.sent_s, one.ended_s, FAILED)]
    return [(one.sent_s, one.chunk_s[0], WAIT), (one.chunk_s[0], one.chunk_s[-1], TOKENS)]


def _about(one: BenchAnswer) -> str:
    if one.outcome is not BenchOutcome.COMPLETED:
        return f"request {one.number}: {one.outcome.value} {one.error}".strip()
    return (
        f"request {one.number}: {one.prompt_tokens} prompt tokens, TTFT {1000 * one.ttft_s:.0f} ms, "
        f"{one.output_tokens} tokens in {one.e2el_s:.2f} s"
    )


def ratio_chart(ratios: Sequence[Ratio], title: str) -> Drawing | None:
    """A row for each metric: the ratios of all pairs of turns as dots, and their median as a bar."""
    every = [value for one in ratios for value in one.ratios if value > 0.0]
    if not every:
        return None
    far = max(max(every), 1.0 / min(every), 1.1) * 1.05
    axis = Axis(low=1.0 / far, high=far, is_log=True)
    left, right, top = 130, WIDE - 20, 6
    bottom = top + _RATIO_ROW * len(ratios)

    def at_x(value: float) -> float:
        return round(left + (right - left) * axis.place(value), 1)

    parts = []
    for tick in _ratio_ticks(far):
        parts.append(line_at("grid", at_x(tick), top, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 17, f"{tick:.3g}", "tick", "middle"))
    parts.append(line_at("rule", at_x(1.0), top, at_x(1.0), bottom))
    for row, one in enumerate(ratios):
        y = top + _RATIO_ROW * row + _RATIO_ROW / 2
        shade = shade_of(row)
        parts.append(text_at(left - 10, y + 4, one.metric.label, "label", "end"))
        parts.append(
            f'<line x1="{at_x(one.least)}" x2="{at_x(one.most)}" y1="{y}" y2="{y}" stroke="{shade}" stroke-width="2"/>'
        )
        for value in one.ratios:
            shown = f"<title>{safe(f'{one.metric.label}: {value:.3f}')}</title>"
            parts.append(f'<circle class="dot" cx="{at_x(value)}" cy="{y}" r="4" fill="{shade}">{shown}</circle>')
        x = at_x(one.median)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{y - 9}" y2="{y + 9}" stroke="{shade}" stroke-width="3"/>')
    parts.append(text_at((left + right) / 2, bottom + 36, "ratio of the first server to the second", "label", "middle"))
    return Drawing(width=WIDE, height=bottom + 44, title=title, body="".join(parts))


def _ratio_ticks(far: float) -> list[float]:
    steps = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
    above = [one for one in steps if one <= far]
    while len(above) > 5:
        above = [above[0], *above[2::2]]
    return sorted({*above, *(1.0 / one for one in above)})


# --- panels ---------------------------------------------------------------------------------------------------

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


# --- page -----------------------------------------------------------------------------------------------------
# One self-contained HTML document.

_LEFT = ("load", "server", "metric", "")


def bench_page(result: BenchResult, *, command: str, caption: Sequence[str]) -> str:
    """`caption` names the time, the machine and the commit."""
    colour_of = {name: number for number, (name, _, _) in enumerate(result.servers)}
    parts = [f"<h1>pdserve bench</h1><pre>{safe(command)}</pre>", caption_html([*caption, *caption_lines(result)])]
    if result.levels:
        parts += [_tiles(result), _rows(result, colour_of), _comparison(result), *map(section, panels(result))]
    return document("pdserve bench: " + ", ".join(name for name, _, _ in result.servers), parts)


def _tiles(result: BenchResult) -> str:
    """For a single row; the table shows more."""
    if len(result.levels) > 1:
        return ""
    one = result.levels[0].summary
    figures = [
        (f"{one.rate(one.completed):.3g}/s", "requests completed"),
        (f"{one.rate(one.total_output_tokens):.4g}/s", "output tokens"),
        (time_text(one.ttft_s.median), "median time to first token"),
        (time_text(one.tpot_s.median), "median time per output token"),
    ]
    if one.attainment is not None:
        figures.append((f"{one.attainment:.1%}", "met the targets"))
    return tiles(figures)


def _rows(result: BenchResult, colour_of: dict[str, int]) -> str:
    has_slo = result.slo is not None
    slo = ("attained", "goodput/s") if has_slo else ()
    times = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99")
    head = ("load", "server", "ok", "rejected", "failed", "req/s", "tokens/s", *times, *slo)
    rows = []
    for one in result.levels:
        load, server, *cells = bench_row(one, has_slo=has_slo)
        rows.append([safe(load), key(colour_of[server]) + safe(server), *map(safe, cells)])
    said = "\n".join(line for line in notes(result) if line)
    return f"<section><h2>Results</h2>{table(head, rows, left=_LEFT)}<pre>{safe(said)}</pre></section>"


def _comparison(result: BenchResult) -> str:
    shown = []
    for level in result.shown_levels:
        ratios = result.ratios(level)
        if not ratios:
            continue
        rows = [[safe(one.metric.label), safe(ratio_text(one)), safe(better_text(one))] for one in ratios]
        listed = table(("metric", "ratio", ""), rows, left=_LEFT)
        shown.append(f"<h3>{safe(level.label)}, {count(len(ratios[0].ratios), 'pair')} of turns</h3>{listed}")
    if not shown:
        return ""
    return f"<section><h2>Comparison</h2><p>{safe(comparison_title(result))}.</p>{''.join(shown)}</section>"

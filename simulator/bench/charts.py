"""Draws the charts of a benchmark's page. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import HALF, WIDE, Drawing, line_at, safe, text_at
from pdserve.plot.figure import CONTENT
from pdserve.plot.gantt import Bar, BarKind, GanttRow, gantt, place_in_lanes
from pdserve.plot.line_chart import Rule, Series, line_chart
from pdserve.plot.theme import colour as shade_of
from pdserve.plot.thinning import thinned
from simulator.bench.answer import BenchAnswer, BenchOutcome
from simulator.bench.ratios import Ratio
from simulator.bench.result import LevelResult
from simulator.bench.statistics import BenchSummary

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

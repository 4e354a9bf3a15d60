"""Draws the charts of a benchmark's page. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.line_chart import HALF, WIDE, Rule, Series, line_chart
from pdserve.plot.thinning import thinned
from simulator.bench.answer import BenchAnswer, BenchOutcome
from simulator.bench.ratios import Ratio
from simulator.bench.result import LevelResult
from simulator.bench.statistics import BenchSummary

_MOST_SPANS: Final = 240  # of the timeline; more would not be visible
_SPAN_HEIGHT: Final = 5
_RATIO_ROW: Final = 30


def load_chart(
    levels: Sequence[LevelResult],
    colour_of: Mapping[str, int],
    value: Callable[[BenchSummary], float],
    title: str,
    *,
    unit: str = "",
    rules: Sequence[Rule] = (),
) -> str:
    """A figure of each server by the load, under its title: arrivals per second, or requests at once."""
    is_open = levels[0].level.is_open
    series = []
    for name, colour in colour_of.items():
        points = [(load_of(one), value(one.summary)) for one in levels if one.server == name]
        known = sorted(point for point in points if math.isfinite(point[1]))
        series.append(Series(name=name, points=known, colour=colour, is_marked=True))
    highest = max((y for one in series for _, y in one.points), default=1.0)
    if unit == "%":
        y_axis = Axis(low=0.0, high=1.0, unit=unit)
    else:
        y_axis = Axis(low=0.0, high=1.1 * highest or 1.0, unit=unit)
    x_label = "requests per second that arrived" if is_open else "requests at once"
    most = max(map(load_of, levels))
    x_axis = Axis(low=0.0, high=1.05 * most or 1.0, label=x_label)
    chart = line_chart(series, x_axis, y_axis, title=f"{title} by load", rules=rules, width=HALF, height=240)
    return f"<h3>{html.escape(title)}</h3>{chart}"


def load_of(one: LevelResult) -> float:
    """Requests at once, or arrivals per second. A trace's own rate is the measured one."""
    if one.level.concurrency is not None:
        return float(one.level.concurrency)
    if one.level.rate_rps is not None:
        return one.level.rate_rps
    return one.summary.rate(one.summary.requests)


def distribution_chart(
    shown: Sequence[tuple[str, int, Sequence[float], int]], title: str, *, target_s: float | None = None
) -> str:
    """`shown`: name, colour, seconds, and of how many. The share of all whose time was at most x. A curve that ends
    below 100% is one with requests that failed."""
    every = [one for _, _, values, _ in shown for one in values if one > 0.0]
    if target_s is not None:
        every.append(target_s)
    if not every:
        return ""
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


def timeline_chart(answers: Sequence[BenchAnswer], title: str) -> str:
    """A bar for each request in order of sending: the wait for the first token, then the tokens. Requests that failed
    or were rejected have a bar of another colour."""
    chosen = sorted(answers, key=lambda one: one.sent_s)
    size = math.ceil(len(chosen) / _MOST_SPANS) if chosen else 1
    chosen = chosen[::size]
    if not chosen:
        return ""
    x_axis = Axis(low=0.0, high=max(one.ended_s for one in chosen) or 1.0, label="seconds", unit="")
    left, right, top, bottom = 14, WIDE - 14, 8, 8 + _SPAN_HEIGHT * len(chosen)

    def at_x(value: float) -> float:
        return round(left + (right - left) * x_axis.place(value), 1)

    parts = [f'<svg viewBox="0 0 {WIDE} {bottom + 40}" role="img" aria-label="{html.escape(title)}">']
    for tick in x_axis.ticks():
        parts.append(f'<line class="grid" x1="{at_x(tick)}" x2="{at_x(tick)}" y1="{top}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{at_x(tick)}" y="{bottom + 16}" text-anchor="middle">{x_axis.text(tick)}</text>'
        )
    middle = (left + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{bottom + 34}" text-anchor="middle">seconds</text>')
    for row, one in enumerate(chosen):
        y = top + _SPAN_HEIGHT * row
        for begin_s, end_s, colour in _spans(one):
            width = max(at_x(end_s) - at_x(begin_s), 0.8)
            parts.append(
                f'<rect x="{at_x(begin_s)}" y="{y}" width="{width:g}" height="{_SPAN_HEIGHT - 1}" '
                f'fill="var(--s{colour})"><title>{html.escape(_about(one))}</title></rect>'
            )
    return "".join([*parts, "</svg>"])


WAIT_COLOUR, TOKENS_COLOUR, FAILED_COLOUR = 3, 2, 7
SPAN_COLOURS: Final = (
    ("until the first token", WAIT_COLOUR),
    ("tokens", TOKENS_COLOUR),
    ("rejected, failed or interrupted", FAILED_COLOUR),
)


def _spans(one: BenchAnswer) -> list[tuple[float, float, int]]:
    if one.outcome is not BenchOutcome.COMPLETED:
        return [(one.sent_s, one.ended_s, FAILED_COLOUR)]
    return [(one.sent_s, one.chunk_s[0], WAIT_COLOUR), (one.chunk_s[0], one.chunk_s[-1], TOKENS_COLOUR)]


def _about(one: BenchAnswer) -> str:
    if one.outcome is not BenchOutcome.COMPLETED:
        return f"request {one.number}: {one.outcome.value} {one.error}".strip()
    return (
        f"request {one.number}: {one.prompt_tokens} prompt tokens, TTFT {1000 * one.ttft_s:.0f} ms, "
        f"{one.output_tokens} tokens in {one.e2el_s:.2f} s"
    )


def ratio_chart(ratios: Sequence[Ratio], title: str) -> str:
    """A row for each metric: the ratios of all pairs of turns as dots, and their median as a bar."""
    every = [value for one in ratios for value in one.ratios if value > 0.0]
    if not every:
        return ""
    far = max(max(every), 1.0 / min(every), 1.1) * 1.05
    axis = Axis(low=1.0 / far, high=far, is_log=True)
    left, right, top = 130, WIDE - 20, 6
    bottom = top + _RATIO_ROW * len(ratios)

    def at_x(value: float) -> float:
        return round(left + (right - left) * axis.place(value), 1)

    parts = [f'<svg viewBox="0 0 {WIDE} {bottom + 24}" role="img" aria-label="{html.escape(title)}">']
    for tick in _ratio_ticks(far):
        parts.append(f'<line class="grid" x1="{at_x(tick)}" x2="{at_x(tick)}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{at_x(tick)}" y="{bottom + 17}" text-anchor="middle">{tick:.3g}</text>')
    parts.append(f'<line class="rule" x1="{at_x(1.0)}" x2="{at_x(1.0)}" y1="{top}" y2="{bottom}"/>')
    for row, one in enumerate(ratios):
        y = top + _RATIO_ROW * row + _RATIO_ROW / 2
        colour = f"var(--s{row % 8})"
        parts.append(f'<text class="label" x="{left - 10}" y="{y + 4}" text-anchor="end">{one.metric.label}</text>')
        parts.append(
            f'<line x1="{at_x(one.least)}" x2="{at_x(one.most)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        for value in one.ratios:
            shown = f"<title>{one.metric.label}: {value:.3f}</title>"
            parts.append(f'<circle class="dot" cx="{at_x(value)}" cy="{y}" r="4" fill="{colour}">{shown}</circle>')
        x = at_x(one.median)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{y - 9}" y2="{y + 9}" stroke="{colour}" stroke-width="3"/>')
    return "".join([*parts, "</svg>"])


def _ratio_ticks(far: float) -> list[float]:
    steps = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
    above = [one for one in steps if one <= far]
    while len(above) > 5:
        above = [above[0], *above[2::2]]
    return sorted({*above, *(1.0 / one for one in above)})

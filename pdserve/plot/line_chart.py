"""Line charts as SVG text. Pure.

Colours are CSS variables of the page (pdserve/plot/page.py), so that one drawing serves the light and the dark theme.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.axis import Axis

WIDE: Final = 720
HALF: Final = 480  # for two charts side by side
COLOURS: Final = 8  # colours of the page's palette; further series repeat them with dashes
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`colour` is its place in the palette, which stays the same in every chart."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_marked: bool = False  # each point is a measurement, shown as a dot with its values
    is_filled: bool = False
    is_stepped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A dashed line at a value of one axis, such as a target."""

    at: float
    label: str
    is_vertical: bool = False


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    rules: Sequence[Rule] = (),
    width: int = WIDE,
    height: int = 280,
) -> str:
    """`title` is for screen readers."""
    right, bottom = width - _RIGHT, height - (_BOTTOM if x.label else 22)

    def at_x(value: float) -> float:
        return round(_LEFT + (right - _LEFT) * x.place(value), 1)

    def at_y(value: float) -> float:
        return round(bottom - (bottom - _TOP) * y.place(value), 1)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">']
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at_y(tick)}" y2="{at_y(tick)}"/>')
        parts.append(_text(_LEFT - 8, at_y(tick) + 4, y.text(tick), "tick", "end"))
    for tick in x.ticks():
        parts.append(f'<line class="axis" x1="{at_x(tick)}" x2="{at_x(tick)}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_text(at_x(tick), bottom + 17, x.text(tick), "tick", "middle"))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    if x.label:
        parts.append(_text((_LEFT + right) / 2, height - 5, x.label, "label", "middle"))
    if y.label:
        middle = (_TOP + bottom) / 2
        turned = f'transform="rotate(-90 12 {middle})"'
        parts.append(_text(12, middle, y.label, "label", "middle", turned))
    for one in series:
        parts += _draw(one, [(at_x(px), at_y(py)) for px, py in one.points], bottom, x, y)
    for rule in rules:
        if rule.is_vertical and x.low <= rule.at <= x.high:
            place = at_x(rule.at)
            parts.append(f'<line class="rule" x1="{place}" x2="{place}" y1="{_TOP}" y2="{bottom}"/>')
            side, anchor = (-6, "end") if place > (_LEFT + right) / 2 else (6, "start")
            parts.append(_text(place + side, bottom - 8, rule.label, "note", anchor))
        elif not rule.is_vertical and y.low <= rule.at <= y.high:
            place = at_y(rule.at)
            parts.append(f'<line class="rule" x1="{_LEFT}" x2="{right}" y1="{place}" y2="{place}"/>')
            parts.append(_text(_LEFT + 6, place + 15, rule.label, "note", "start"))
    return "".join([*parts, "</svg>"])


def _draw(one: Series, points: list[tuple[float, float]], bottom: float, x: Axis, y: Axis) -> list[str]:
    if not points:
        return []
    if one.is_stepped:
        points = [corner for before, after in _pairs(points) for corner in ((before[0], after[1]), after)]
    colour = f"var(--s{one.colour % COLOURS})"
    dash = ' stroke-dasharray="6 4"' if one.colour >= COLOURS else ""
    path = " ".join(f"{px:g},{py:g}" for px, py in points)
    parts = []
    if one.is_filled:
        area = f"{points[0][0]:g},{bottom:g} {path} {points[-1][0]:g},{bottom:g}"
        parts.append(f'<polygon points="{area}" fill="{colour}" fill-opacity="0.12"/>')
    parts.append(f'<polyline class="line" points="{path}" stroke="{colour}"{dash}/>')
    if one.is_marked:
        for (px, py), (vx, vy) in zip(points, one.points, strict=True):
            title = html.escape(f"{one.name}: {y.text(vy)} at {x.text(vx)}")
            parts.append(f'<circle class="dot" cx="{px:g}" cy="{py:g}" r="4.5" fill="{colour}">')
            parts.append(f"<title>{title}</title></circle>")
    return parts


def _pairs(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return list(zip([points[0], *points], points, strict=False))


def _text(px: float, py: float, text: str, kind: str, anchor: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{px:g}" y="{py:g}" text-anchor="{anchor}" {more}>{html.escape(text)}</text>'

"""Line charts and scatter plots. Pure.

Points outside the axes are drawn at the edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import WIDE, Drawing, line_at, text_at
from pdserve.plot.marks import dash, marker
from pdserve.plot.theme import colour

LEFT, RIGHT, TOP, BOTTOM = 70, 22, 10, 40  # margins around the area of the data
_SMALL: Final = 0.55  # size of the markers of a scatter plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`colour` is its place in the palette, which stays the same in every chart. It also decides dash and marker."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_marked: bool = False  # each point is a measurement, shown with a marker and its values
    is_filled: bool = False
    is_stepped: bool = False
    is_scattered: bool = False  # no line: many small markers
    has_line: bool = True
    is_hollow: bool = False  # markers without a filling


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
    has_diagonal: bool = False,
) -> Drawing:
    """`title` is for screen readers. `has_diagonal`: a line where both values are equal; both axes must be equal."""
    right, bottom = width - RIGHT, height - (BOTTOM if x.label else 22)

    def at_x(value: float) -> float:
        return round(LEFT + (right - LEFT) * x.place(value), 1)

    def at_y(value: float) -> float:
        return round(bottom - (bottom - TOP) * y.place(value), 1)

    parts = []
    for tick in y.ticks():
        parts.append(line_at("grid", LEFT, at_y(tick), right, at_y(tick)))
        parts.append(text_at(LEFT - 8, at_y(tick) + 4, y.text(tick), "tick", "end"))
    for tick in x.ticks():
        parts.append(line_at("axis", at_x(tick), bottom, at_x(tick), bottom + 4))
        parts.append(text_at(at_x(tick), bottom + 17, x.text(tick), "tick", "middle"))
    parts.append(line_at("axis", LEFT, bottom, right, bottom))
    if x.label:
        parts.append(text_at((LEFT + right) / 2, height - 5, x.label, "label", "middle"))
    if y.label:
        middle = (TOP + bottom) / 2
        parts.append(text_at(12, middle, y.label, "label", "middle", f' transform="rotate(-90 12 {middle:g})"'))
    if has_diagonal:
        parts.append(line_at("rule", at_x(x.low), at_y(y.low), at_x(x.high), at_y(y.high)))
    for one in series:
        parts += _draw(one, [(at_x(px), at_y(py)) for px, py in one.points], bottom, x, y)
    for rule in rules:
        if rule.is_vertical and x.low <= rule.at <= x.high:
            place = at_x(rule.at)
            parts.append(line_at("rule", place, TOP, place, bottom))
            side, anchor = (-6, "end") if place > (LEFT + right) / 2 else (6, "start")
            parts.append(text_at(place + side, bottom - 8, rule.label, "note", anchor))
        elif not rule.is_vertical and y.low <= rule.at <= y.high:
            place = at_y(rule.at)
            parts.append(line_at("rule", LEFT, place, right, place))
            parts.append(text_at(LEFT + 6, place + 15, rule.label, "note"))
    return Drawing(width=width, height=height, title=title, body="".join(parts))


def _draw(one: Series, points: list[tuple[float, float]], bottom: float, x: Axis, y: Axis) -> list[str]:
    if not points:
        return []
    if one.is_scattered:
        return [marker(one.colour, px, py, is_hollow=one.is_hollow, scale=_SMALL) for px, py in points]
    if one.is_stepped:
        points = [corner for before, after in _pairs(points) for corner in ((before[0], after[1]), after)]
    path = " ".join(f"{px:g},{py:g}" for px, py in points)
    parts = []
    if one.is_filled:
        area = f"{points[0][0]:g},{bottom:g} {path} {points[-1][0]:g},{bottom:g}"
        parts.append(f'<polygon points="{area}" fill="{colour(one.colour)}" fill-opacity="0.12"/>')
    if one.has_line:
        parts.append(f'<polyline class="line" points="{path}" stroke="{colour(one.colour)}"{dash(one.colour)}/>')
    if one.is_marked:
        for (px, py), (vx, vy) in zip(points, one.points, strict=True):
            about = f"{one.name}: {y.text(vy)} at {x.text(vx)}"
            parts.append(marker(one.colour, px, py, about=about, is_hollow=one.is_hollow))
    return parts


def _pairs(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return list(zip([points[0], *points], points, strict=False))

"""The kinds of charts: lines and points, horizontal bars, bars over time, stacked shares over time. Pure.

In line charts, points outside the axes are drawn at the edge. Kinds of bars and shares differ by colour and also by
height, filling or opacity, so that charts can be read without colours.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.drawing import (
    SWATCH_HEIGHT,
    SWATCH_WIDTH,
    WIDE,
    Axis,
    Drawing,
    Legend,
    colour,
    dash,
    line_at,
    marker,
    safe,
    text_at,
)

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
        return round(LEFT + (right - LEFT) * x.position(value), 1)

    def at_y(value: float) -> float:
        return round(bottom - (bottom - TOP) * y.position(value), 1)

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


# --- horizontal bars ------------------------------------------------------------------------------------------
# One for each named choice, with the measurements behind it.

_BAR_TOP, _BAR_RIGHT, _BAR_BOTTOM = 6, 60, 38
_BAR_ROW: Final = 24
_LETTER: Final = 6.6  # pixels, about
_MOST_LEFT: Final = 300
_HOLLOW: Final = 'fill="none" stroke="{shade}" stroke-dasharray="3 3"'


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBar:
    """`text` is written at the bar's end. `held` and `missed` are tried values, shown as dots and crosses."""

    name: str
    value: float
    text: str
    is_bound: bool = False  # only known to be below `value`; drawn without filling
    colour: int = 0
    held: Sequence[float] = ()
    missed: Sequence[float] = ()


def bar_legend(families: Sequence[tuple[str, int]]) -> Legend:
    """`families`: the meaning of each colour."""
    middle_x, middle_y = SWATCH_WIDTH / 2, SWATCH_HEIGHT / 2
    box = f'<rect x="1" y="1" width="{SWATCH_WIDTH - 2}" height="{SWATCH_HEIGHT - 2}"'
    return (
        *((name, f'{box} fill="{colour(number)}"/>') for name, number in families),
        ("upper bound", f"{box} {_HOLLOW.format(shade='var(--soft)')}/>"),
        ("tried and sustained", _held(middle_x, middle_y, "var(--soft)")),
        ("tried and missed", _missed(middle_x, middle_y, "var(--soft)")),
    )


def bar_chart(bars: Sequence[NamedBar], x: Axis, *, title: str, width: int = WIDE) -> Drawing:
    longest = max((len(one.name) for one in bars), default=0)
    left, right = min(16 + _LETTER * longest, _MOST_LEFT), width - _BAR_RIGHT
    bottom = _BAR_TOP + _BAR_ROW * len(bars)

    def at_x(value: float) -> float:
        return round(left + (right - left) * x.position(value), 1)

    parts = []
    for tick in x.ticks():
        parts.append(line_at("grid", at_x(tick), _BAR_TOP, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 16, x.text(tick), "tick", "middle"))
    parts.append(text_at((left + right) / 2, bottom + 33, x.label, "label", "middle"))
    for number, one in enumerate(bars):
        middle = _BAR_TOP + _BAR_ROW * (number + 0.5)
        shade = colour(one.colour)
        look = _HOLLOW.format(shade=shade) if one.is_bound else f'fill="{shade}"'
        parts.append(text_at(left - 8, middle + 4, one.name, "label", "end"))
        parts.append(
            f'<rect x="{left:g}" y="{middle - 7:g}" width="{at_x(one.value) - left:.5g}" height="14" {look}>'
            f"<title>{safe(f'{one.name}: {one.text}')}</title></rect>"
        )
        parts += [_held(at_x(value), middle, shade) for value in one.held]
        parts += [_missed(at_x(value), middle, shade) for value in one.missed]
        end = max([one.value, *one.held, *one.missed])
        parts.append(text_at(at_x(end) + 8, middle + 4, one.text, "note"))
    return Drawing(width=width, height=bottom + _BAR_BOTTOM, title=title, body="".join(parts))


def _held(x: float, y: float, shade: str) -> str:
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3.5" fill="{shade}"/>'


def _missed(x: float, y: float, shade: str) -> str:
    cross = f"M{x - 3:g} {y - 3:g}l6 6m0 -6l-6 6"
    return f'<path class="cross" stroke="{shade}" d="{cross}" stroke-width="1.5" fill="none"/>'


# --- bars over time -------------------------------------------------------------------------------------------
# In rows, such as one row per worker.

LANE_HEIGHT: Final = 9
_GANTT_TOP, _GANTT_RIGHT, _GANTT_BOTTOM, _GANTT_GAP = 6, 14, 38, 8
_LEAST: Final = 0.8  # pixels of a bar


@dataclass(frozen=True, slots=True, kw_only=True)
class BarKind:
    name: str
    colour: int
    height: float = 1.0  # share of its lane
    is_hollow: bool = False

    def swatch(self) -> str:
        return _bar(self, 1.0, 1.0, SWATCH_WIDTH - 2.0, SWATCH_HEIGHT - 2.0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`lane`: from 0 at the top of its row."""

    begin: float
    end: float
    kind: BarKind
    lane: int = 0
    about: str = ""  # shown by a pointer over it


@dataclass(frozen=True, slots=True, kw_only=True)
class GanttRow:
    name: str
    bars: Sequence[Bar]

    @property
    def num_lanes(self) -> int:
        return 1 + max((one.lane for one in self.bars), default=0)


def gantt(rows: Sequence[GanttRow], x: Axis, *, title: str, width: int = WIDE) -> Drawing:
    left, right = 96, width - _GANTT_RIGHT
    tops: list[float] = []
    bottom = float(_GANTT_TOP)
    for row in rows:
        tops.append(bottom)
        bottom += row.num_lanes * LANE_HEIGHT + _GANTT_GAP
    bottom -= _GANTT_GAP / 2

    def at_x(value: float) -> float:
        return round(left + (right - left) * x.position(value), 1)

    parts = []
    for tick in x.ticks():
        parts.append(line_at("grid", at_x(tick), _GANTT_TOP, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 16, x.text(tick), "tick", "middle"))
    parts.append(text_at((left + right) / 2, bottom + 33, x.label, "label", "middle"))
    for row, top in zip(rows, tops, strict=True):
        height = row.num_lanes * LANE_HEIGHT
        if row.name:
            parts.append(text_at(left - 8, top + height / 2 + 4, row.name, "label", "end"))
        if len(rows) > 1:
            parts.append(line_at("axis", left, top + height + _GANTT_GAP / 2, right, top + height + _GANTT_GAP / 2))
        for one in row.bars:
            begin = at_x(one.begin)
            length = max(at_x(one.end) - begin, _LEAST)
            parts.append(_bar(one.kind, begin, top + one.lane * LANE_HEIGHT, length, LANE_HEIGHT - 1.0, one.about))
    return Drawing(width=width, height=round(bottom + _GANTT_BOTTOM), title=title, body="".join(parts))


def gantt_legend(kinds: Sequence[BarKind]) -> Legend:
    return tuple((one.name, one.swatch()) for one in kinds)


def assign_lanes(spans: Sequence[tuple[float, float]], most: int) -> list[int | None]:
    """The lane of each span, so that spans of a lane do not overlap; None where all `most` lanes are occupied. `spans`
    are in order of their begin."""
    ends: list[tuple[float, int]] = []  # of occupied lanes
    free: list[int] = []
    lanes: list[int | None] = []
    for begin, end in spans:
        while ends and ends[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            lane: int | None = heapq.heappop(free)
        else:
            lane = len(ends) if len(ends) < most else None
        if lane is not None:
            heapq.heappush(ends, (end, lane))
        lanes.append(lane)
    return lanes


def _bar(kind: BarKind, x: float, y: float, width: float, height: float, about: str) -> str:
    drawn = height * kind.height
    top = y + (height - drawn) / 2
    look = (
        f'fill="none" stroke="{colour(kind.colour)}" stroke-width="1.2"'
        if kind.is_hollow
        else f'fill="{colour(kind.colour)}"'
    )
    head = f'<rect x="{x:g}" y="{top:.4g}" width="{width:.4g}" height="{drawn:.3g}" {look}'
    return f"{head}><title>{safe(about)}</title></rect>" if about else f"{head}/>"


# --- stacked shares over time ---------------------------------------------------------------------------------
# In rows, such as how each worker spent its time.

_SHARE_LEFT, _SHARE_TOP, _SHARE_RIGHT, _SHARE_BOTTOM, _SHARE_GAP = 96, 6, 14, 38, 8
_SHARE_ROW: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareKind:
    name: str
    colour: int
    opacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRow:
    """`shares[k][i]`: share of kind k, 0 to 1, from `i * width` to `(i + 1) * width`. Kinds are stacked upwards."""

    name: str
    width: float
    shares: Sequence[Sequence[float]]


def share_rows(
    rows: Sequence[ShareRow], kinds: Sequence[ShareKind], x: Axis, *, title: str, width: int = WIDE
) -> Drawing:
    right, bottom = width - _SHARE_RIGHT, _SHARE_TOP + len(rows) * (_SHARE_ROW + _SHARE_GAP)

    def at_x(value: float) -> float:
        return round(_SHARE_LEFT + (right - _SHARE_LEFT) * x.position(value), 1)

    parts = []
    for tick in x.ticks():
        parts.append(line_at("grid", at_x(tick), _SHARE_TOP, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 16, x.text(tick), "tick", "middle"))
    parts.append(text_at((_SHARE_LEFT + right) / 2, bottom + 33, x.label, "label", "middle"))
    for number, row in enumerate(rows):
        base = _SHARE_TOP + number * (_SHARE_ROW + _SHARE_GAP) + _SHARE_ROW
        below = [0.0] * max((len(one) for one in row.shares), default=0)
        for kind, shares in zip(kinds, row.shares, strict=True):
            above = [low + share for low, share in zip(below, shares, strict=True)]
            if any(shares):
                upper = _edge([base - _SHARE_ROW * min(one, 1.0) for one in above], row.width, at_x)
                lower = _edge([base - _SHARE_ROW * min(one, 1.0) for one in below], row.width, at_x)
                path = " ".join(f"{px:g},{py:g}" for px, py in upper + lower[::-1])
                parts.append(
                    f'<polygon points="{path}" fill="{colour(kind.colour)}" fill-opacity="{kind.opacity:g}">'
                    f"<title>{safe(f'{row.name}: {kind.name}')}</title></polygon>"
                )
            below = above
        parts.append(line_at("axis", _SHARE_LEFT, base, right, base))
        parts.append(text_at(_SHARE_LEFT - 8, base - _SHARE_ROW / 2 + 4, row.name, "label", "end"))
    return Drawing(width=width, height=bottom + _SHARE_BOTTOM, title=title, body="".join(parts))


def share_legend(kinds: Sequence[ShareKind]) -> Legend:
    return tuple(
        (
            one.name,
            f'<rect width="{SWATCH_WIDTH}" height="{SWATCH_HEIGHT}" fill="{colour(one.colour)}" '
            f'fill-opacity="{one.opacity:g}"/>',
        )
        for one in kinds
    )


def _edge(levels: Sequence[float], width: float, at_x: Callable[[float], float]) -> list[tuple[float, float]]:
    """Two corners for each change of the level."""
    corners: list[tuple[float, float]] = []
    for number, level in enumerate(levels):
        rounded = round(level, 1)
        begin, end = at_x(number * width), at_x((number + 1) * width)
        if corners and corners[-1][1] == rounded:
            corners[-1] = (end, rounded)
        else:
            corners += [(begin, rounded), (end, rounded)]
    return corners

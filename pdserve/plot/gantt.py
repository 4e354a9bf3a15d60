"""Bars over time in rows, such as one row per worker. Pure.

Kinds of bars differ by colour and by height or filling, so that charts can be read without colours.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import WIDE, Drawing, line_at, safe, text_at
from pdserve.plot.marks import SWATCH_HEIGHT, SWATCH_WIDTH, Legend
from pdserve.plot.theme import colour

LANE_HEIGHT: Final = 9
_TOP, _RIGHT, _BOTTOM, _GAP = 6, 14, 38, 8
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


def gantt(
    rows: Sequence[GanttRow], x: Axis, *, title: str, width: int = WIDE, lane_height: float = LANE_HEIGHT
) -> Drawing:
    left, right = (96 if any(row.name for row in rows) else 14), width - _RIGHT
    tops: list[float] = []
    bottom = float(_TOP)
    for row in rows:
        tops.append(bottom)
        bottom += row.num_lanes * lane_height + _GAP
    bottom -= _GAP / 2

    def at_x(value: float) -> float:
        return round(left + (right - left) * x.place(value), 1)

    parts = []
    for tick in x.ticks():
        parts.append(line_at("grid", at_x(tick), _TOP, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 16, x.text(tick), "tick", "middle"))
    parts.append(text_at((left + right) / 2, bottom + 33, x.label, "label", "middle"))
    for row, top in zip(rows, tops, strict=True):
        height = row.num_lanes * lane_height
        if row.name:
            parts.append(text_at(left - 8, top + height / 2 + 4, row.name, "label", "end"))
        if len(rows) > 1:
            parts.append(line_at("axis", left, top + height + _GAP / 2, right, top + height + _GAP / 2))
        for one in row.bars:
            begin = at_x(one.begin)
            length = max(at_x(one.end) - begin, _LEAST)
            parts.append(_bar(one.kind, begin, top + one.lane * lane_height, length, lane_height - 1.0, one.about))
    return Drawing(width=width, height=round(bottom + _BOTTOM), title=title, body="".join(parts))


def gantt_legend(kinds: Sequence[BarKind]) -> Legend:
    return tuple((one.name, one.swatch()) for one in kinds)


def place_in_lanes(spans: Sequence[tuple[float, float]], most: int) -> list[int | None]:
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

"""Rows of stacked shares over time, such as how each worker spent its time. Pure.

The kinds of shares differ by colour and by opacity, so that charts can be read without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import WIDE, Drawing, line_at, safe, text_at
from pdserve.plot.marks import SWATCH_HEIGHT, SWATCH_WIDTH, Legend
from pdserve.plot.theme import colour

_LEFT, _TOP, _RIGHT, _BOTTOM, _GAP = 96, 6, 14, 38, 8
_ROW: Final = 30


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
    right, bottom = width - _RIGHT, _TOP + len(rows) * (_ROW + _GAP)

    def at_x(value: float) -> float:
        return round(_LEFT + (right - _LEFT) * x.place(value), 1)

    parts = []
    for tick in x.ticks():
        parts.append(line_at("grid", at_x(tick), _TOP, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 16, x.text(tick), "tick", "middle"))
    parts.append(text_at((_LEFT + right) / 2, bottom + 33, x.label, "label", "middle"))
    for number, row in enumerate(rows):
        base = _TOP + number * (_ROW + _GAP) + _ROW
        below = [0.0] * max((len(one) for one in row.shares), default=0)
        for kind, shares in zip(kinds, row.shares, strict=True):
            above = [low + share for low, share in zip(below, shares, strict=True)]
            if any(shares):
                upper = _edge([base - _ROW * min(one, 1.0) for one in above], row.width, at_x)
                lower = _edge([base - _ROW * min(one, 1.0) for one in below], row.width, at_x)
                path = " ".join(f"{px:g},{py:g}" for px, py in upper + lower[::-1])
                parts.append(
                    f'<polygon points="{path}" fill="{colour(kind.colour)}" fill-opacity="{kind.opacity:g}">'
                    f"<title>{safe(f'{row.name}: {kind.name}')}</title></polygon>"
                )
            below = above
        parts.append(line_at("axis", _LEFT, base, right, base))
        parts.append(text_at(_LEFT - 8, base - _ROW / 2 + 4, row.name, "label", "end"))
    return Drawing(width=width, height=bottom + _BOTTOM, title=title, body="".join(parts))


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

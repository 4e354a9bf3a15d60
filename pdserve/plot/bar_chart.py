"""Horizontal bars, one for each named choice, with the measurements behind it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import WIDE, Drawing, line_at, safe, text_at
from pdserve.plot.marks import SWATCH_HEIGHT, SWATCH_WIDTH, Legend
from pdserve.plot.theme import colour

_TOP, _RIGHT, _BOTTOM = 6, 60, 38
_ROW: Final = 24
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
    left, right = min(16 + _LETTER * longest, _MOST_LEFT), width - _RIGHT
    bottom = _TOP + _ROW * len(bars)

    def at_x(value: float) -> float:
        return round(left + (right - left) * x.place(value), 1)

    parts = []
    for tick in x.ticks():
        parts.append(line_at("grid", at_x(tick), _TOP, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 16, x.text(tick), "tick", "middle"))
    parts.append(text_at((left + right) / 2, bottom + 33, x.label, "label", "middle"))
    for number, one in enumerate(bars):
        middle = _TOP + _ROW * (number + 0.5)
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
    return Drawing(width=width, height=bottom + _BOTTOM, title=title, body="".join(parts))


def _held(x: float, y: float, shade: str) -> str:
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3.5" fill="{shade}"/>'


def _missed(x: float, y: float, shade: str) -> str:
    cross = f"M{x - 3:g} {y - 3:g}l6 6m0 -6l-6 6"
    return f'<path class="cross" stroke="{shade}" d="{cross}" stroke-width="1.5" fill="none"/>'

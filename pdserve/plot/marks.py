"""How series differ: by colour, dash and marker, so that charts can be read without colours. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.plot.drawing import safe
from pdserve.plot.theme import COLOURS, colour

DASHES: Final = ("", "8 4", "2 3", "10 3 2 3", "5 5", "14 4", "3 3 8 3", "1 4")
#: Paths around the origin, about ten pixels wide.
MARKERS: Final = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5.2L5 3.8H-5z",
    "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    "M0 5.2L5 -3.8H-5z",
    "M-1.6 -5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
    "M-5 -2L0 -5.3L5 -2L3.2 4.4H-3.2z",
    "M-5.5 -2.5h11v5h-11z",
)
SWATCH_WIDTH: Final = 28
SWATCH_HEIGHT: Final = 12

Legend = tuple[tuple[str, str], ...]  # name, and its swatch as SVG of SWATCH_WIDTH by SWATCH_HEIGHT


def dash(number: int) -> str:
    """The attribute of a line. Series with equal colours have different dashes."""
    pattern = DASHES[_variant(number)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def marker(number: int, x: float, y: float, *, about: str = "", is_hollow: bool = False, scale: float = 1.0) -> str:
    """`about` is shown when the pointer is over the marker."""
    size = f" scale({scale:g})" if scale != 1.0 else ""
    look = f'class="ring" stroke="{colour(number)}"' if is_hollow else f'class="dot" fill="{colour(number)}"'
    head = f'<path {look} transform="translate({x:g} {y:g}){size}" d="{MARKERS[_variant(number)]}"'
    return f"{head}><title>{safe(about)}</title></path>" if about else f"{head}/>"


def swatch(number: int, *, has_line: bool = True, is_hollow: bool = False) -> str:
    middle_x, middle_y = SWATCH_WIDTH / 2, SWATCH_HEIGHT / 2
    drawn = f'<line class="line" x1="0" x2="{SWATCH_WIDTH}" y1="{middle_y:g}" y2="{middle_y:g}" '
    line = f'{drawn}stroke="{colour(number)}"{dash(number)}/>' if has_line else ""
    return line + marker(number, middle_x, middle_y, is_hollow=is_hollow, scale=0.9)


def line_legend(names: dict[str, int]) -> Legend:
    return tuple((name, swatch(number)) for name, number in names.items())


def _variant(number: int) -> int:
    return (number + number // COLOURS) % len(MARKERS)

"""Elements of charts: a drawing as SVG of known size, axes, colours and marks. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

WIDE: Final = 720
HALF: Final = 480  # for two charts side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """`title` is for screen readers; `body` is SVG. Sizes are in pixels."""

    width: int
    height: int
    title: str
    body: str

    @property
    def inline(self) -> str:
        """For a page, with the width of its container."""
        return self._svg("")

    def placed(self, x: float, y: float) -> str:
        """Within another SVG, with its own size."""
        return self._svg(f'x="{x:g}" y="{y:g}" width="{self.width}" height="{self.height}" ')

    def _svg(self, place: str) -> str:
        title = safe(self.title)
        return (
            f'<svg {place}viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{title}">'
            f"<title>{title}</title>{self.body}</svg>"
        )


def text_at(x: float, y: float, text: str, kind: str, anchor: str = "start", more: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{safe(text)}</text>'


def line_at(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:g}" x2="{x2:g}" y1="{y1:g}" y2="{y2:g}"/>'


def safe(text: str) -> str:
    """Escaped for HTML and XML. XML has no control characters, not even escaped ones, so they become U+FFFD."""
    return html.escape("".join(one if _is_allowed(one) else "\ufffd" for one in text), quote=True)


def _is_allowed(one: str) -> bool:
    code = ord(one)
    return one in "\t\n\r" or (code >= 0x20 and not 0xD800 <= code <= 0xDFFF and code not in (0xFFFE, 0xFFFF))


# --- axes -----------------------------------------------------------------------------------------------------
# The place of a value, the ticks and their texts.

_FEWEST: Final = 3  # ticks of a logarithmic axis
_NEAREST: Final = 0.12  # share of a logarithmic axis between two ticks
_GAP: Final = 1e-12  # relative tolerance for ticks that round to just beyond the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    low: float
    high: float
    label: str = ""
    is_log: bool = False
    unit: str = ""  # "%": values are shares; "s": seconds; "n": a count

    def place(self, value: float) -> float:
        """0 at its low end, 1 at its high end, clipped."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.0

    def ticks(self) -> list[float]:
        ticks = _log_ticks(self.low, self.high) if self.is_log else _even_ticks(self.low, self.high)
        return [tick for tick in ticks if self.unit != "n" or tick == round(tick)]

    def text(self, value: float) -> str:
        if self.unit == "%":
            return f"{100.0 * value:.0f}%"
        if self.unit == "s" and 0.0 < value < 0.9995:
            return f"{1000.0 * value:.3g} ms"
        return f"{value:.4g}" + (" s" if self.unit == "s" else "")


def _even_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1.0, 2.0, 5.0, 10.0) if size * factor >= raw * (1.0 - _GAP))
    begin = math.ceil(low / step - 1e-9)
    return [number * step for number in range(begin, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of ten, with 2 and 5 between them if there is room; even steps where these are too few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        inside = [tick for tick in ticks if low * (1.0 - 1e-9) <= tick <= high * (1.0 + 1e-9)]
        if len(inside) < _FEWEST and high < 10.0 * low:
            return _apart(_even_ticks(low, high), math.log(high / low))
        if len(inside) <= most:
            return inside
    return inside[:: math.ceil(len(inside) / most)]


def _apart(ticks: list[float], length: float) -> list[float]:
    """Without ticks that a logarithmic axis of this length would show too close to the one before."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= _NEAREST * length:
            kept.append(tick)
    return kept


# --- thinning of long lists -----------------------------------------------------------------------------------
# A chart can show only so many points.

_MOST_POINTS: Final = 360  # of a timeline or a distribution; more would not be visible
T = TypeVar("T")


def means(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most this many points; each is the mean of its neighbours."""
    size = math.ceil(len(points) / most) if points else 1
    if size == 1:
        return list(points)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(sum(px for px, _ in group) / len(group), sum(py for _, py in group) / len(group)) for group in groups]


def thinned(points: Sequence[T], most: int = _MOST_POINTS) -> list[T]:
    """At most this many points and the last one."""
    size = math.ceil(len(points) / most) if points else 1
    kept = list(points[::size])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


# --- colours and styles ---------------------------------------------------------------------------------------
# Light and dark, for pages and for SVG files. A drawing names a colour by its variable, so that one drawing serves both
# themes.

COLOURS: Final = 8  # of the palette
_LIGHT: Final = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
_DARK: Final = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#008300", "#9085e9", "#e66767")
_VARIABLES: Final = """
:root { color-scheme: light dark; --page: #f4f4f2; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --mute: #75736c;
  --grid: #e1e0d9; --axis: #c3c2b7; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #ffffff; --soft: #c3c2b7;
  --mute: #9a988f; --grid: #2c2c2a; --axis: #44443f; DARK } }
"""
CHART_STYLE: Final = """
svg text { font: 12px system-ui, sans-serif; fill: var(--mute); }
svg .label { fill: var(--soft); } svg .note { fill: var(--soft); font-weight: 500; }
svg .note { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
svg .rule { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dot { stroke: var(--card); stroke-width: 1.5; } svg .ring { fill: var(--card); stroke-width: 2; }
"""


def variables() -> str:
    light = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(_LIGHT))
    dark = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(_DARK))
    return _VARIABLES.replace("LIGHT", light).replace("DARK", dark)


def colour(number: int) -> str:
    """Further series repeat the colours, with other dashes and markers."""
    return f"var(--s{number % COLOURS})"


# --- marks of series ------------------------------------------------------------------------------------------
# Series differ by colour, dash and marker, so that charts can be read without colours.

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

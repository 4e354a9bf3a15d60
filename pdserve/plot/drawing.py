"""Drawings as SVG of known size, with axes, colours and marks, and figures of them, as an SVG file or a page. Pure."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
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

    def at(self, x: float, y: float) -> str:
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

    def position(self, value: float) -> float:
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


# --- frame of HTML pages --------------------------------------------------------------------------------------
# One self-contained document without network and scripts, light and dark. Every text is escaped, whatever its source.

_PAGE_STYLE: Final = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 4px; }
p { margin: 0 0 10px; color: var(--soft); }
section, .tile { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }
section { padding: 16px 18px; margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0; }
.tile { padding: 10px 14px; } .tile b { display: block; font-size: 24px; font-weight: 600; }
.tile span { color: var(--soft); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 18px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--axis); }
td { text-align: right; border-bottom: 1px solid var(--grid); } th, td { padding: 5px 9px; white-space: nowrap; }
.left { text-align: left; } td.why { white-space: normal; min-width: 300px; }
svg.key { display: inline-block; width: 28px; height: 12px; margin-right: 6px; vertical-align: -1px; }
.legend { font-size: 13px; color: var(--soft); margin: 2px 0 4px; } .legend span.of { margin-right: 16px; }
pre { margin: 8px 0 0; font: 13px/1.6 ui-monospace, monospace; color: var(--soft); white-space: pre-wrap; }
summary { cursor: pointer; font-weight: 600; } details > *:not(summary) { margin-top: 10px; }
h3 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 12px 0 0; }
svg { display: block; width: 100%; height: auto; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """`parts` are HTML."""
    style = f"<style>{variables()}{_PAGE_STYLE}{CHART_STYLE}</style>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{style}</head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Large figures, each with its description."""
    shown = "".join(
        f'<div class="tile"><b>{safe(figure)}</b><span>{safe(text)}</span></div>' for figure, text in figures
    )
    return f'<div class="tiles">{shown}</div>'


def legend(names: Legend) -> str:
    shown = "".join(f'<span class="of">{_key(drawn)}{safe(name)}</span>' for name, drawn in names)
    return f'<div class="legend">{shown}</div>' if shown else ""


def key(number: int) -> str:
    """The swatch of a series, for a cell of a table."""
    return _key(swatch(number))


def _key(drawn: str) -> str:
    return f'<svg class="key" viewBox="0 0 {SWATCH_WIDTH} {SWATCH_HEIGHT}" aria-hidden="true">{drawn}</svg>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = (), wide: Sequence[str] = ()
) -> str:
    """Cells of `rows` are HTML already. Columns named in `left` or `wide` are left-aligned, others right-aligned; those
    in `wide` wrap."""
    kinds = ["left" if name in left else "left why" if name in wide else "" for name in head]
    marks = [f' class="{kind}"' if kind else "" for kind in kinds]
    top = "".join(f"<th{mark}>{safe(name)}</th>" for name, mark in zip(head, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


# --- figures --------------------------------------------------------------------------------------------------
# A title, a caption and panels of charts.

CONTENT: Final = 976  # pixels: two charts of HALF side by side
_MARGIN: Final = 22
_PANEL_GAP: Final = 16
_LETTER: Final = 6.4  # pixels of the text of notes, about
_STYLE: Final = """
svg .title { font-size: 19px; font-weight: 600; fill: var(--ink); }
svg .heading { font-size: 15px; font-weight: 600; fill: var(--ink); }
svg .caption { fill: var(--soft); } svg .card { fill: var(--card); stroke: var(--grid); }
svg .back { fill: var(--page); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    drawings: Sequence[Drawing]
    note: str = ""
    legend: Legend = ()
    is_folded: bool = False  # on a page, the reader opens it; an SVG file leaves it out


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`caption` names the machine, the commit and the seed, in lines."""

    title: str
    caption: Sequence[str]
    panels: Sequence[Panel]


def figure_page(figure: Figure, more: Iterable[str] = ()) -> str:
    """A self-contained page; `more` is HTML below the charts."""
    head = f"<h1>{safe(figure.title)}</h1>{caption(figure.caption)}"
    return document(figure.title, [head, *map(section, figure.panels), *more])


def caption(lines: Iterable[str]) -> str:
    return "".join(f"<p>{safe(line)}</p>" for line in lines)


def section(panel: Panel) -> str:
    """HTML of one panel."""
    drawn = [one.inline for one in panel.drawings]
    charts = f'<div class="pair">{"".join(f"<div>{one}</div>" for one in drawn)}</div>' if len(drawn) > 1 else drawn[0]
    note = f"<p>{safe(panel.note)}</p>" if panel.note else ""
    inside = f"{note}{legend(panel.legend)}{charts}"
    if panel.is_folded:
        return f"<section><details><summary>{safe(panel.title)}</summary><div>{inside}</div></details></section>"
    return f"<section><h2>{safe(panel.title)}</h2>{inside}</section>"


def figure_svg(figure: Figure) -> str:
    """A standalone file, light or dark as the viewer prefers."""
    parts = [text_at(_MARGIN, 36, figure.title, "title")]
    y = 44.0
    for line in figure.caption:
        for one in _wrapped(line, CONTENT):
            y += 18
            parts.append(text_at(_MARGIN, y, one, "caption"))
    y += 18
    for panel in figure.panels:
        if not panel.is_folded:
            drawn, height = _card(panel, y)
            parts += drawn
            y += height + _PANEL_GAP
    width, height = CONTENT + 4 * _MARGIN, round(y + _MARGIN - _PANEL_GAP)
    title = safe(figure.title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{title}</title><desc>{safe(" ".join(figure.caption))}</desc>'
        f"<style>{variables()}{CHART_STYLE}{_STYLE}</style>"
        f'<rect class="back" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _card(panel: Panel, top: float) -> tuple[list[str], float]:
    """The SVG of a panel, and its height."""
    left, y = 2.0 * _MARGIN, top + 26
    parts = [text_at(left, y, panel.title, "heading")]
    for line in _wrapped(panel.note, CONTENT) if panel.note else ():
        y += 18
        parts.append(text_at(left, y, line, "caption"))
    x, y = left, y + (22 if panel.legend else 4)
    for name, drawn in panel.legend:
        length = SWATCH_WIDTH + 6 + _LETTER * len(name) + 18
        if x > left and x + length > left + CONTENT:
            x, y = left, y + 18
        parts.append(
            f'<svg x="{x:g}" y="{y - 10:g}" width="{SWATCH_WIDTH}" height="{SWATCH_HEIGHT}" '
            f'viewBox="0 0 {SWATCH_WIDTH} {SWATCH_HEIGHT}" aria-hidden="true">{drawn}</svg>'
        )
        parts.append(text_at(x + SWATCH_WIDTH + 6, y, name, "caption"))
        x += length
    y += 10
    x, tallest = left, 0
    for one in panel.drawings:
        if x > left and x + one.width > left + CONTENT:
            x, y, tallest = left, y + tallest + 8, 0
        parts.append(one.at(x, y))
        x, tallest = x + one.width + _PANEL_GAP, max(tallest, one.height)
    height = y + tallest + 14 - top
    card = f'<rect class="card" x="{_MARGIN}" y="{top:g}" width="{CONTENT + 2 * _MARGIN}" height="{height:g}" rx="8"/>'
    return [card, *parts], height


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, int(width / _LETTER)) or [""]

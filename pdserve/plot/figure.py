"""A figure: a title, a caption and panels of charts, as an SVG file or as a page. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.drawing import Drawing, safe, text_at
from pdserve.plot.marks import SWATCH_HEIGHT, SWATCH_WIDTH, Legend
from pdserve.plot.page import document, legend
from pdserve.plot.theme import CHART_STYLE, variables

CONTENT: Final = 976  # pixels: two charts of HALF side by side
_MARGIN: Final = 22
_GAP: Final = 16
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
            y += height + _GAP
    width, height = CONTENT + 4 * _MARGIN, round(y + _MARGIN - _GAP)
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
        parts.append(one.placed(x, y))
        x, tallest = x + one.width + _GAP, max(tallest, one.height)
    height = y + tallest + 14 - top
    card = f'<rect class="card" x="{_MARGIN}" y="{top:g}" width="{CONTENT + 2 * _MARGIN}" height="{height:g}" rx="8"/>'
    return [card, *parts], height


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, int(width / _LETTER)) or [""]

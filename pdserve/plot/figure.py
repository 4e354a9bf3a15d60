"""A figure: a title, a caption and panels of charts, as an SVG file or as a page; and the frame of our pages. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.plot.drawing import (
    CHART_STYLE,
    SWATCH_HEIGHT,
    SWATCH_WIDTH,
    Drawing,
    Legend,
    safe,
    swatch,
    text_at,
    variables,
)

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


# --- figure ---------------------------------------------------------------------------------------------------

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

"""The frame of our HTML pages: one self-contained document without network and scripts, light and dark. Pure.

Every text is escaped, whatever its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pdserve.plot.drawing import safe
from pdserve.plot.marks import SWATCH_HEIGHT, SWATCH_WIDTH, Legend, swatch
from pdserve.plot.theme import CHART_STYLE, variables

_STYLE: Final = """
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
    style = f"<style>{variables()}{_STYLE}{CHART_STYLE}</style>"
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

"""The frame of our HTML pages: one self-contained document without network and scripts, light and dark. Pure.

Every text is escaped, whatever it comes from.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from pdserve.plot.line_chart import COLOURS

_LIGHT: Final = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
_DARK: Final = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#008300", "#9085e9", "#e66767")
_STYLE: Final = """
:root { color-scheme: light dark; --page: #f4f4f2; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --mute: #75736c;
  --grid: #e1e0d9; --axis: #c3c2b7; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #ffffff; --soft: #c3c2b7;
  --mute: #9a988f; --grid: #2c2c2a; --axis: #44443f; DARK } }
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
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.legend { font-size: 13px; color: var(--soft); margin: 2px 0 4px; } .legend span.of { margin-right: 16px; }
pre { margin: 8px 0 0; font: 13px/1.6 ui-monospace, monospace; color: var(--soft); white-space: pre-wrap; }
summary { cursor: pointer; font-weight: 600; } details > *:not(summary) { margin-top: 10px; }
h3 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 12px 0 0; }
svg { display: block; width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--mute); }
svg .label { fill: var(--soft); } svg .note { fill: var(--soft); font-weight: 500; }
svg .note { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
svg .rule { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dot { stroke: var(--card); stroke-width: 2; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """`parts` are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_style()}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Large figures, each with what it is."""
    shown = "".join(
        f'<div class="tile"><b>{safe(figure)}</b><span>{safe(text)}</span></div>' for figure, text in figures
    )
    return f'<div class="tiles">{shown}</div>'


def legend(names: Iterable[tuple[str, int]]) -> str:
    shown = "".join(f'<span class="of">{key(colour)}{safe(name)}</span>' for name, colour in names)
    return f'<div class="legend">{shown}</div>'


def key(colour: int) -> str:
    return f'<span class="key" style="background: var(--s{colour % COLOURS})"></span>'


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


def _style() -> str:
    light = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(_LIGHT))
    dark = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(_DARK))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


def safe(text: str) -> str:
    return html.escape(text, quote=True)

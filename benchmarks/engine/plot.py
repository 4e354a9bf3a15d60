"""Draws the rates of benchmarks.engine as an SVG: tokens per second by batch, and by prompt length. Pure.

The project depends on no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

COLOURS: Final = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5f3dc4")
FLOOR_COLOUR: Final = "#868e96"
WIDTH, HEIGHT, MARGIN, TOP = 460, 320, 62, 48

Series = Mapping[int, float]


def draw(panels: Sequence[tuple[str, str, Mapping[str, Series], Series]], title: str) -> str:
    """Each panel: its title, the name of its x axis, tokens/s of each peer by x, and the floor's tokens/s by x."""
    names = list(dict.fromkeys(name for _, _, lines, _ in panels for name in lines))
    colour = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    parts = [_text(MARGIN, 20, title, 14)]
    for index, (name, axis, lines, floor) in enumerate(panels):
        parts.append(f'<g transform="translate({index * (WIDTH + 20)},{TOP - 20})">')
        parts += _panel(name, axis, lines, floor, colour)
        parts.append("</g>")
    for index, name in enumerate([*names, "float32 at the machine's rates"]):
        x, y = MARGIN + 170 * (index % 5), TOP + HEIGHT + 14 + 18 * (index // 5)
        stroke = colour.get(name, FLOOR_COLOUR)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 20}" y2="{y}" stroke="{stroke}" stroke-width="3"/>')
        parts.append(_text(x + 26, y + 4, name, 12))
    size = f'width="{len(panels) * (WIDTH + 20)}" height="{TOP + HEIGHT + 48}"'
    style = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{style}{"".join(parts)}</svg>\n'


def _panel(name: str, axis: str, lines: Mapping[str, Series], floor: Series, colour: Mapping[str, str]) -> list[str]:
    every = [*lines.values(), floor]
    xs = sorted({x for line in every for x in line})
    top = 1.05 * max(y for line in every for y in line.values())
    low, high = math.log2(xs[0]), max(math.log2(xs[-1]), math.log2(xs[0]) + 1)

    def at_x(x: float) -> float:
        return MARGIN + (math.log2(x) - low) / (high - low) * (WIDTH - MARGIN - 20)

    def at_y(y: float) -> float:
        return HEIGHT - 40 - y / top * (HEIGHT - 80)

    parts = [_text(MARGIN, 22, name, 13)]
    for tick in _ticks(top):
        parts.append(f'<path d="M{MARGIN} {at_y(tick):.1f}H{WIDTH - 20}" stroke="#e9ecef"/>')
        parts.append(_text(MARGIN - 6, at_y(tick) + 4, f"{tick:g}", 11, "end"))
    for x in xs:
        parts.append(_text(at_x(x), HEIGHT - 22, str(x), 11, "middle"))
    parts.append(_text((MARGIN + WIDTH) / 2, HEIGHT - 6, axis, 11, "middle"))
    parts.append(_line(floor, at_x, at_y, FLOOR_COLOUR, ' stroke-dasharray="5 4"'))
    for peer, line in lines.items():
        parts.append(_line(line, at_x, at_y, colour[peer], ""))
        parts += [
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{colour[peer]}"/>' for x, y in line.items()
        ]
    return parts


def _line(line: Series, at_x: Callable[[float], float], at_y: Callable[[float], float], colour: str, more: str) -> str:
    points = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in sorted(line.items()))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{more}/>'


def _ticks(top: float) -> list[float]:
    """Four to ten round numbers up to `top`."""
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= next(factor for factor in (1, 2, 5) if top / (step * factor) <= 10)
    return [step * index for index in range(int(top / step) + 1)]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#212529">{safe}</text>'

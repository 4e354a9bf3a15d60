"""Colours and styles of charts, light and dark, for pages and for SVG files. Pure.

A drawing names a colour by its variable, so that one drawing serves both themes.
"""

from __future__ import annotations

from typing import Final

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

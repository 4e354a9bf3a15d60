"""A chart as SVG of known size, for an HTML page or as a part of an SVG file. Pure."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Final

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

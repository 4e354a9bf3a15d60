"""Assembles the live page from the files beside this module. Pure, apart from reading them.

The document is self-contained: its Content-Security-Policy allows exactly its own script and style, by their hashes,
and connections to its own origin. A recording may not connect anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from pdserve.gateway.ui.bundle import bundle

_FOLDER: Final = Path(__file__).parent
_TITLE: Final = "pdserve"
_SELF: Final = "'self'"
_NONE: Final = "'none'"
# A script that contains one of these could end, or change, the parsing of its element.
_BREAKS_OUT: Final = ("</", "<!--", "\r")
_ESCAPES: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


@cache
def page() -> tuple[bytes, Mapping[str, str]]:
    """The live page and the headers of its response."""
    script, style = _sources()
    body = _document(_TITLE, style, [script])
    return body, {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": f"{_policy([script], style, connects_to=_SELF)}; frame-ancestors {_NONE}",
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }


def recording_page(
    frames: Sequence[Mapping[str, Any]], title: str, explanations: Mapping[str, Mapping[str, Any]] | None = None
) -> bytes:
    """The page with a recording, which it plays without a network. `frames`: as in the live feed, oldest first.
    `explanations`: by request id, as `/ui/requests/{id}` answers. Raises ValueError for a number that JSON lacks."""
    script, style = _sources()
    data = f"window.PDSERVE_FRAMES = {_json(frames)};\nwindow.PDSERVE_EXPLANATIONS = {_json(explanations or {})};"
    scripts = [data, script]
    policy = _policy(scripts, style, connects_to=_NONE)
    # A file has no headers, so the document carries its policy itself.
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    return _document(title, style, scripts, meta)


@cache
def _sources() -> tuple[str, str]:
    """The script and the style."""
    modules = {path.name: path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.js"))}
    return bundle(modules, "main.js"), (_FOLDER / "style.css").read_text("utf-8")


def _document(title: str, style: str, scripts: Sequence[str], meta: str = "") -> bytes:
    for text in (style, *scripts):
        if any(sequence in text for sequence in _BREAKS_OUT):
            raise ValueError(f"a script or style of the page contains one of {_BREAKS_OUT}")
    template = (_FOLDER / "page.html").read_text("utf-8")
    # The recording's script is not a module, because modules are deferred and it must run first.
    elements = [f"<script>{text}</script>" for text in scripts[:-1]]
    elements.append(f'<script type="module">{scripts[-1]}</script>')
    values = {
        "meta": meta,
        "title": html.escape(title),
        "style": f"<style>{style}</style>",
        "script": "".join(elements),
    }
    parts = template.split("{{")
    filled = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition("}}")
        filled += (values[name], rest)
    return "".join(filled).encode()


def _policy(scripts: Sequence[str], style: str, *, connects_to: str) -> str:
    return "; ".join(
        (
            f"default-src {_NONE}",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {_hash(style)}",
            "img-src data:",
            f"connect-src {connects_to}",
            f"base-uri {_NONE}",
            f"form-action {_NONE}",
            "require-trusted-types-for 'script'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    """JSON that is safe in a script element for any strings."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)

"""Assembles the live page from the files beside this module. Pure, apart from reading them.

The document is self-contained: its Content-Security-Policy allows exactly its own script and style, by their hashes,
and connections to its own origin. A recording may not connect anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

# --- one script from modules ----------------------------------------------------------------------------------
# ES modules are joined in the order of their imports. They share one scope. A name that two modules define, an import
# of a name that is not exported, and a cycle of imports are therefore errors.

_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:const|let|function|class)\b)", re.MULTILINE)
_DEFINED: Final = re.compile(r"^(export )?(?:async )?(?:const|let|function|class) (\w+)", re.MULTILINE)
_OTHER: Final = re.compile(r"^(?:import|export)\b", re.MULTILINE)


def bundle(sources: Mapping[str, str], entry: str) -> str:
    """`sources`: text of each module by file name. Returns `entry` after everything that it imports. Raises ValueError
    for a missing module or name, a cycle, a name that two modules define, or a form of import or export that is not
    `import { a, b } from "./file.js";` or `export` before a declaration."""
    order = _in_order(sources, entry)
    exported: dict[str, set[str]] = {}
    defined_in: dict[str, str] = {}
    parts = []
    for name in order:
        source = sources[name]
        _check_imports(name, source, exported)
        found = _DEFINED.findall(source)
        exported[name] = {symbol for is_exported, symbol in found if is_exported}
        for _, symbol in found:
            if symbol in defined_in:
                raise ValueError(f"{name} and {defined_in[symbol]} both define {symbol}")
            defined_in[symbol] = name
        body = _EXPORT.sub("", _IMPORT.sub("", source))
        if _OTHER.search(body):
            raise ValueError(f"{name} has a form of import or export that is not supported")
        parts.append(f"// {name}\n{body.strip()}\n")
    return "\n".join(parts)


def _in_order(sources: Mapping[str, str], entry: str) -> list[str]:
    order: list[str] = []
    begun: set[str] = set()

    def visit(name: str, needed_by: str) -> None:
        if name in order:
            return
        if name not in sources:
            raise ValueError(f"{needed_by} imports {name}, which does not exist")
        if name in begun:
            raise ValueError(f"{needed_by} imports {name}, which imports {needed_by} in turn")
        begun.add(name)
        for _, other in _IMPORT.findall(sources[name]):
            visit(other, name)
        order.append(name)

    visit(entry, "the page")
    return order


def _check_imports(name: str, source: str, exported: Mapping[str, set[str]]) -> None:
    for names, other in _IMPORT.findall(source):
        for symbol in filter(None, (part.strip() for part in names.split(","))):
            if symbol not in exported[other]:
                raise ValueError(f"{name} imports {symbol}, which {other} does not export")


# --- documents ------------------------------------------------------------------------------------------------

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

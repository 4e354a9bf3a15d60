"""The OpenAPI document as a page without scripts: nothing outside of it is loaded. Pure."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from pdserve.gateway.openapi import document

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;border-top:1px solid #8884;padding:.25rem .75rem .25rem 0}"
    "summary{cursor:pointer;padding:.25rem 0}details{border-top:1px solid #8884}:root{color-scheme:light dark}"
)


@cache
def docs_page() -> tuple[bytes, Mapping[str, str]]:
    """The page and the headers of its response."""
    body = "".join(_lines(document())).encode()
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return body, {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    info = found["info"]
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(info["title"])}</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{html.escape(info['title'])}</h1>"
    yield f'<p>{html.escape(info["description"])} The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
    operations = [(path, method, one) for path, item in found["paths"].items() for method, one in item.items()]
    for tag in dict.fromkeys(one["tags"][0] for _, _, one in operations):
        yield f"<h2>{html.escape(tag)}</h2>"
        for path, method, one in operations:
            if one["tags"][0] == tag:
                yield from _operation(f"{method.upper()} {path}", one, found["components"]["schemas"])
    yield "</body></html>"


def _operation(title: str, one: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><code>{html.escape(title)}</code> {html.escape(one['summary'])}</summary>"
    if one.get("security") == []:
        yield "<p>Needs no token.</p>"
    content = one.get("requestBody", {}).get("content", {})
    fields = [
        (f"header <code>{html.escape(p['name'])}</code>", p) for p in one.get("parameters", ()) if p["in"] != "path"
    ]
    for media in content.values():
        model = schemas[media["schema"]["$ref"].rpartition("/")[2]]
        fields += [(f"<code>{html.escape(name)}</code>", value) for name, value in model["properties"].items()]
    if fields:
        yield "<table><tr><th>field<th>meaning</tr>"
        yield from (f"<tr><td>{name}<td>{html.escape(value.get('description', ''))}</tr>" for name, value in fields)
        yield "</table>"
    yield f"<p>Answers: {', '.join(html.escape(status) for status in one['responses'])}</p></details>"

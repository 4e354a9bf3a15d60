"""The live page as a document: its content security policy, and data in recordings."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.ui import page as page_module
from pdserve.gateway.ui.page import bundle, page, recording_page

SOURCES = Path(page_module.__file__).parent
HOSTILE = "</script><script>alert(1)</script><!--\u2028]]>&amp;"


class Elements(HTMLParser):
    """The attributes and the text of each script and style, and the attributes of all elements."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self._inside = ""
        self.feed(body.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        if self._inside == "style":
            self.styles[-1] += data

    def policy(self) -> str:
        return next(
            value or "" for tag, name, value in self.attributes if tag == "meta" and "default-src" in (value or "")
        )


def hashes(policy: str, directive: str) -> set[str]:
    return set(re.search(rf"{directive} ([^;]*)", policy)[1].split())  # type: ignore[index]


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_policy_allows_only_the_own_script_and_style() -> None:
    body, headers = page()
    found = Elements(body)
    policy = headers["content-security-policy"]
    assert hashes(policy, "script-src") == {hash_of(text) for text in found.scripts}
    assert hashes(policy, "style-src") == {hash_of(text) for text in found.styles}
    assert hashes(policy, "default-src") == {"'none'"}
    assert hashes(policy, "connect-src") == {"'self'"}
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_page_may_not_be_framed_or_cached() -> None:
    _, headers = page()
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-type"] == "text/html; charset=utf-8"


def test_the_page_has_no_external_references() -> None:
    found = Elements(page()[0])
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), f"{tag} has a handler that the policy forbids"
        assert name != "style", f"{tag} has a style that the policy forbids"
        if name in ("src", "href"):
            assert (value or "").startswith(("#", "data:")), f"{tag} loads {value}"
    assert "innerHTML" not in found.scripts[-1]


def test_every_aria_reference_exists() -> None:
    found = Elements(page()[0])
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for _, name, value in found.attributes:
        if name in ("aria-labelledby", "aria-describedby", "for"):
            assert set((value or "").split()) <= set(ids)


def test_recording_is_data_whatever_it_contains() -> None:
    frames = [{"at_s": 1.0, "requests": [{"request_id": HOSTILE}]}]
    found = Elements(recording_page(frames, HOSTILE, {HOSTILE: {"reason": HOSTILE}}))
    assert len(found.scripts) == 2
    values: list[Any] = [json.loads(text) for text in re.findall(r"= (.*);", found.scripts[0])]
    assert values == [frames, {HOSTILE: {"reason": HOSTILE}}]


def test_recording_carries_a_policy_without_connections() -> None:
    found = Elements(recording_page([{"at_s": 1.0}], "A recording"))
    policy = found.policy()
    assert hashes(policy, "script-src") == {hash_of(text) for text in found.scripts}
    assert hashes(policy, "connect-src") == {"'none'"}


def test_recording_rejects_numbers_that_json_lacks() -> None:
    with pytest.raises(ValueError, match="JSON"):
        recording_page([{"at_s": float("nan")}], "A recording")


def test_modules_follow_what_they_import() -> None:
    sources = {
        "main.js": 'import { twice } from "./lib.js";\nconst four = twice(2);\n',
        "lib.js": "export function twice(value) {\n  return 2 * value;\n}\n",
    }
    assert bundle(sources, "main.js") == (
        "// lib.js\nfunction twice(value) {\n  return 2 * value;\n}\n\n// main.js\nconst four = twice(2);\n"
    )


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({"main.js": 'import { a } from "./b.js";\n'}, "does not exist"),
        ({"main.js": 'import { a } from "./b.js";\n', "b.js": "const a = 1;\n"}, "does not export"),
        ({"main.js": 'import { a } from "./b.js";\nconst a = 1;\n', "b.js": "export const a = 1;\n"}, "both define a"),
        (
            {
                "main.js": 'import { a } from "./b.js";\n',
                "b.js": 'import { c } from "./main.js";\nexport const a = 1;\n',
            },
            "in turn",
        ),
        ({"main.js": "export default 1;\n"}, "not supported"),
        ({"main.js": 'import * as all from "./b.js";\n'}, "not supported"),
    ],
)
def test_modules_that_cannot_be_joined_are_errors(sources: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        bundle(sources, "main.js")


def test_modules_that_nothing_imports_are_found() -> None:
    joined = Elements(page()[0]).scripts[-1]
    for path in SOURCES.glob("*.js"):
        assert f"// {path.name}\n" in joined, f"{path.name} is not part of the page"

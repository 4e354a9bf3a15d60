"""Parses the body of a request. Pure.

The number of objects, arrays, names and items is limited before the parser runs, because each costs far more than its
bytes. The parser rejects nesting over 200 levels while it reads, before an object exists, and numbers of any length
cost no more than their digits.
"""

from __future__ import annotations

import re
from typing import Any, Final

import jiter

from pdserve.core.errors import InvalidRequest, shortened

MAX_PARTS: Final = 65_536  # objects, arrays and names of a body
MAX_ITEMS: Final = 2**20  # commas of a body, which separate numbers and texts too
MAX_TEXTS: Final = 262_144  # texts of a body that may have more parts
_KINDS: Final = {list: "an array", dict: "an object", str: "a string", type(None): "null"}
_DUPLICATE: Final = re.compile(r'Detected duplicate key (".*") at line \d+ column \d+', re.DOTALL)


def parse(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest. Fields that are null count as absent, as in OpenAI's API. A name that an object has twice
    is rejected, because other parsers on the way may read the other value."""
    _check_parts(body)
    try:
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except (ValueError, RecursionError) as error:
        text = str(error)
        if twice := _DUPLICATE.fullmatch(text):
            raise InvalidRequest("body", f"twice the name {shortened(twice[1], 128)}", "each name once") from None
        raise InvalidRequest("body", "a body that does not parse", f"JSON in UTF-8 ({shortened(text)})") from None
    if not isinstance(found, dict):
        raise InvalidRequest("body", summarised(found), "a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def summarised(value: object) -> str:
    """A value in a message: numbers are repeated, and texts are not, because they may be prompts."""
    if value is True or value is False:
        return str(value).lower()
    return _KINDS.get(type(value)) or shortened(value)


def _check_parts(body: bytes) -> None:
    """Counts the marks of parts: first everywhere, which is enough for almost all bodies, and then outside of texts."""
    if _num_marks(body) <= MAX_PARTS and body.count(b",") <= MAX_ITEMS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that each quote begins or ends a text
    num_texts = plain.count(b'"') // 2
    if num_texts > MAX_TEXTS:
        raise InvalidRequest("body", f"{num_texts} texts", f"at most {MAX_TEXTS} texts in a body with many parts")
    outside = b"".join(plain.split(b'"')[::2])
    num_parts, num_items = _num_marks(outside), outside.count(b",")
    if num_parts > MAX_PARTS:
        raise InvalidRequest("body", f"{num_parts} objects, arrays and names", f"at most {MAX_PARTS} of them")
    if num_items > MAX_ITEMS:
        raise InvalidRequest("body", f"{num_items} items", f"at most {MAX_ITEMS} of them")


def _num_marks(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b":")

"""Parses the body of a request. Pure.

The parser rejects nesting over 200 levels while it reads, before an object exists, and numbers of any length cost no
more than their digits.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from pdserve.core.errors import InvalidRequest, shortened

_KINDS: Final = {list: "an array", dict: "an object", str: "a string", type(None): "null"}


def parse(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest. Fields that are null count as absent, as in OpenAI's API."""
    try:
        found = from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", "a body that does not parse", f"JSON in UTF-8 ({error})") from None
    if not isinstance(found, dict):
        raise InvalidRequest("body", summarised(found), "a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def summarised(value: object) -> str:
    """A value in a message: numbers are repeated, and texts are not, because they may be prompts."""
    if value is True or value is False:
        return str(value).lower()
    return _KINDS.get(type(value)) or shortened(value)

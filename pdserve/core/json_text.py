"""The JSON encoder for the output of all commands. Pure.

RFC 8259 has no NaN and no Infinity, and most parsers reject them. So a float that is not finite becomes null, like an
absent value.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: object, *, indent: int | None = None) -> str:
    """One JSON value. Dataclasses become objects, tuples become arrays, floats that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _finite(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value

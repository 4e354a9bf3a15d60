"""Reads the sampling defaults that a model's authors recommend, from generation_config.json. Pure, except that it reads
the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from pdserve.bounded_file import read_json_object
from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.types import NO_DEFAULTS, Sampling, SamplingDefaults

_FILE: Final = "generation_config.json"
#: From the file's names to ours; as in vLLM, its other fields (such as do_sample) are not read.
_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_WHOLE: Final = ("top_k", "max_tokens")
_MOST: Final = 2**32 - 1  # on the wire; larger whole numbers mean the same


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Nothing without the file; a null value counts as absent. Raises ModelError on an impossible value."""
    values = read_json_object(folder / _FILE)
    if values is None:
        return NO_DEFAULTS
    found = {ours: _number(name, ours, values[name]) for name, ours in _NAMES.items() if values.get(name) is not None}
    for name, ours in _NAMES.items():
        try:
            Sampling(**{ours: found[ours]} if ours in found else {})
        except InvalidRequest as error:
            raise _wrong(name, found[ours], error.expected) from None
    return SamplingDefaults(**found)


def _number(name: str, ours: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (ours in _WHOLE and isinstance(value, float) and not value.is_integer()):
        raise _wrong(name, value, "a whole number" if ours in _WHOLE else "a number")
    if ours == "top_k" and value == -1:  # vLLM's name of all tokens
        return 0
    if ours in _WHOLE:
        return min(int(value), _MOST)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _wrong(name: str, value: object, expected: str) -> ModelError:
    return ModelError(f"{_FILE}: {name}", value, f"{expected}; --generation-config none ignores the file's defaults")

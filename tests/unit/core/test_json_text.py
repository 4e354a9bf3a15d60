from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from pdserve.core.json_text import to_json


@dataclass(frozen=True)
class Row:
    name: str
    shares: tuple[float, ...]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_not_finite_becomes_null(value: float) -> None:
    rows = {"a": value, "b": [1.5, value], "c": Row("d", (value, 2.0))}
    assert json.loads(to_json(rows)) == {"a": None, "b": [1.5, None], "c": {"name": "d", "shares": [None, 2.0]}}


def test_json_values_are_unchanged() -> None:
    value = {"text": "é\n", "none": None, "yes": True, "count": 3, "list": []}
    assert json.loads(to_json(value)) == value


def test_a_value_without_a_json_form_is_an_error() -> None:
    with pytest.raises(TypeError):
        to_json({"set": {1}})

"""Which cases of a parametrised test `make test` runs, and which only `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *every_time: Any) -> list[Any]:
    """The cases as parameters; all but those in `every_time` are marked slow."""
    cases = list(cases)
    unknown = [one for one in every_time if one not in cases]
    assert not unknown, f"not among the cases: {unknown}"
    return [one if one in every_time else _slow(one) for one in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)

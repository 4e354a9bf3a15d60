"""What the first steps of an engine cost, when the first of a size may take seconds."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.worker.calibrate import _time

SLOW_S = 0.05


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_first_step_that_compiles_is_no_measure_on_a_gpu(is_on_host: bool) -> None:
    seen: list[Any] = []

    def step(rows: Any) -> None:
        if rows not in seen:
            time.sleep(SLOW_S)
        seen.append(rows)

    engine: Any = SimpleNamespace(step=step, pool=SimpleNamespace(is_on_host=is_on_host))
    sizes: Any = iter([("first size", (1.0, 1.0, 1.0)), ("second size", (1.0, 2.0, 2.0))])
    [sample] = _time(engine, sizes, SLOW_S / 2)
    assert len(seen) == (1 if is_on_host else 2)
    assert (sample.seconds >= SLOW_S) == is_on_host

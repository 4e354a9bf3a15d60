"""The benchmark of a step's parts still fits the program that it repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config import WorkerConfig
from pdserve.engine.cpu import int4
from pdserve.engine.load.build_engine import open_torch_engine

MODEL = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))


@pytest.mark.skipif(not int4.has_kernel(), reason="products are torch's, so no step is recorded")
def test_every_kernel_of_a_step_is_named_and_timed() -> None:
    from benchmarks import step_parts  # not when tests are collected: those in engine/gpu choose the interpreter first

    config = WorkerConfig(model=str(MODEL), worker_id="w", dtype="int4", threads=1, kv_blocks=32, block_size=16)
    engine = open_torch_engine(config)
    rows = step_parts.measure(engine, batch=2, rounds=2)
    calls = {name: int(count) for name, count, *_ in rows if count}
    assert [row[0] for row in (rows[0], rows[-1])] == ["step", "host"]
    assert all(float(rows[at][2]) > 0 for at in (0, -1))
    layers = engine.model._config.num_layers
    assert calls["multiply-int4"] == 4 * layers
    assert sum(count for name, count in calls.items() if name.startswith("attend")) == layers

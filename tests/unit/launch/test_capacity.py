"""Warnings of `up` before it starts more workers than this host can run."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.launch.serve import Footprint, capacity_warnings, footprint, warnings
from pdserve.launch.settings import bundled_model
from pdserve.launch.spec import ClusterSpec, worker_config

MIB = 2**20
FREE = 1024 * MIB


def of(count: int, *, pool: int = 512 * MIB, threads: int = 1) -> list[Footprint]:
    return [Footprint(weights=100 * MIB, pool=pool, process=300 * MIB, threads=threads)] * count


def test_two_workers_fit_on_two_cores() -> None:
    assert warnings(of(2), cores=2, free=4096 * MIB) == []
    assert warnings(of(2), cores=2, free=None) == []


def test_more_workers_than_cores() -> None:
    assert warnings(of(16), cores=2, free=None) == [
        "WARNING: 16 workers compute with 16 threads on 2 cores, so steps wait for each other: "
        "2 workers with 1 thread each would fit"
    ]


def test_more_threads_than_cores() -> None:
    [said] = warnings(of(2, threads=4), cores=4, free=None)
    assert "2 workers compute with 8 threads on 4 cores" in said
    assert "2 workers with 2 threads each would fit" in said


def test_pools_larger_than_memory() -> None:
    [said] = warnings(of(4), cores=4, free=2000 * MIB)
    pool = (2000 - 4 * 400) * MIB // 4
    assert said == (
        "WARNING: 4 workers may take 3.6 GiB for weights, KV pools and themselves, and 2.0 GiB are free: "
        f"2 workers would fit, or all with pools of {pool} bytes (worker.kv_memory_bytes)"
    )
    smaller = of(4, pool=pool)
    assert warnings(smaller, cores=4, free=2000 * MIB) == []


def test_weights_larger_than_memory() -> None:
    [said] = warnings(of(4), cores=4, free=1000 * MIB)
    assert said.endswith("1.0 GiB are free: 1 worker would fit")
    [said] = warnings(of(1), cores=4, free=40 * MIB)
    assert said.endswith("40 MiB are free: no worker would fit")


@pytest.mark.parametrize(
    ("settings", "pool"),
    [
        ({}, (FREE - 21_902_336) // 8 // 98_304 * 98_304),
        ({"kv_memory_bytes": 7 * MIB}, 7 * MIB),
        ({"kv_blocks": 10}, 10 * 6 * 2 * 16 * 4 * 32 * 4),
        ({"kv_blocks": 10, "kv_dtype": "int8"}, 10 * 6 * 2 * 16 * 4 * (32 + 4)),
        ({"kv_blocks": 10, "dtype": "bfloat16"}, 10 * 6 * 2 * 16 * 4 * 32 * 2),
    ],
)
def test_pools_of_the_bundled_model(settings: dict[str, Any], pool: int) -> None:
    from pdserve.engine.load.checkpoint_files import open_checkpoint
    from pdserve.engine.model.config import read_config

    folder = bundled_model()
    _, config = worker_config(ClusterSpec(model=str(folder), settings={"worker": settings}), 0)
    found = footprint(config, read_config(folder), open_checkpoint(folder), FREE, is_on_cpu=True)
    assert found.pool == pool
    assert 4 * MIB < found.weights < 25 * MIB
    assert footprint(config, read_config(folder), None, FREE, is_on_cpu=False).pool == 0


def test_the_toy_engine_needs_little_memory() -> None:
    assert capacity_warnings(ClusterSpec(model="toy", settings={"worker": {"threads": 1}}, prefill=0)) == []
    huge = {"kv_blocks": 2**31 - 1, "block_size": 4096, "threads": 1}
    [said] = capacity_warnings(ClusterSpec(model="toy", prefill=0, settings={"worker": huge}))
    assert "1 worker may take 65536.1 GiB" in said
    assert "no worker would fit, or all with pools of" in said

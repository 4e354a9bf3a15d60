"""The order of memory measurements on a simulated device, and the pool size of an engine that uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.interface import Row
from pdserve.engine.load.build_engine import open_rank
from pdserve.engine.load.device import largest_steps, measure_use
from pdserve.engine.memory.plan import PoolUnit
from pdserve.engine.toy import ToyEngine

pytestmark = pytest.mark.gpu_checks


class Device:
    """A Meter of a device with 1,000,000 bytes. Engines and steps report the memory that they take and free."""

    total, context = 1_000_000, 30_000

    def __init__(self, weights: int = 100_000) -> None:
        self.held = self.cached = weights
        self.most = 0
        self.events: list[str] = []

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.cached = max(self.cached, self.held)
        self.most = max(self.most, self.cached)

    def capacity(self) -> tuple[int, int]:
        return self.total - self.cached - self.context, self.total

    def settle(self) -> None:
        self.cached = self.held

    def reserved(self) -> int:
        return self.cached

    def begin_peak(self) -> None:
        self.most = self.cached

    def peak(self) -> int:
        return self.most


class Profiled:
    """A toy engine whose steps take memory of the device while they run."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device, self.pool_bytes = device, 100 * num_blocks
        self.spec = ToyEngine(num_blocks=num_blocks, block_size=4, max_context_tokens=400).spec
        device.take(self.pool_bytes + 5_000)  # And tables.
        device.events.append(f"pool of {num_blocks}")

    def step(self, rows: list[Row]) -> None:
        num_bytes = 10 * sum(row.num_queries for row in rows) + sum(len(row.blocks) for row in rows)
        self.device.events.append(f"step of {len(rows)} rows to {max(row.start + row.num_queries for row in rows)}")
        self.device.take(num_bytes)
        self.device.take(-num_bytes)

    def follow(self, rows: list[Row]) -> None:
        self.device.events.append("followed")
        self.step(rows)

    def __del__(self) -> None:
        self.device.take(-self.pool_bytes - 5_000)


UNIT = PoolUnit(block_bytes=100, block_size=4)


def measured(device: Device, graphs: Any = None, **changes: Any) -> Any:
    asked = {"share": 1.0, "context_tokens": 400, "max_batch": 8, "max_batch_tokens": 64, **changes}
    make: Any = lambda num_blocks: Profiled(device, num_blocks)  # noqa: E731
    return measure_use(device, "cuda:0", make, UNIT, **asked, measure_graphs=graphs)


def test_the_peak_is_measured_with_the_largest_steps() -> None:
    device = Device()
    use = measured(device)
    assert device.events == ["pool of 100", "step of 1 rows to 400", "step of 8 rows to 1"]
    assert use.activations == 5_000 + 10 * 64 + 100
    assert (use.total, use.free, use.weights) == (1_000_000, 870_000, 100_000)
    assert (use.runtime, use.graphs) == (30_000, 0)
    assert device.held == 100_000, "the pool for measuring is given back"


def test_a_step_longer_than_a_prompt_has_several() -> None:
    """A step of many prompt tokens computes several prompts if the context limit is lower."""
    device = Device()
    use = measured(device, max_batch_tokens=1000)
    assert device.events == ["pool of 250", "step of 3 rows to 400", "step of 8 rows to 1"]
    assert use.activations == 5_000 + 10 * 1000 + 250


def test_graphs_are_measured_behind_the_steps() -> None:
    device = Device()

    def graphs(engine: Any, meter: Any) -> int:
        assert meter is device
        assert isinstance(engine, Profiled)
        device.events.append("graphs")
        return 77

    assert measured(device, graphs).graphs == 77
    assert device.events[-1] == "graphs"


def test_followers_take_part_in_the_same_steps() -> None:
    leader, follower = Device(), Device()
    measured(leader)
    measured(follower, is_leader=False)
    assert follower.events[0] == "pool of 100"
    assert [event for event in follower.events if event != "followed"] == leader.events
    assert follower.events.count("followed") == 2


def test_ranks_measure_the_steps_of_the_smallest_rank() -> None:
    roomy, full = Device(), Device(weights=966_000)
    measured(full)
    measured(roomy, agree=lambda num_blocks: min(num_blocks, 20))
    assert roomy.events == full.events == ["pool of 20", "step of 1 rows to 80", "step of 8 rows to 1"]


def test_a_long_context_is_measured_in_half_of_the_free_memory() -> None:
    device = Device(weights=960_000)
    measured(device, context_tokens=4000)
    assert device.events[0] == "pool of 50"  # Of 10,000 free bytes.


def test_the_measured_steps_are_valid_rows() -> None:
    engine = ToyEngine(num_blocks=8, block_size=4, max_context_tokens=32)
    [chunk], batch = largest_steps(engine.spec, max_batch=64, max_batch_tokens=12)
    assert (chunk.start, len(chunk.tokens), len(batch)) == (20, 12, 8)
    several, _ = largest_steps(engine.spec, max_batch=64, max_batch_tokens=50)
    assert [(row.start, len(row.tokens)) for row in several] == [(0, 32)], "there is no block for another"
    engine = ToyEngine(num_blocks=13, block_size=4, max_context_tokens=32)
    several, _ = largest_steps(engine.spec, max_batch=64, max_batch_tokens=50)
    assert [(row.start, len(row.tokens)) for row in several] == [(0, 32), (0, 18)]
    for rows in ([chunk], batch, several):
        assert len(engine.step(rows)) == len(rows)


def test_measuring_stays_within_the_share() -> None:
    device = Device()
    measured(device, share=0.102)  # Two thousand bytes in addition to the weights.
    assert device.events[0] == "pool of 10"


class Steady:
    """A Meter over a CPU engine, with a given peak of the steps."""

    def __init__(self, total: int, activations: int) -> None:
        self.total, self.activations = total, activations
        self.pool = 0

    def capacity(self) -> tuple[int, int]:
        return self.total - 1000, self.total

    def settle(self) -> None: ...

    def reserved(self) -> int:
        return 1000

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        return 1000 + self.pool + self.activations


def test_the_pool_takes_the_memory_that_is_left(tiny: Callable[[str], Path]) -> None:
    block_bytes = 3 * 2 * 8 * 2 * 16 * 4
    meter = Steady(total=400 * block_bytes, activations=50 * block_bytes)
    meter.pool = 99 * block_bytes  # Half of the rest of the share after the weights.
    config = WorkerConfig(
        model=str(tiny("llama")),
        worker_id="w",
        device="cpu",
        block_size=8,
        max_batch=4,
        max_batch_tokens=512,
        gpu_memory_share=0.5,
    )
    engine = open_rank(config, meter=meter)
    assert engine.spec.num_blocks == 149  # Half of 400, without 50 and the thousand bytes of weights.
    assert engine.memory is not None
    assert (engine.memory.activations, engine.memory.kv_tokens) == (50 * block_bytes, 149 * 8)
    assert engine.spec.max_context_tokens == 1024
    with pytest.raises(ConfigError, match=r"gpu_memory_share: got 0\.1 of"):
        open_rank(replace(config, gpu_memory_share=0.1), meter=meter)


def test_a_host_engine_reports_its_memory(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.engine.load import build_engine

    monkeypatch.setattr(build_engine, "available_bytes", lambda device: 80_000_000)
    config = WorkerConfig(model=str(tiny("llama")), worker_id="w", device="cpu")
    engine = build_engine.open_torch_engine(config)
    plan = engine.memory
    assert plan is not None
    block_bytes = engine.spec.block_bytes
    assert plan.kv_pool == engine.spec.num_blocks * block_bytes
    assert 0 <= (80_000_000 - plan.weights) // 8 - plan.kv_pool < block_bytes
    assert (plan.device, plan.total) == ("cpu", 80_000_000)

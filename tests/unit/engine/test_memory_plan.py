"""A worker's memory plan: from measurements on a GPU, from free memory on a host; and defaults by device."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.memory.plan import (
    GIB,
    MAX_HOST_BLOCKS,
    MAX_HOST_BYTES,
    MAX_RUNTIME_BYTES,
    MIB,
    UNKNOWN_HOST_BYTES,
    DeviceUse,
    PoolUnit,
    device_blocks,
    device_plan,
    explicit_blocks,
    graph_bytes,
    host_blocks,
    plain_plan,
    plan_from_json,
    runtime_bytes,
    with_device_defaults,
)

LLAMA_8B = PoolUnit(block_bytes=2 * MIB, block_size=16)  # 32 layers, 8 kv heads of 128, bfloat16.


def h100(**changes: Any) -> DeviceUse:
    use = {"total": 80 * GIB, "free": 63 * GIB, "weights": 16 * GIB, "activations": 2 * GIB, "graphs": GIB}
    return DeviceUse(**{"device": "cuda:0", "runtime": GIB, **use, **changes})


def test_the_pool_takes_the_rest_of_the_share() -> None:
    num_blocks = device_blocks(h100(), 0.9, LLAMA_8B)
    assert num_blocks == (72 - 16 - 2 - 1 - 1) * 512
    plan = device_plan(h100(), 0.9, num_blocks, LLAMA_8B)
    assert plan.kv_tokens == 52 * 512 * 16 == 425_984  # Not the 4,096 blocks of a pool of 512 MiB.
    assert plan.usable == 72 * GIB
    parts = plan.weights + plan.activations + plan.graphs + plan.runtime + plan.kv_pool
    assert parts == plan.usable


def test_a_neighbour_on_the_device_bounds_the_pool() -> None:
    assert device_blocks(h100(free=10 * GIB), 0.9, LLAMA_8B) == (10 - 2 - 1) * 512


def test_no_room_names_every_part() -> None:
    with pytest.raises(ConfigError) as caught:
        device_blocks(h100(weights=70 * GIB, free=9 * GIB), 0.9, LLAMA_8B)
    text = str(caught.value)
    assert "gpu_memory_share: got 0.9 of 85.90 GB, 9.66 GB of it free beside the weights" in text
    assert "75.16 GB of weights, 2.15 of activations, 1.07 of graphs and 1.07 of runtime" in text


def test_a_host_pool_is_an_eighth_of_free_memory() -> None:
    small = PoolUnit(block_bytes=MIB, block_size=16)
    assert host_blocks(9 * GIB, GIB, small) == 1024
    assert host_blocks(4096 * GIB, 0, small) == MAX_HOST_BYTES // MIB
    assert host_blocks(None, 0, small) == UNKNOWN_HOST_BYTES // MIB
    assert host_blocks(9 * GIB, GIB, PoolUnit(block_bytes=64, block_size=16)) == MAX_HOST_BLOCKS
    with pytest.raises(ConfigError, match="more free memory, or a kv_memory_bytes of at least 1048576"):
        host_blocks(GIB, GIB, small)
    with pytest.raises(ConfigError):
        host_blocks(GIB, 2 * GIB, small)


def test_explicit_settings_win() -> None:
    assert explicit_blocks(0, 0, LLAMA_8B) is None
    assert explicit_blocks(3, 0, LLAMA_8B) == explicit_blocks(3, 64 * GIB, LLAMA_8B) == 3
    assert explicit_blocks(0, 5 * MIB, LLAMA_8B) == 2
    with pytest.raises(ConfigError, match="kv_memory_bytes: got 1048576, expected at least 2097152"):
        explicit_blocks(0, MIB, LLAMA_8B)


def test_memory_of_the_driver_is_bounded() -> None:
    assert runtime_bytes(100, 60, 30) == 10
    assert runtime_bytes(100, 80, 30) == 0
    assert runtime_bytes(80 * GIB, 20 * GIB, 16 * GIB) == MAX_RUNTIME_BYTES


def test_graph_memory_is_extrapolated() -> None:
    assert graph_bytes(1000, [1500, 1520], 21) == 500 + 20 * 20
    assert graph_bytes(1000, [1500], 1) == 500
    assert graph_bytes(1000, [1500, 1490], 21) == 500
    assert graph_bytes(1000, [], 0) == 0


def test_a_plan_survives_json() -> None:
    plan = plain_plan("cpu", 5, 3, 7, LLAMA_8B)
    assert (plan.kv_pool, plan.kv_tokens) == (14 * MIB, 112)
    assert "\n" not in plan.to_json()
    assert plan_from_json(plan.to_json()) == plan
    assert plan_from_json("{}") is plan_from_json("no plan") is plan_from_json("[1]") is None


# --- defaults by device ---------------------------------------------------------------------------------------


def chosen(role: Role, *, is_gpu: bool, **settings: Any) -> tuple[int, int, str]:
    config = WorkerConfig(model="toy", worker_id="w", **settings)
    found = with_device_defaults(config, role, is_gpu=is_gpu)
    assert with_device_defaults(found, role, is_gpu=not is_gpu) == found, "what is chosen once stays"
    return found.max_batch, found.max_batch_tokens, found.speculation


@pytest.mark.parametrize(
    ("role", "is_gpu", "expected"),
    [
        (Role.PREFILL, True, (256, 2048, "off")),
        (Role.DECODE, True, (256, 512, "off")),
        (Role.PREFILL, False, (64, 512, "ngram")),
        (Role.DECODE, False, (64, 512, "ngram")),
    ],
)
def test_the_device_decides(role: Role, is_gpu: bool, expected: tuple[int, int, str]) -> None:
    assert chosen(role, is_gpu=is_gpu) == expected


@pytest.mark.parametrize("is_gpu", [True, False])
@pytest.mark.parametrize("role", list(Role))
def test_explicit_settings_win_over_the_device(role: Role, is_gpu: bool) -> None:
    given = {"max_batch": 7, "max_batch_tokens": 99, "speculation": "ngram"}
    assert chosen(role, is_gpu=is_gpu, **given) == (7, 99, "ngram")
    assert chosen(role, is_gpu=is_gpu, **{**given, "speculation": "off"}) == (7, 99, "off")

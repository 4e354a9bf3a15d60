"""What a rank loads follows from the settings, the model and the facts of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.load.device import Precision
from pdserve.engine.load.load_plan import Facts, LoadPlan, plan_rank
from pdserve.engine.model.config import ModelConfig, read_config
from pdserve.engine.model.parameters import WHOLE, Shard

CPU = Facts(
    device=torch.device("cpu"),
    precision=Precision("float32", torch.float32, "none", torch.float32),
    free_bytes=None,
    has_triton=False,
    has_paged=True,
    heads_first=False,
    is_measured=False,
    reads_bfloat16=False,
    weights_hash="hash",
)
BFLOAT16 = Precision("bfloat16", torch.float32, "bfloat16", torch.bfloat16)


@pytest.fixture
def model(tiny: Callable[[str], Path]) -> ModelConfig:
    return read_config(tiny("llama"))


def plan(
    model: ModelConfig, facts: Facts = CPU, shard: Shard = WHOLE, *, shares_pool: bool = False, **settings: Any
) -> LoadPlan:
    config = WorkerConfig(model="folder/llama", worker_id="w", **{"kv_blocks": 10, "block_size": 8, **settings})
    return plan_rank(config, model, shard, facts, shares_pool=shares_pool)


@pytest.mark.parametrize(
    ("facts", "settings", "attention"),
    [
        ({}, {}, "paged"),
        ({}, {"kv_dtype": "fp8"}, "gathered"),
        ({"heads_first": True}, {}, "gathered"),
        ({"has_paged": False}, {}, "gathered"),
        ({"has_triton": True, "has_paged": False}, {}, "triton"),
        ({"has_triton": True, "has_paged": False}, {"block_size": 4}, "gathered"),
        ({"has_triton": True, "has_paged": False}, {"block_size": 24}, "gathered"),
    ],
)
def test_device_and_blocks_choose_the_attention(
    facts: dict[str, Any], settings: dict[str, Any], attention: str, model: ModelConfig
) -> None:
    assert plan(model, replace(CPU, **facts), **settings).attention == attention


def test_only_the_paged_kernel_is_deterministic(model: ModelConfig) -> None:
    rounded = replace(CPU, precision=BFLOAT16)
    assert plan(model).config.deterministic == "auto"
    assert plan(model, rounded).config.deterministic == "on"
    assert plan(model, rounded, kv_dtype="fp8").config.deterministic == "auto"
    with pytest.raises(ConfigError, match="deterministic: got on, expected off, or a CPU with numba"):
        plan(model, deterministic="on", kv_dtype="fp8")


def test_the_pool_is_given_measured_or_a_part_of_the_host(model: ModelConfig) -> None:
    assert plan(model).num_blocks == 10
    assert plan(model, replace(CPU, is_measured=True), kv_blocks=0).num_blocks is None
    block_bytes, weight_bytes = plan(model).shape.block_bytes, plan(model).weight_bytes
    free = replace(CPU, free_bytes=weight_bytes + 8 * 5 * block_bytes)
    assert plan(model, free, kv_blocks=0).num_blocks == 5


def test_ranks_of_a_host_fit_together_or_not(model: ModelConfig) -> None:
    half = plan(model, shard=Shard(1, 2), tensor_parallel=2)
    needed = 2 * half.weight_bytes + 10 * half.shape.block_bytes
    for short, is_gpu in ((0, False), (half.weight_bytes, True)):
        device = torch.device("cuda", 1) if is_gpu else CPU.device
        facts = replace(CPU, device=device, free_bytes=needed - short)
        assert plan(model, facts, Shard(1, 2), tensor_parallel=2).num_blocks == 10
        with pytest.raises(ConfigError, match=r"GB of weights and .* that are free"):
            plan(model, replace(facts, free_bytes=needed - short - 1), Shard(1, 2), tensor_parallel=2)


def test_a_shared_pool_has_whole_blocks(model: ModelConfig) -> None:
    shared = plan(model, shard=Shard(1, 2), shares_pool=True, tensor_parallel=2)
    own = plan(model, shard=Shard(1, 2), tensor_parallel=2)
    assert (shared.heads, own.heads) == (range(1, 2), None)
    assert shared.shape.block_bytes == 2 * own.shape.block_bytes
    assert [(one.spec(10).tp_degree, one.spec(10).tp_rank) for one in (shared, own)] == [(1, 0), (2, 1)]
    assert shared.weight_bytes == own.weight_bytes


def test_the_least_limit_of_the_context_holds(model: ModelConfig) -> None:
    assert plan(model).spec(10).max_context_tokens == 80
    assert plan(model).spec(10**6).max_context_tokens == model.max_context_tokens
    assert plan(model, max_context_tokens=72).spec(10).max_context_tokens == 72
    with pytest.raises(ConfigError, match=f"at most {model.max_context_tokens}, the model's own limit"):
        plan(model, max_context_tokens=model.max_context_tokens + 1)

"""Mixture of experts: routing, weights, both checkpoint layouts, and independence of the other tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.core.errors import ModelError
from pdserve.engine.cpu import ops
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.checkpoint_files import check_sizes, open_checkpoint, split_experts
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model.config import ExpertsConfig, read_config
from pdserve.engine.model.config_schema import ExpertNames
from pdserve.engine.model.decoder import apply_experts, choose
from pdserve.engine.model.forms import make_linear
from pdserve.engine.model.linear import PlainLinear, Rounding
from pdserve.engine.model.parameters import ExpertWeights, MlpWeights

NAMES = ExpertNames(block="mlp", parts=("gate_proj", "up_proj", "down_proj"))
CONFIG = ExpertsConfig(
    names=NAMES,
    num_experts=6,
    num_chosen=2,
    mlp_size=24,
    is_renormalised=True,
    layers=frozenset({0}),
    count_field="num_experts",
    size_field="moe_intermediate_size",
)


@pytest.fixture
def matrices() -> tuple[Tensor, Tensor, Tensor]:
    """router [X, E], gate and up [X, 2F, E], down [X, E, F]"""
    torch.manual_seed(7)
    return torch.randn(6, 32), torch.randn(6, 48, 32), torch.randn(6, 32, 24)


def weights_of(matrices: tuple[Tensor, Tensor, Tensor], rounding: Rounding = "none") -> ExpertWeights:
    router_XE, gate_up, down = matrices
    return ExpertWeights(
        router=make_linear(router_XE),
        experts=tuple(
            MlpWeights(
                gate_up=make_linear(a.clone(), rounding=rounding), down=make_linear(b.clone(), rounding=rounding)
            )
            for a, b in zip(gate_up, down, strict=True)
        ),
    )


@pytest.mark.parametrize("is_renormalised", [True, False])
def test_each_token_gets_its_experts_weighted_sum(
    is_renormalised: bool, matrices: tuple[Tensor, Tensor, Tensor]
) -> None:
    router_XE, gate_up, down = (one.double() for one in matrices)
    x_TE = torch.randn(40, 32)
    got = apply_experts(replace(CONFIG, is_renormalised=is_renormalised), weights_of(matrices), ops.silu_mul, x_TE)
    for x, ours in zip(x_TE.double(), got, strict=True):
        share, chosen = (router_XE @ x).softmax(0).topk(2)
        expected = torch.zeros(32, dtype=torch.float64)
        for part, expert in zip(share / share.sum() if is_renormalised else share, chosen, strict=True):
            gate, up = (gate_up[expert] @ x).chunk(2)
            expected += part * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-3)


def test_other_tokens_change_only_rounding(matrices: tuple[Tensor, Tensor, Tensor]) -> None:
    weights, x_TE = weights_of(matrices), torch.randn(60, 32)
    together = apply_experts(CONFIG, weights, ops.silu_mul, x_TE)
    assert torch.equal(together, apply_experts(CONFIG, weights, ops.silu_mul, x_TE))
    alone = torch.cat([apply_experts(CONFIG, weights, ops.silu_mul, x_TE[t : t + 1]) for t in range(60)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-4)


def test_expert_outputs_are_added_in_a_fixed_order() -> None:
    """float32 sums depend on the order: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    config = replace(CONFIG, num_experts=3, num_chosen=3)
    values = (1.0e8, 1.0, -1.0e8)
    experts = tuple(
        MlpWeights(gate_up=PlainLinear(torch.ones(2, 1), None), down=PlainLinear(torch.tensor([[3 * value]]), None))
        for value in values
    )
    weights = ExpertWeights(router=make_linear(torch.zeros(3, 1)), experts=experts)

    def unit(gate_up: Tensor) -> Tensor:
        return torch.ones(len(gate_up), 1)

    assert apply_experts(config, weights, unit, torch.ones(2, 1)).tolist() == [[0.0], [0.0]]


def test_the_expert_router_computes_in_float32() -> None:
    """In bfloat16 both logits would be 256 and the first expert would win."""
    router_XE = torch.tensor([[256.0, 0.0], [256.0, 0.5]])
    x_TE = torch.ones(1, 2, dtype=torch.bfloat16)
    expert_TC, weight_TC = choose(replace(CONFIG, num_chosen=1), make_linear(router_XE), x_TE)
    assert expert_TC.tolist() == [[1]]
    assert weight_TC.dtype == torch.float32


def test_experts_in_int8_stay_close(matrices: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TE = torch.randn(50, 32)
    exact, rounded = (
        apply_experts(CONFIG, weights_of(matrices, rounding), ops.silu_mul, x_TE) for rounding in ("none", "int8")
    )
    assert (exact - rounded).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral-window"])
def test_experts_stored_as_one_tensor_are_the_same_experts(
    name: str, tiny: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in open_checkpoint(tmp_path).tensors)
    ours, theirs = (read_config(folder) for folder in (tmp_path, tiny(name)))
    assert ours == theirs
    fused, apart = (
        load_weights(ours, open_checkpoint(folder), torch.device("cpu"), torch.float32)
        for folder in (tmp_path, tiny(name))
    )
    for one, other in zip(fused.layers, apart.layers, strict=True):
        if isinstance(one.mlp, ExpertWeights) and isinstance(other.mlp, ExpertWeights):
            probe = torch.eye(64)
            assert torch.equal(one.mlp.router(probe), other.mlp.router(probe))
            for a, b in zip(one.mlp.experts, other.mlp.experts, strict=True):
                assert torch.equal(a.gate_up(torch.eye(64)), b.gate_up(torch.eye(64)))
                wide = ours.experts.mlp_size if ours.experts is not None else 0
                assert torch.equal(a.down(torch.eye(wide)), b.down(torch.eye(wide)))
    assert open_engine(tmp_path).step([Row(tokens=[5, 9], start=0, blocks=[1])])


@pytest.mark.parametrize(
    ("name", "num_experts", "size", "field"),
    [
        ("mixtral-window", 5, 96, "num_local_experts: got 4, expected 5"),
        ("mixtral-window", 4, 80, "intermediate_size: got 96, expected 80"),
        ("qwen3-moe-renormalised", 15, 32, "num_local_experts: got 16, expected 15"),
        ("qwen3-moe-renormalised", 16, 40, "moe_intermediate_size: got 32, expected 40"),
    ],
)
def test_sizes_of_fused_experts_are_named_as_in_the_config(
    name: str, num_experts: int, size: int, field: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    stored = {f"model.layers.{n}.mlp.experts.down_proj": torch.ones(num_experts, 64, size) for n in range(3)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"config.json: {field}, because model.layers.0.mlp.experts.down_proj has"):
        check_sizes(read_config(tiny(name)), open_checkpoint(tmp_path).tensors)


def test_invalid_expert_tensors_are_named(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    config = read_config(tiny("mixtral-window"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file({name: torch.ones(4, 96, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name}: got shape \[4, 96, 64\], expected \[4, 192, 64\]"):
        split_experts(config, open_checkpoint(tmp_path).tensors)
    tensors = load_file(tiny("mixtral-window") / "model.safetensors")
    missing = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{missing}: got no such tensor \(1 are missing\)"):
        load_weights(config, open_checkpoint(tmp_path), torch.device("cpu"), torch.float32)

"""Which layers of vLLM take adapters, and the products of adapters on a CPU. The engine itself is tested in its own
environment (tests/models)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.config import WorkerConfig
from pdserve.engine.vllm.adapters import _GroupedProducts, _module_sizes, lora_args

RANK, INPUTS, SIZES = 4, 24, (16, 8)


def test_without_adapters_vllm_gets_no_arguments() -> None:
    assert lora_args(WorkerConfig(model="m", worker_id="w", max_loras=3, max_lora_rank=8)) == {}


def test_layers_that_take_adapters_are_named_as_in_checkpoints() -> None:
    def layer(inputs: int, *slices: int) -> Any:
        return SimpleNamespace(input_size=inputs, output_slices=slices)

    modules = {
        "layers.0.qkv_proj": layer(8, 12, 4, 4),
        "layers.0.o_proj": layer(12, 8),
        "layers.0.gate_up_proj": layer(8, 20, 20),  # joined in the checkpoint, too
        "layers.0.kv_b_proj": layer(8, 12),
        "layers.0.unused": layer(8, 12),
        "layers.0.other": layer(8, 12, 12),  # vLLM divides it in another way than the checkpoint
        "layers.0.experts": SimpleNamespace(),
    }
    packed = {
        "layers.0.qkv_proj": [f"layers.0.{name}_proj" for name in "qkv"],
        "layers.0.other": [f"layers.0.other_{name}" for name in "abc"],
        "layers.0.experts": ["layers.0.experts.0.w1", "layers.0.experts.0.w2"],
    }
    manager = SimpleNamespace(modules=modules, packed_modules=packed)
    assert dict(_module_sizes(manager, lambda one: one is not modules["layers.0.unused"])) == {
        "layers.0.q_proj": (8, 12),
        "layers.0.k_proj": (8, 4),
        "layers.0.v_proj": (8, 4),
        "layers.0.o_proj": (12, 8),
        "layers.0.gate_up_proj": (8, 40),
    }


class Wrapper:
    """Keeps the slot of each token as vLLM's wrapper does."""

    token_lora_indices: Tensor

    def update_metadata(self, slots: list[int]) -> None:
        self.token_lora_indices = torch.tensor(slots)

    def add_lora_linear(self, *args: Any) -> None:
        raise AssertionError("vLLM's own products")


def stacked(num_slots: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Full of weights in every slot."""
    torch.manual_seed(num_slots)
    a = tuple(torch.randn(num_slots, 1, RANK, INPUTS) for _ in SIZES)
    b = tuple(torch.randn(num_slots, 1, size, RANK) for size in SIZES)
    return a, b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots",
    [[0], [-1], [], [-1, -1], [2, 2, 2], [0, 1, 2], [-1, 2, -1], [2, -1, 2, 0, 0, -1, 2, 1]],
)
def test_products_on_a_cpu_are_those_of_the_tokens_adapters(slots: list[int], dtype: torch.dtype) -> None:
    wrapper = Wrapper()
    _GroupedProducts(wrapper)
    a, b = (tuple(one.to(dtype) for one in part) for part in stacked(3))
    wrapper.update_metadata([1] * 9)  # of the step before
    wrapper.update_metadata(slots)
    x, before = (torch.randn(len(slots), size).to(dtype) for size in (INPUTS, sum(SIZES)))
    y = before.clone()
    wrapper.add_lora_linear(y, x, a, b, 1.0, SIZES)
    for token, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(y[token], before[token])
            continue
        added = torch.cat(
            [
                one_b[slot, 0].double() @ (one_a[slot, 0].double() @ x[token].double())
                for one_a, one_b in zip(a, b, strict=True)
            ]
        )
        expected = before[token].double() + added
        torch.testing.assert_close(
            y[token].double(), expected, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )


def test_computed_layers_are_known_by_their_matrices() -> None:
    wrapper = Wrapper()
    products = _GroupedProducts(wrapper)
    wrapper.update_metadata([-1])
    layers = [stacked(count) for count in (1, 2)]
    for a, b in layers[:1]:
        wrapper.add_lora_linear(torch.zeros(1, sum(SIZES)), torch.zeros(1, INPUTS), a, b, 1.0, SIZES)
    assert [a[0].data_ptr() in products.called for a, _ in layers] == [True, False]

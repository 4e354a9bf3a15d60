"""A product with an addend equals the float64 oracle in each form, alone and in each place of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Row
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.weights import load_weights
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.model.attention import EagerAttention
from pdserve.engine.model.batch import pack
from pdserve.engine.model.config import ModelConfig, read_config
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.forms import make_linear
from pdserve.engine.model.linear import Linear, PlainLinear, Products, Rounding, make_invariant
from pdserve.engine.model.parameters import LayerWeights, MlpWeights, Weights
from tests.support.lora import Key, Lora

CPU = torch.device("cpu")
RANK, SCALE = 4, 0.5
GREEDY = Sampling(temperature=0.0, max_tokens=1)
# Compute dtype, rounding, and the error of a product relative to |x| |w|: of rounded inputs, weights and results.
FORMS: Final[dict[str, tuple[torch.dtype, Rounding, float]]] = {
    "float32": (torch.float32, "none", 2.0**-20),
    "bfloat16": (torch.float32, "bfloat16", 2.0**-8),
    "int8": (torch.float32, "int8", 2.0**-6),
    "int4": (torch.float32, "int4", 2.0**-6),
    "plain": (torch.bfloat16, "none", 2.0**-7),
    "fp8": (torch.bfloat16, "fp8", 2.0**-4),
}


@pytest.mark.parametrize(("has_bias", "is_invariant"), [(False, False), (True, True)])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_and_its_addend_equal_the_oracle(form: str, has_bias: bool, is_invariant: bool) -> None:
    dtype, rounding, tolerance = FORMS[form]
    generator = torch.Generator().manual_seed(7)
    weight, low = (torch.randn(*size, generator=generator) / 8 for size in ((48, 64), (3, RANK, 64)))
    high, x = torch.randn(3, 48, RANK, generator=generator), torch.randn(70, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    linear = make_linear(weight.to(dtype), bias, rounding)
    if is_invariant and dtype == torch.float32:
        linear = make_invariant(linear, 64)
    low[0] = 0.0  # adapter 0 adds nothing
    adapter = torch.arange(70) % 3
    lora = Lora({(0, "qkv"): (low.to(dtype), high.to(dtype))}, adapter, SCALE)
    got, alone = linear(x, lora.layer(0).qkv), linear(x)
    weight_NK = weights_of(make_linear(weight.to(dtype), None, rounding), 64)
    plain = F.linear(x.double(), weight_NK, None if bias is None else bias.double())
    merged = [lora.merged(0, "qkv", weight_NK, one) - weight_NK for one in range(3)]
    added = torch.stack([F.linear(row, merged[one]) for row, one in zip(x.double(), adapter.tolist(), strict=True)])
    largest = x.double().norm(dim=1, keepdim=True) * (weight_NK.norm(dim=1) + merged[1].norm(dim=1)) + 1
    assert ((got.double() - plain - added).abs() <= tolerance * largest).all()
    assert (got.dtype, got.shape) == (alone.dtype, alone.shape)
    assert torch.equal(got[::3], alone[::3])
    assert (added[1::3].norm(dim=1) > 10 * tolerance).all(), "a missing addend would be seen"


def weights_of(linear: Linear, num_inputs: int) -> Tensor:
    """In float64, as the form has rounded them."""
    x_KK = torch.eye(num_inputs, dtype=dtype_of(linear))
    return (linear(x_KK).double() - bias_of(linear, num_inputs)).t()


def bias_of(linear: Linear, num_inputs: int) -> Tensor:
    return linear(torch.zeros(1, num_inputs, dtype=dtype_of(linear)))[0].double()


def dtype_of(linear: Linear) -> torch.dtype:
    if isinstance(linear, PlainLinear):
        return linear.weight_NK.dtype
    return torch.bfloat16 if linear.rounding == "fp8" else torch.float32


# --- in the decoder -------------------------------------------------------------------------------------------

TOKENS = [[5, 9, 200, 31, 7], [7, 120, 3], [8, 8, 40, 41]]  # a sequence of each adapter


def spans(config: ModelConfig) -> dict[str, tuple[str, int, int]]:
    """Product and outputs of each projection."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, mlp = config.hidden_size, config.mlp_size
    return {
        "q": ("qkv", 0, query),
        "k": ("qkv", query, query + kv),
        "v": ("qkv", query + kv, query + 2 * kv),
        "o": ("o", 0, hidden),
        "gate": ("gate_up", 0, mlp),
        "up": ("gate_up", mlp, 2 * mlp),
        "down": ("down", 0, hidden),
        "head": ("head", 0, config.vocab_size),
    }


def lora_of(config: ModelConfig, projection: str, dtype: torch.dtype) -> Lora:
    """Three adapters of that projection, or of all, in every layer, for the tokens of TOKENS. They are about as large
    as the weights of the tiny models; 0 adds nothing."""
    sizes = {"qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, "gate_up": 2 * config.mlp_size}
    inputs = {"o": config.num_heads * config.head_dim, "down": config.mlp_size}
    generator = torch.Generator().manual_seed(3)
    low_of: dict[Key, tuple[Tensor, Tensor]] = {}
    for name, first, end in [spans(config)[projection]] if projection != "all" else spans(config).values():
        for layer in [-1] if name == "head" else range(config.num_layers):
            low = torch.randn(3, RANK, inputs.get(name, config.hidden_size), generator=generator)
            high = torch.zeros(3, sizes.get(name, end), RANK)
            low, high = low_of.get((layer, name), (low, high))
            high[1:, first:end] = 0.25 * torch.randn(2, end - first, RANK, generator=generator)
            low_of[layer, name] = low, high
    adapter_T = torch.tensor([index for index, tokens in enumerate(TOKENS) for _ in tokens])
    return Lora({key: (low.to(dtype), high.to(dtype)) for key, (low, high) in low_of.items()}, adapter_T, SCALE)


def logits_of(
    config: ModelConfig,
    weights: Weights,
    rows: list[Row],
    lora: Lora | None,
    products_of: Callable[[Products], Products] = lambda own: own,
) -> Tensor:
    """Of the last token of each sequence, [rows, V]."""
    model = Decoder(config, weights)
    model.products = products_of(model.products)
    shape = BlockShape(
        num_layers=config.num_layers,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=weights.dtype,
    )
    batch = pack(rows, 16, CPU)
    pool = TorchPool(num_blocks=len(TOKENS), shape=shape, device=CPU)
    with torch.inference_mode():
        states = model.hidden(EagerAttention(batch, pool, model.heads), lora)
        assert batch.read_U is not None
        return model.logits(states, None, None if lora is None else lora.take(batch.read_U).head).clone()


def sequence(adapter: int) -> Row:
    tokens = TOKENS[adapter]
    return Row(tokens=tokens, start=0, blocks=[adapter], sample=GREEDY, history=tokens, prompt_len=len(tokens))


def exact(config: ModelConfig, weights: Weights, lora: Lora | None, adapter: int) -> Weights:
    """In float64, with the weights of one adapter."""

    def merge(linear: Linear, layer: int, name: str, num_inputs: int) -> PlainLinear:
        weight_NK, bias_N = weights_of(linear, num_inputs), bias_of(linear, num_inputs)
        return PlainLinear(weight_NK if lora is None else lora.merged(layer, name, weight_NK, adapter), bias_N)

    def wide(norm: Tensor | None) -> Any:
        return None if norm is None else norm.double()

    def layer_of(index: int, layer: LayerWeights) -> LayerWeights:
        assert isinstance(layer.mlp, MlpWeights)
        return replace(
            layer,
            **{name: wide(getattr(layer, name)) for name in LayerWeights.__slots__ if "norm" in name},
            qkv=merge(layer.qkv, index, "qkv", config.hidden_size),
            o=merge(layer.o, index, "o", config.num_heads * config.head_dim),
            mlp=MlpWeights(
                gate_up=merge(layer.mlp.gate_up, index, "gate_up", config.hidden_size),
                down=merge(layer.mlp.down, index, "down", config.mlp_size),
            ),
        )

    return Weights(
        embedding_VE=weights.embedding_VE.double(),
        layers=tuple(layer_of(index, layer) for index, layer in enumerate(weights.layers)),
        norm_E=wide(weights.norm_E),
        head=merge(weights.head, -1, "head", config.hidden_size),
        dtype=torch.float64,
    )


@cache
def loaded(folder: Path, form: str) -> Weights:
    dtype, rounding, _ = FORMS[form]
    return load_weights(read_config(folder), open_checkpoint(folder), CPU, dtype, rounding=rounding)


PROJECTIONS = ["q", "k", "v", "o", "gate", "up", "down", "head"]


@pytest.mark.parametrize(
    ("name", "form", "projection"),
    [
        *(("llama-tied-biased", "float32", projection) for projection in PROJECTIONS),
        *(("llama-tied-biased", "int8", projection) for projection in ("q", "o", "gate", "down", "head")),
        *(("llama-tied-biased", form, "all") for form in ("bfloat16", "int4", "fp8")),
        *(("gemma2", form, "all") for form in ("float32", "int8")),
    ],
)
def test_a_batch_of_several_adapters_equals_the_oracle(
    name: str, form: str, projection: str, tiny: Callable[[str], Path]
) -> None:
    """Also where the norm or the gate in front is fused with the rounding of the product's inputs."""
    config, weights = read_config(tiny(name)), loaded(tiny(name), form)
    lora = lora_of(config, projection, weights.dtype)
    rows = [sequence(index) for index in range(len(TOKENS))]
    got = logits_of(config, weights, rows, lora).double()
    expected, without = (
        torch.cat([logits_of(config, exact(config, weights, one, index), [rows[index]], None) for index in range(3)])
        for one in (lora, None)
    )
    effect, error = (expected - without).norm(dim=1), (got - expected).norm(dim=1)
    assert not effect[0]
    assert (error <= {"float32": 1e-4, "fp8": 0.75}.get(form, 0.25) * effect[1:].mean()).all(), "1 without the addend"


def test_experts_reject_addends(tiny: Callable[[str], Path]) -> None:
    """Instead of ignoring them. Attention of such a model may have them."""
    config, weights = read_config(tiny("qwen3-moe")), loaded(tiny("qwen3-moe"), "float32")
    rows = [sequence(index) for index in range(len(TOKENS))]
    alone, adapted = (logits_of(config, weights, rows, one) for one in (None, lora_of(config, "q", weights.dtype)))
    assert torch.equal(alone[0], adapted[0])
    assert not torch.equal(alone[1:], adapted[1:])
    with pytest.raises(InternalError, match="experts have no place for an addend"):
        logits_of(config, weights, rows, lora_of(config, "down", weights.dtype))

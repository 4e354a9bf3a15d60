"""Compares the sizes in config.json with the shapes of the stored tensors. Pure; imports no torch.

Every process that opens a model folder runs it, and so does `up` before it starts a worker. It names the field of
config.json and both numbers. `Needs.check`, for which the whole model is listed, finds what is left: missing,
superfluous, quantised and single misshapen tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from pdserve.core.errors import ModelError
from pdserve.engine.config import ModelConfig
from pdserve.engine.fused_experts import split_experts
from pdserve.engine.safetensors_file import StoredTensor

_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


def check_sizes(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises ModelError at the first difference. A tensor that is absent, or packed, is not compared."""
    layers = {int(found[1]) for name in stored if (found := _LAYER.match(name))}
    count = len(layers)
    if layers == set(range(count)) and count not in (0, config.num_layers):
        expected = f"{count}, because the weights have the layers 0 to {count - 1}"
        raise ModelError("config.json: num_hidden_layers", config.num_layers, expected)
    stored = split_experts(config, stored)
    for name, dimension, field, size in _sizes(config):
        tensor = stored.get(name)
        if tensor is not None and dimension < len(tensor.shape) and tensor.shape[dimension] != size:
            expected = f"{tensor.shape[dimension]}, because {name} has the shape {list(tensor.shape)}"
            raise ModelError(f"config.json: {field}", size, expected)


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int, str, int]]:
    """A tensor with each size, its dimension, what config.json calls it, and its value there. One layer of each kind is
    enough, because config.json says the same of all."""
    experts = config.experts
    yield "model.embed_tokens.weight", 1, "hidden_size", config.hidden_size
    yield "model.embed_tokens.weight", 0, "vocab_size", config.vocab_size
    attention = "model.layers.0.self_attn."
    if config.has_qk_norm:
        yield f"{attention}q_norm.weight", 0, "head_dim", config.head_dim
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{attention}q_proj.weight", 0, "num_attention_heads * head_dim", queries
    yield f"{attention}k_proj.weight", 0, "num_key_value_heads * head_dim", keys
    with_experts = frozenset[int]() if experts is None else experts.layers
    for index in sorted(set(range(config.num_layers)) - with_experts)[:1]:
        yield f"model.layers.{index}.mlp.gate_proj.weight", 0, "intermediate_size", config.mlp_size
    if experts is not None:
        for index in sorted(with_experts)[:1]:
            block = f"model.layers.{index}.{experts.names.block}"
            yield f"{block}.gate.weight", 0, "the number of experts", experts.num_experts
            gate = f"{block}.experts.0.{experts.names.parts[0]}.weight"
            yield gate, 0, "the intermediate size of each expert", experts.mlp_size

"""Compares the sizes in config.json with the shapes of the stored tensors. Pure; imports no torch.

Every process that opens a model folder runs it, and so does `up` before it starts a worker. It names the field of
config.json and both numbers. `Needs.check`, for which the whole model is listed, finds what is left: missing,
superfluous, quantised and single misshapen tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from pdserve.core.errors import ModelError
from pdserve.engine.load.safetensors_file import StoredTensor
from pdserve.engine.model.config import ExpertsConfig, ModelConfig

# --- fused experts --------------------------------------------------------------------------------------------
# Presents experts that are stored as one tensor per layer as separate tensors, without a copy.
#
# Checkpoints on the Hub, and save_pretrained, have one tensor per expert. With save_original_format=False, transformers
# 5 writes `mlp.gate.weight`, `mlp.experts.gate_up_proj` [X, 2F, E] and `mlp.experts.down_proj` [X, E, F] for every
# family.

# Shapes: X experts, E hidden size, F size of each expert.

_FUSED: Final = re.compile(
    r"(?P<at>model\.layers\.\d+\.)mlp\.(?P<part>gate\.weight|experts\.gate_up_proj|experts\.down_proj)"
)


def split_experts(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names of the family's usual checkpoints. Raises ModelError on a wrong shape."""
    if config.experts is None:
        return dict(stored)
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        fused = _FUSED.fullmatch(name)
        if fused is None:
            found[name] = tensor
        elif fused["part"] == "gate.weight":
            router = f"{fused['at']}{config.experts.names.block}.gate.weight"
            found[name if router in stored else router] = tensor
        else:
            for part, piece in _split(tensor, config.experts, config.hidden_size, fused["at"], fused["part"]):
                if part in stored:
                    raise ModelError(part, f"the same weights in {name}", "one of them")
                found[part] = piece
    return found


def _split(
    tensor: StoredTensor, experts: ExpertsConfig, hidden_size: int, at: str, part: str
) -> Iterator[tuple[str, StoredTensor]]:
    gate, up, down = experts.names.parts
    is_down = part == "experts.down_proj"
    parts = (down,) if is_down else (gate, up)
    shape = (hidden_size, experts.mlp_size) if is_down else (experts.mlp_size, hidden_size)
    whole = (experts.num_experts, len(parts) * shape[0], shape[1])
    if tensor.shape != whole:
        raise ModelError(tensor.name, f"shape {list(tensor.shape)}", f"{list(whole)}, as config.json says")
    num_bytes = tensor.num_bytes // (experts.num_experts * len(parts))
    names = [
        f"{at}{experts.names.block}.experts.{i}.{part}.weight" for i in range(experts.num_experts) for part in parts
    ]
    for index, name in enumerate(names):
        begin = tensor.begin + index * num_bytes
        yield name, replace(tensor, name=name, shape=shape, begin=begin, num_bytes=num_bytes)


# --- checkpoint sizes -----------------------------------------------------------------------------------------

_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


def check_sizes(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises ModelError at the first difference. A tensor that is absent, or packed, is not compared. Fused experts are
    compared before they are split, because a split names only the tensor."""
    layers = {int(found[1]) for name in stored if (found := _LAYER.match(name))}
    count = len(layers)
    if layers == set(range(count)) and count not in (0, config.num_layers):
        expected = f"{count}, because the weights have the layers 0 to {count - 1}"
        raise ModelError("config.json: num_hidden_layers", config.num_layers, expected)
    for name, dimension, field, size in _sizes(config):
        tensor = stored.get(name)
        if tensor is not None and dimension < len(tensor.shape) and tensor.shape[dimension] != size:
            expected = f"{tensor.shape[dimension]}, because {name} has the shape {list(tensor.shape)}"
            raise ModelError(f"config.json: {field}", size, expected)
    split_experts(config, stored)


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
            block, fused = f"model.layers.{index}.{experts.names.block}", f"model.layers.{index}.mlp"
            for name in (f"{block}.gate.weight", f"{fused}.gate.weight", f"{fused}.experts.down_proj"):
                yield name, 0, experts.count_field, experts.num_experts
            yield f"{block}.experts.0.{experts.names.parts[0]}.weight", 0, experts.size_field, experts.mlp_size
            yield f"{fused}.experts.down_proj", 2, experts.size_field, experts.mlp_size

"""Presents experts that are stored as one tensor per layer as separate tensors, without a copy. Pure.

Checkpoints on the Hub, and save_pretrained, have one tensor per expert. With save_original_format=False, transformers 5
writes `mlp.gate.weight`, `mlp.experts.gate_up_proj` [X, 2F, E] and `mlp.experts.down_proj` [X, E, F] for every family.
"""

# Shapes: X experts, E hidden size, F size of each expert.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from pdserve.core.errors import ModelError
from pdserve.engine.config import ModelConfig
from pdserve.engine.layers_config import ExpertsConfig
from pdserve.engine.safetensors_file import StoredTensor

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

"""Which parameters a model has, and which tensors of a checkpoint fill them. Pure.

`build_weights` asks a Source for every parameter, always in the same order. A source may only note what is asked
for (to prove a checkpoint whole before a byte is read), read it from files, or make it up. A new family is written
here alone: its names, its sizes, and what its layers hold.
"""

# Shapes: E hidden size, F mlp size, V vocabulary, H query heads, K kv heads, D head dim.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.engine.config import ModelConfig
from pdserve.engine.linear import Linear


class Source(Protocol):
    """Gives parameters one by one. A name asked for twice is an InternalError, a wrong tensor a ModelError."""

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight, in the compute dtype."""
        ...

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        """A matrix that rows are looked up in."""
        ...

    def matrix(self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False) -> Linear:
        """A product with matrices that lie above one another: {module name: its outputs}, without `.weight`."""
        ...

    def product(self, table_NK: Tensor) -> Linear:
        """A product with a table that was given before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer as it is computed with."""

    attention_norm_E: Tensor
    qkv: Linear  # to (H + 2K) D: queries, keys, values
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: Linear
    mlp_norm_E: Tensor
    gate_up: Linear  # to 2F: gate, up
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding_VE: Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: Tensor
    head: Linear


def build_weights(config: ModelConfig, source: Source) -> Weights:
    """The head first: it is the largest, and while it is packed there is a second copy of it."""
    embedding_VE = source.table("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    if config.is_tied:
        head = source.product(embedding_VE)
    else:
        head = source.matrix({"lm_head": config.vocab_size}, config.hidden_size)
    return Weights(
        embedding_VE=embedding_VE,
        layers=tuple(build_layer(config, index, source) for index in range(config.num_layers)),
        norm_E=source.vector("model.norm.weight", config.hidden_size),
        head=head,
    )


def build_layer(config: ModelConfig, index: int, source: Source) -> LayerWeights:
    at = f"model.layers.{index}."
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {f"{at}self_attn.q_proj": query_size, f"{at}self_attn.k_proj": kv_size, f"{at}self_attn.v_proj": kv_size}
    gate_up = {f"{at}mlp.gate_proj": config.mlp_size, f"{at}mlp.up_proj": config.mlp_size}
    has_norm = config.has_qk_norm
    return LayerWeights(
        attention_norm_E=source.vector(f"{at}input_layernorm.weight", hidden),
        qkv=source.matrix(qkv, hidden, has_bias=config.has_qkv_bias),
        q_norm_D=source.vector(f"{at}self_attn.q_norm.weight", head_dim) if has_norm else None,
        k_norm_D=source.vector(f"{at}self_attn.k_norm.weight", head_dim) if has_norm else None,
        o=source.matrix({f"{at}self_attn.o_proj": hidden}, query_size, has_bias=config.has_o_bias),
        mlp_norm_E=source.vector(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=source.matrix(gate_up, hidden, has_bias=config.has_mlp_bias),
        down=source.matrix({f"{at}mlp.down_proj": hidden}, config.mlp_size, has_bias=config.has_mlp_bias),
        window=config.windows[index],
    )

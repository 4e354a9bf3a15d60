"""Which parameters a model has, which tensors of a checkpoint fill them, and which part of each a tensor-parallel rank
holds. Pure.

`build_weights` requests every parameter from a Source, always in the same order. A source may record requests only (to
check that a checkpoint is complete before reading it), read parameters from files, or generate them. A new family is
added only here: its names, its sizes, and the contents of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.model.config import ModelConfig
from pdserve.engine.model.linear import Linear

# --- the part that a rank holds -------------------------------------------------------------------------------
# Attention is divided by heads and the mlp by its inner size. Input projections are divided by outputs, output
# projections by inputs, so a layer has two all-reduces: after attention and after the mlp. The vocabulary is divided by
# tokens. If there are fewer kv heads than ranks, neighbouring ranks hold the same one. Every rank holds the norms and
# the router of the experts.

Span = tuple[int, int]  # begin, end


@dataclass(frozen=True, slots=True)
class Cut:
    """How a matrix is divided: along `axis`, into equal units; for outputs, each of its parts separately."""

    axis: Literal["outputs", "inputs"]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def span(self, total: int, units: int) -> Span:
        """This rank's part of `total` numbers that consist of `units` equal pieces. Pieces are not divided."""
        width, first = total // units, units * self.rank // self.size
        end = units * (self.rank + 1) // self.size if units >= self.size else first + 1
        return first * width, end * width

    def outputs(self, parts: Mapping[str, int], cut: Cut | None) -> dict[str, Span]:
        """Which outputs of each part this rank computes."""
        if cut is None or cut.axis != "outputs":
            return {module: (0, count) for module, count in parts.items()}
        return {
            module: self.span(count, units) for (module, count), units in zip(parts.items(), cut.units, strict=True)
        }

    def inputs(self, num_inputs: int, cut: Cut | None) -> Span:
        """Which inputs this rank multiplies."""
        return self.span(num_inputs, cut.units[0]) if cut is not None and cut.axis == "inputs" else (0, num_inputs)

    def has_bias(self, cut: Cut | None) -> bool:
        """Only one of the partial sums may include the bias."""
        return cut is None or cut.axis == "outputs" or self.rank == 0


WHOLE: Final = Shard()


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of one rank's part of the model. Raises ConfigError if the heads cannot be divided evenly."""
    size, heads, kv_heads = shard.size, config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        expected = f"a number that divides {heads} query heads, and divides or is a multiple of {kv_heads} kv heads"
        raise ConfigError("tensor_parallel", size, expected)
    return replace(config, num_heads=heads // size, num_kv_heads=max(1, kv_heads // size))


# --- parameters -----------------------------------------------------------------------------------------------

# Shapes: X experts, E hidden size, F mlp size, V vocabulary, H query heads, K kv heads, D head dim.

MLP_PARTS: Final = ("gate_proj", "up_proj", "down_proj")


class Source(Protocol):
    """Returns parameters one by one. Raises InternalError if a name is requested twice, and ModelError on a wrong
    tensor."""

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight, in the compute dtype."""
        ...

    def table(self, name: str, num_rows: int, num_columns: int, *, is_cut: bool = False) -> Tensor:
        """A lookup table; if `is_cut`, only the rank's rows."""
        ...

    def matrix(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False, cut: Cut | None = None
    ) -> Linear:
        """A product with stacked matrices: {module name: its outputs}, without `.weight`.

        Sizes are the whole model's; with `cut`, the rank's part is returned.
        """
        ...

    def product(self, table_NK: Tensor) -> Linear:
        """A product with a table that was returned before."""
        ...

    def exact_product(self, table_NK: Tensor) -> Linear:
        """The same in float32, regardless of the rounding of other products."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    gate_up: Linear  # to 2F: gate, up
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    router: Linear  # to X, in float32, because rounding may choose another expert
    experts: tuple[MlpWeights, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The parameters of one layer."""

    attention_norm_E: Tensor
    qkv: Linear  # to (H + 2K) D: queries, keys, values
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: Linear
    attention_post_norm_E: Tensor | None  # of what attention adds
    mlp_norm_E: Tensor
    mlp: MlpWeights | ExpertWeights
    mlp_post_norm_E: Tensor | None  # of what the mlp adds
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding_VE: Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: Tensor
    head: Linear
    dtype: torch.dtype  # of what is computed


def build_weights(config: ModelConfig, source: Source, threads: Executor | None = None) -> Weights:
    """`config` is the whole model's; the source returns its rank's parts.

    If `threads` is given, layers are built in parallel, and the source must be thread-safe.

    The output head comes first: it is the largest parameter, and there are two copies of it while it is packed.
    """
    embedding_VE = source.table("model.embed_tokens.weight", config.vocab_size, config.hidden_size, is_cut=True)
    if threads is None:
        head = build_head(config, source, embedding_VE)
        layers = tuple(build_layer(config, index, source) for index in range(config.num_layers))
    else:
        pending = threads.submit(build_head, config, source, embedding_VE)
        layers = tuple(threads.map(lambda index: build_layer(config, index, source), range(config.num_layers)))
        head = pending.result()
    norm_E = source.vector("model.norm.weight", config.hidden_size)
    return Weights(
        embedding_VE=embedding_VE, layers=layers, norm_E=_offset(config, norm_E), head=head, dtype=norm_E.dtype
    )


def build_head(config: ModelConfig, source: Source, embedding_VE: Tensor) -> Linear:
    if config.is_tied:
        return source.product(embedding_VE)
    cut = Cut("outputs", (config.vocab_size,))
    return source.matrix({"lm_head": config.vocab_size}, config.hidden_size, cut=cut)


def build_layer(config: ModelConfig, index: int, source: Source) -> LayerWeights:
    at = f"model.layers.{index}."
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {f"{at}self_attn.q_proj": query_size, f"{at}self_attn.k_proj": kv_size, f"{at}self_attn.v_proj": kv_size}
    heads = Cut("outputs", (config.num_heads, config.num_kv_heads, config.num_kv_heads))
    heads_in = Cut("inputs", (config.num_heads,))

    def norm(name: str, size: int = hidden) -> Tensor:
        return _offset(config, source.vector(f"{at}{name}.weight", size))

    has_post = config.has_post_norms  # it has the name that other families use for the norm before the mlp
    return LayerWeights(
        attention_norm_E=norm("input_layernorm"),
        qkv=source.matrix(qkv, hidden, has_bias=config.has_qkv_bias, cut=heads),
        q_norm_D=norm("self_attn.q_norm", head_dim) if config.has_qk_norm else None,
        k_norm_D=norm("self_attn.k_norm", head_dim) if config.has_qk_norm else None,
        o=source.matrix({f"{at}self_attn.o_proj": hidden}, query_size, has_bias=config.has_o_bias, cut=heads_in),
        attention_post_norm_E=norm("post_attention_layernorm") if has_post else None,
        mlp_norm_E=norm("pre_feedforward_layernorm" if has_post else "post_attention_layernorm"),
        mlp=_mlp_or_experts(config, index, source),
        mlp_post_norm_E=norm("post_feedforward_layernorm") if has_post else None,
        window=config.windows[index],
    )


def _mlp_or_experts(config: ModelConfig, index: int, source: Source) -> MlpWeights | ExpertWeights:
    at, hidden, experts = f"model.layers.{index}.", config.hidden_size, config.experts
    if experts is None or index not in experts.layers:
        return _mlp(source, f"{at}mlp.", MLP_PARTS, hidden, config.mlp_size, has_bias=config.has_mlp_bias)
    block = at + experts.names.block
    return ExpertWeights(
        router=source.exact_product(source.table(f"{block}.gate.weight", experts.num_experts, hidden)),
        experts=tuple(
            _mlp(source, f"{block}.experts.{expert}.", experts.names.parts, hidden, experts.mlp_size)
            for expert in range(experts.num_experts)
        ),
    )


def _mlp(
    source: Source, at: str, parts: tuple[str, str, str], hidden_size: int, mlp_size: int, *, has_bias: bool = False
) -> MlpWeights:
    gate, up, down = (at + part for part in parts)
    inner, inner_in = Cut("outputs", (mlp_size, mlp_size)), Cut("inputs", (mlp_size,))
    return MlpWeights(
        gate_up=source.matrix({gate: mlp_size, up: mlp_size}, hidden_size, has_bias=has_bias, cut=inner),
        down=source.matrix({down: hidden_size}, mlp_size, has_bias=has_bias, cut=inner_in),
    )


def _offset(config: ModelConfig, weight: Tensor) -> Tensor:
    """A norm's weight. A weight with offset 1 stays in float32, because its low bits would be lost near 1."""
    return weight.float() + 1 if config.is_norm_offset else weight

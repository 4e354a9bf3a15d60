"""The least that a step must read and compute, from a model's shape. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.model.config import ModelConfig

# of a weight, with its share of scales and zeros
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5 + 3 / 64}


@dataclass(frozen=True, slots=True)
class EngineWork:
    read_bytes: float
    flops: float


def decode_work(model: ModelConfig, dtype: str, kv_bytes: int, batch: int, context: int) -> EngineWork:
    """One step: every matrix in use once, the KV of `context` positions of each sequence, a logit row for each."""
    head = model.hidden_size * model.vocab_size
    kv = batch * context * model.num_layers * 2 * model.num_kv_heads * model.head_dim
    attention = 4 * batch * context * model.num_layers * model.num_heads * model.head_dim
    return EngineWork(
        read_bytes=(_read(model) + head) * WEIGHT_BYTES[dtype] + kv * kv_bytes,
        flops=2 * batch * (_read(model) + head) + attention,
    )


def prefill_work(model: ModelConfig, dtype: str, tokens: int) -> EngineWork:
    """One prompt: a token's matrices for each, half of the square of attention, the head for the last token only."""
    head = model.hidden_size * model.vocab_size
    attention = 2 * tokens * tokens * model.num_layers * model.num_heads * model.head_dim
    return EngineWork(
        read_bytes=(_read(model) + head) * WEIGHT_BYTES[dtype],
        flops=2 * (tokens * _read(model) + head) + attention,
    )


def _read(model: ModelConfig) -> int:
    """Elements of the matrices that one token passes. Of experts that is the least that a batch can do with."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.num_layers * model.hidden_size * 2 * (query + kv)
    if model.experts is None:
        return attention + 3 * model.num_layers * model.hidden_size * model.mlp_size
    experts = model.experts
    routed = len(experts.layers) * (3 * experts.num_chosen * experts.mlp_size + experts.num_experts)
    dense = (model.num_layers - len(experts.layers)) * 3 * model.mlp_size
    return attention + model.hidden_size * (routed + dense)

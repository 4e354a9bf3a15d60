"""What a step has to read and compute at the least, from a model's shape. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.config import ModelConfig

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Work:
    read_bytes: float
    flops: float


def decode_work(model: ModelConfig, dtype: str, kv_bytes: int, batch: int, context: int) -> Work:
    """One step: every matrix once, the KV of `context` positions of each sequence, a logit row for each."""
    matrices, head = _matrices(model), model.hidden_size * model.vocab_size
    kv = batch * context * model.num_layers * 2 * model.num_kv_heads * model.head_dim
    attention = 4 * batch * context * model.num_layers * model.num_heads * model.head_dim
    return Work(
        read_bytes=(matrices + head) * WEIGHT_BYTES[dtype] + kv * kv_bytes,
        flops=2 * batch * (matrices + head) + attention,
    )


def prefill_work(model: ModelConfig, dtype: str, tokens: int) -> Work:
    """One prompt: every matrix for every token, half of the square of attention, the head for the last token only."""
    matrices, head = _matrices(model), model.hidden_size * model.vocab_size
    attention = 2 * tokens * tokens * model.num_layers * model.num_heads * model.head_dim
    return Work(
        read_bytes=(matrices + head) * WEIGHT_BYTES[dtype],
        flops=2 * (tokens * matrices + head) + attention,
    )


def _matrices(model: ModelConfig) -> int:
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (query + 2 * kv) + query * model.hidden_size
    return model.num_layers * (attention + 3 * model.hidden_size * model.mlp_size)

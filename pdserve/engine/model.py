"""The decoder: Llama 2/3, Mistral, Qwen2 and Qwen3 are one text, told apart by which parameters exist.

Prefill chunks and decode rows run through the same matrices in one packed batch; only attention treats them apart.
"""

# Shapes: T tokens in the packed batch, E hidden size, F mlp size, H query heads, K kv heads, D head dim,
#         V vocabulary, B rows of a group, Q query tokens per row, R / 2 = rotated pairs.

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine import ops
from pdserve.engine.attention import attend
from pdserve.engine.batch import Batch
from pdserve.engine.config import ModelConfig
from pdserve.engine.parameters import LayerWeights, Weights
from pdserve.engine.pool import TorchPool
from pdserve.engine.rope import inverse_frequencies, rotate, rotation


@final
class Decoder:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._frequency_R = inverse_frequencies(config.rope, config.head_dim).to(weights.norm_E.device)

    def hidden(self, batch: Batch, pool: TorchPool) -> Tensor:
        """Computes all tokens and writes their KV; returns the state before the last norm, [T, E]."""
        pool.clear(batch.fresh_blocks)
        x_TE = F.embedding(batch.token_T, self._weights.embedding_VE).to(self._weights.norm_E.dtype)
        cos_sin = rotation(self._frequency_R, self._config.rope.attention_factor, batch.position_T, x_TE.dtype)
        delta_TE: Tensor | None = None  # what the last sublayer adds
        for index, layer in enumerate(self._weights.layers):
            normed_TE = self._add_norm(x_TE, delta_TE, layer.attention_norm_E)
            delta_TE = self._attention(index, layer, normed_TE, cos_sin, batch, pool)
            normed_TE = self._add_norm(x_TE, delta_TE, layer.mlp_norm_E)
            delta_TE = layer.down(ops.silu_mul(layer.gate_up(normed_TE)))
        return x_TE if delta_TE is None else x_TE.add_(delta_TE)

    def logits(self, x_TE: Tensor) -> Tensor:
        """float32, [T, V]."""
        return self._weights.head(self._norm(x_TE, self._weights.norm_E)).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TE: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        batch: Batch,
        pool: TorchPool,
    ) -> Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv_TND = layer.qkv(x_TE).view(x_TE.shape[0], -1, self._config.head_dim)
        q_THD, k_TKD, v_TKD = qkv_TND.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD, k_TKD = self._norm(q_THD, layer.q_norm_D), self._norm(k_TKD, layer.k_norm_D)
        q_THD, k_TKD = rotate(q_THD, *cos_sin), rotate(k_TKD, *cos_sin)
        pool.write(index, k_TKD, v_TKD, batch.block_T, batch.offset_T)
        parts = []
        for group in batch.groups:
            shape = (group.num_rows, group.num_queries, num_heads, self._config.head_dim)
            q_BQHD = q_THD[group.first : group.first + group.num_rows * group.num_queries].view(shape)
            parts.append(attend(pool, index, q_BQHD, group.contexts[layer.window]))
        return layer.o(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _add_norm(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor) -> Tensor:
        """The norm of x after `delta_TE`, if any, is added to it in place."""
        if delta_TE is None:
            return self._norm(x_TE, weight_E)
        return ops.add_rms_norm(x_TE, delta_TE, weight_E, self._config.norm_eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._config.norm_eps)

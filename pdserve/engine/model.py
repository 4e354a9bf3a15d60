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
        x_TE = F.embedding(batch.token_T, self._weights.embedding_VE)
        cos_sin = rotation(self._frequency_R, self._config.rope.attention_factor, batch.position_T, x_TE.dtype)
        for index, layer in enumerate(self._weights.layers):
            x_TE = x_TE + self._attention(index, layer, self._norm(x_TE, layer.attention_norm_E), cos_sin, batch, pool)
            x_TE = x_TE + self._mlp(layer, self._norm(x_TE, layer.mlp_norm_E))
        return x_TE

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

    def _mlp(self, layer: LayerWeights, x_TE: Tensor) -> Tensor:
        gate_TF, up_TF = layer.gate_up(x_TE).chunk(2, dim=-1)
        return layer.down(F.silu(gate_TF) * up_TF)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.norm_eps)

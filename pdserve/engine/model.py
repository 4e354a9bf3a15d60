"""The decoder: Llama, Mistral, Mixtral, Qwen and Gemma are one text, told apart by a few numbers of the config and by
which parameters exist.

Prefill chunks and decode rows run through the same matrices in one packed batch; only attention treats them apart.
"""

# Shapes: T tokens in the packed batch, E hidden size, F mlp size, H query heads, K kv heads, D head dim,
#         V vocabulary, B rows of a group, Q query tokens per row, R / 2 = rotated pairs, U tokens that are read.

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine import ops
from pdserve.engine.batch import Batch
from pdserve.engine.config import ModelConfig
from pdserve.engine.experts import apply_experts
from pdserve.engine.interface import OnLayer
from pdserve.engine.parameters import ExpertWeights, LayerWeights, MlpWeights, Weights
from pdserve.engine.pool import TorchPool
from pdserve.engine.rope import inverse_frequencies, rotation
from pdserve.engine.sharding import Shard, rank_config

if TYPE_CHECKING:  # torch.distributed is for those who have ranks
    from pdserve.engine.ranks import Ranks


@final
class Decoder:
    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks | None = None) -> None:
        """With `ranks`, `weights` are one rank's part, and every rank calls the same methods with the same batches."""
        self._ranks = ranks
        whole = config
        config = self._config = config if ranks is None else rank_config(config, ranks.shard)
        self._weights = weights
        device = weights.norm_E.device
        self._ropes = tuple(dict.fromkeys(config.ropes))
        self._rope_of_layer = tuple(self._ropes.index(rope) for rope in config.ropes)
        self._frequencies = tuple(inverse_frequencies(rope, config.head_dim).to(device) for rope in self._ropes)
        # Rounded to the compute dtype, as the models were trained: 55.5 and not 55.4256 in bfloat16.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))
        self._gated = ops.GATED[config.activation]
        shards = () if ranks is None else (Shard(rank, ranks.shard.size) for rank in range(ranks.shard.size))
        self._tokens_of = tuple(one.span(whole.vocab_size, whole.vocab_size) for one in shards)  # by rank

    def hidden(self, batch: Batch, pool: TorchPool, on_layer: OnLayer | None = None) -> Tensor:
        """Writes the KV of all tokens; returns the state before the last norm of those that are read, [U, E].

        `on_layer` is told how many layers have issued their writes.
        """
        pool.clear(batch.fresh_blocks)
        x_TE = self._embed(batch.token_T)
        if self._embedding_scale != 1.0:
            x_TE.mul_(self._embedding_scale)
        rotations = [
            rotation(frequency_R, rope.attention_factor, batch.position_T, x_TE.dtype)
            for rope, frequency_R in zip(self._ropes, self._frequencies, strict=True)
        ]
        delta_TE: Tensor | None = None  # what the last sublayer adds
        for index, layer in enumerate(self._weights.layers):
            normed_TE = self._add_norm(x_TE, delta_TE, layer.attention_norm_E)
            cos_sin = rotations[self._rope_of_layer[index]]
            attended_TN = self._attention(index, layer, normed_TE, cos_sin, batch, pool, on_layer)
            if index == self._config.num_layers - 1 and batch.read_U is not None:
                # Behind the last layer's attention tokens no longer meet: of a prompt only the last one goes on.
                if not len(batch.read_U):
                    return x_TE[:0]
                x_TE, attended_TN = x_TE[batch.read_U], attended_TN[batch.read_U]
            delta_TE = self._sum(layer.o(attended_TN))
            if layer.attention_post_norm_E is not None:
                delta_TE = self._norm(delta_TE, layer.attention_post_norm_E)
            normed_TE = self._add_norm(x_TE, delta_TE, layer.mlp_norm_E)
            delta_TE = self._sum(self._mlp(layer.mlp, normed_TE))
            if layer.mlp_post_norm_E is not None:
                delta_TE = self._norm(delta_TE, layer.mlp_post_norm_E)
        return x_TE if delta_TE is None else x_TE.add_(delta_TE)

    def logits(self, x_TE: Tensor) -> Tensor:
        """float32, [T, V]."""
        logits_TV = self._weights.head(self._norm(x_TE, self._weights.norm_E)).float()
        if self._ranks is not None:
            logits_TV = self._ranks.join(logits_TV, [end - begin for begin, end in self._tokens_of])
        softcap = self._config.logit_softcap
        return logits_TV if softcap is None else (logits_TV / softcap).tanh_().mul_(softcap)

    def _embed(self, token_T: Tensor) -> Tensor:
        table_VE, dtype = self._weights.embedding_VE, self._weights.dtype
        if self._ranks is None:
            return F.embedding(token_T, table_VE).to(dtype)
        begin, end = self._tokens_of[self._ranks.shard.rank]
        is_mine_T = (token_T >= begin) & (token_T < end)
        mine_TE = F.embedding(torch.where(is_mine_T, token_T - begin, 0), table_VE).to(dtype)
        return self._ranks.sum(mine_TE.mul_(is_mine_T[:, None]))  # zeros and one row: exact

    def _sum(self, x_TE: Tensor) -> Tensor:
        return x_TE if self._ranks is None else self._ranks.sum(x_TE)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TE: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        batch: Batch,
        pool: TorchPool,
        on_layer: OnLayer | None,
    ) -> Tensor:
        """What every token gets from its sequence, [T, H * D], before the output product."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        scale, softcap = self._config.attention_scale, self._config.attention_softcap
        qkv_TND = layer.qkv(x_TE).view(x_TE.shape[0], -1, self._config.head_dim)
        q_THD, k_TKD, v_TKD = qkv_TND.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD, k_TKD = self._norm(q_THD, layer.q_norm_D), self._norm(k_TKD, layer.k_norm_D)
        q_THD = batch.place(pool, index, q_THD, k_TKD, v_TKD, cos_sin)
        if on_layer is not None:
            on_layer(index + 1)
        return batch.attend(pool, index, q_THD, layer.window, scale, softcap)

    def _mlp(self, mlp: MlpWeights | ExpertWeights, x_TE: Tensor) -> Tensor:
        if isinstance(mlp, MlpWeights):
            return mlp.down(self._gated(mlp.gate_up(x_TE)))
        assert self._config.experts is not None
        return apply_experts(self._config.experts, mlp, self._gated, x_TE)

    def _add_norm(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor) -> Tensor:
        """The norm of x after `delta_TE`, if any, is added to it in place."""
        if delta_TE is None:
            return self._norm(x_TE, weight_E)
        return ops.add_rms_norm(x_TE, delta_TE, weight_E, self._config.norm_eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._config.norm_eps)

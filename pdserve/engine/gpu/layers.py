"""The two launches of a layer's attention over one pool, with the model's parameters filled in."""

# Shapes: T tokens, H query heads, K kv heads, N = H + 2 K, D head dim.

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from pdserve.engine.attention import Heads
from pdserve.engine.gpu.attention import attend
from pdserve.engine.gpu.attention_plan import AttentionScratch, Rows, block_of, choose_tiling, make_scratch
from pdserve.engine.gpu.place import make_table, place
from pdserve.engine.gpu.work import Division
from pdserve.engine.parameters import LayerWeights
from pdserve.engine.pool import TorchPool


@final
class LayerKernels:
    """Holds the tables of angles for positions up to `max_context_tokens`."""

    def __init__(self, pool: TorchPool, heads: Heads, dtype: torch.dtype, max_context_tokens: int) -> None:
        self.pool, self.heads, self._dtype = pool, heads, dtype
        self._angles = tuple(
            make_table(frequency_R, rope.attention_factor, max_context_tokens, dtype)
            for rope, frequency_R in zip(heads.ropes, heads.frequencies, strict=True)
        )

    def place(self, index: int, layer: LayerWeights, qkv_TND: Tensor, slot_T: Tensor, position_T: Tensor) -> Tensor:
        """Stores keys and values; the rotated queries, [T, H, D]."""
        heads = self.heads
        return place(
            self.pool,
            index,
            qkv_TND,
            slot_T,
            position_T,
            self._angles[heads.rope_of_layer[index]],
            num_heads=heads.num_heads,
            q_norm_D=layer.q_norm_D,
            k_norm_D=layer.k_norm_D,
            eps=heads.norm_eps,
        )

    def attend(self, index: int, layer: LayerWeights, q_THD: Tensor, rows: Rows, scratch: AttentionScratch) -> Tensor:
        """The attention output of every query of the rows, [T, H * D]."""
        heads = self.heads
        return attend(
            self.pool,
            index,
            q_THD,
            rows,
            scratch,
            window=layer.window,
            scale=heads.scale,
            softcap=heads.softcap,
        )

    def division(self, window: int | None, num_queries: int, scratch: AttentionScratch) -> Division:
        """How `attend` divides rows of up to `num_queries`, in a layer with that window."""
        heads = self.heads
        block_m = block_of(heads.num_heads // heads.num_kv_heads * num_queries)
        return Division(scratch.num_programs, choose_tiling(heads.head_dim, self._dtype, block_m).positions, window)

    def make_scratch(self, num_queries: int, num_processors: int) -> AttentionScratch:
        """Scratch for rows of up to `num_queries`."""
        heads = self.heads
        return make_scratch(
            num_queries,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            self._dtype,
            num_processors,
            self.pool.tensor.device,
        )

"""Attention of an eager batch on a CUDA device: prompt chunks and drafts.

One launch rotates and stores. Rows of up to 16 queries use paged attention. Chunks of all prompts use one flash call
per layer. Cases that flash attention does not support (float32, softcaps) use torch, chunk by chunk.
"""

# Shapes: T tokens, B rows, P pages of a table, H query heads, N query, key and value heads, D head dim, S positions.

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Final, final

import torch
from torch import Tensor

from pdserve.engine.attention import Context, Heads, MakeAttention, attend_chunk, contexts_of, rows_of
from pdserve.engine.attention import attend as attend_gathered
from pdserve.engine.batch import PackedBatch, RowGroup
from pdserve.engine.gpu.attention_plan import MOST_QUERIES, AttentionScratch, Rows
from pdserve.engine.gpu.flatten import flatten
from pdserve.engine.gpu.layers import LayerKernels
from pdserve.engine.gpu.prefill import attend_chunks, plan_chunks
from pdserve.engine.gpu.splits import edges
from pdserve.engine.gpu.switches import gpu_switches
from pdserve.engine.host_to_device import to_device
from pdserve.engine.interface import OnLayer
from pdserve.engine.parameters import LayerWeights
from pdserve.engine.pool import TorchPool

_WORDS: Final = 4  # int32 numbers in 16 bytes


def plan_rows(group: RowGroup, device: torch.device) -> Rows:
    """One copy to the device: tables, starts, lengths and first tokens are in one tensor."""
    width = max(len(table) for table in group.tables)
    lengths = [start + count for start, count in zip(group.starts, group.counts, strict=True)]
    flat = [block for table in group.tables for block in (*table, *[0] * (width - len(table)))]
    parts = (flat, group.starts, lengths, edges(group.counts))
    # Each begins at a multiple of 16 bytes, because Triton compiles another kernel for every combination of alignments.
    padded = [[*part, *[0] * (-len(part) % _WORDS)] for part in parts]
    packed = to_device([word for part in padded for word in part], device, torch.int32)
    pieces = packed.split([len(part) for part in padded])
    table_BP, start_B, length_B, first_B1 = (piece[: len(part)] for piece, part in zip(pieces, parts, strict=True))
    # One or the maximum, because each number of queries needs its own kernel.
    most = 1 if max(group.counts) == 1 else MOST_QUERIES
    return Rows(most, table_BP.view(len(lengths), width), start_B, length_B, first_B1)


def takes_flash(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether chunks can attend by flash attention."""
    if gpu_switches().prefill == "torch":
        return False
    is_small = heads.head_dim % 8 == 0 and heads.head_dim <= 256
    return heads.softcap is None and is_small and dtype in (torch.bfloat16, torch.float16)


@final
class TritonAttention:
    """The rows of `batch.short` use paged attention."""

    def __init__(
        self,
        batch: PackedBatch,
        on_layer: OnLayer | None,
        *,
        kernels: LayerKernels,
        scratch_of: Callable[[int], AttentionScratch],
        most_positions: int | None,
    ) -> None:
        """`on_layer` is called with the number of layers that have queued their writes. `scratch_of`: for rows of up to
        so many queries. `most_positions`: gathered by one flash call; None: chunks cannot use it."""
        self.token_T, self.read_U = batch.token_T, batch.read_U
        self._batch, self._kernels, self._scratch_of, self._on_layer = batch, kernels, scratch_of, on_layer
        pool, heads, device = kernels.pool, kernels.heads, batch.token_T.device
        self._slot_T = batch.block_T * pool.block_size + batch.offset_T
        pool.clear(batch.fresh_blocks)
        self._rows = None if batch.short is None else plan_rows(batch.short, device)
        self._chunks = None
        self._gathered: list[tuple[RowGroup, dict[int | None, Context]]] = []
        if most_positions is not None and batch.groups:
            self._chunks = plan_chunks(batch.groups, heads.windows, pool.block_size, most_positions, device)
        else:
            self._gathered = [(group, contexts_of(group, pool, heads)) for group in batch.groups]
        self._runs = {  # for `flatten`, per chunk: its blocks, which begin at position 0
            id(one): (one.block_BP.int(), to_device([0, one.chunk_end], device, torch.int32))
            for _, contexts in self._gathered
            for one in contexts.values()
            if one.chunk_end
        }

    def forward(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        batch, kernels = self._batch, self._kernels
        q_THD = kernels.place(index, layer, qkv_TND, self._slot_T, batch.position_T)
        if self._on_layer is not None:
            self._on_layer(index + 1)
        parts = []
        if self._rows is not None and batch.short is not None:
            scratch = self._scratch_of(self._rows.num_queries)
            parts.append(kernels.attend(index, layer, q_THD[: batch.short.num_tokens], self._rows, scratch))
        if self._chunks is not None:
            parts.append(attend_chunks(kernels.pool, index, q_THD, self._chunks, layer.window, kernels.heads.scale))
        for group, contexts in self._gathered:
            parts.append(self._attend(index, rows_of(q_THD, group), contexts[layer.window]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend(self, index: int, q_BQHD: Tensor, context: Context) -> Tensor:
        heads, pool, end = self._kernels.heads, self._kernels.pool, context.chunk_end
        if end is None or heads.softcap is not None:
            return attend_gathered(pool, index, q_BQHD, context, heads.scale, heads.softcap)
        k_SKD, v_SKD = flatten(pool, index, *self._runs[id(context)], end, end, q_BQHD.dtype)
        k_1KSD, v_1KSD = (x.transpose(0, 1)[None] for x in (k_SKD, v_SKD))
        return attend_chunk(q_BQHD, k_1KSD, v_1KSD, end, heads.scale)


def triton_attention(
    pool: TorchPool,
    heads: Heads,
    dtype: torch.dtype,
    max_context_tokens: int,
    num_processors: int,
    most_positions: int | None = None,
) -> MakeAttention:
    """Makes the attention of one engine's batches, which share the tables of angles and the scratch.

    `num_processors`: multiprocessors of the device.
    """
    kernels = LayerKernels(pool, heads, dtype, max_context_tokens)
    scratch_of = cache(partial(kernels.make_scratch, num_processors=num_processors))
    return partial(TritonAttention, kernels=kernels, scratch_of=scratch_of, most_positions=most_positions)

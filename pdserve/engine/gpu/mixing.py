"""Attention in a step without a graph on a CUDA device: prompt chunks and drafts.

One launch rotates and stores. Rows of up to 16 queries use paged attention. Chunks of all prompts use one flash call
per layer. Cases that flash attention does not support (float32, softcaps) use torch, chunk by chunk.
"""

# Shapes: T tokens, B rows, P pages of a table, H query heads, N query, key and value heads, D head dim, S positions.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, final

import torch
from torch import Tensor

from pdserve.engine.attention import Context, attend_chunk
from pdserve.engine.attention import attend as attend_gathered
from pdserve.engine.batch import Batch, Group
from pdserve.engine.gpu.attention import MOST_QUERIES, Rows, Scratch
from pdserve.engine.gpu.flatten import flatten
from pdserve.engine.gpu.layers import LayerKernels
from pdserve.engine.gpu.prefill import ChunkPlan, attend_chunks, plan_chunks
from pdserve.engine.gpu.splits import edges
from pdserve.engine.host_to_device import to_device
from pdserve.engine.interface import OnLayer
from pdserve.engine.mixing import Heads
from pdserve.engine.parameters import LayerWeights
from pdserve.engine.pool import TorchPool

_WORDS: Final = 4  # int32 numbers in 16 bytes


@dataclass(frozen=True)
class RowPlan:
    """Rows of few queries, the first tokens of the packed batch."""

    num_tokens: int
    rows: Rows


@final
class TritonRows:
    """A RowKernel."""

    most_queries = MOST_QUERIES

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> RowPlan:
        """One copy to the device: tables, starts, lengths and first tokens are in one tensor."""
        num_rows, width = len(tables), max(len(table) for table in tables)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        firsts = edges(counts)
        flat = [block for table in tables for block in (*table, *[0] * (width - len(table)))]
        parts = (flat, starts, lengths, firsts)
        # Each begins at a multiple of 16 bytes, because Triton compiles another kernel for every combination of
        # alignments.
        padded = [[*part, *[0] * (-len(part) % _WORDS)] for part in parts]
        packed = to_device([word for part in padded for word in part], self._device, torch.int32)
        pieces = packed.split([len(part) for part in padded])
        table_BP, start_B, length_B, first_B1 = (piece[: len(part)] for piece, part in zip(pieces, parts, strict=True))
        # One or the maximum, because each number of queries needs a kernel of its own.
        most = 1 if max(counts) == 1 else MOST_QUERIES
        rows = Rows(most, table_BP.view(num_rows, width), start_B, length_B, first_B1)
        return RowPlan(firsts[-1], rows)


@final
class FlashChunks:
    """A ChunkKernel. `most_positions` of contexts are gathered at a time."""

    def __init__(self, device: torch.device, block_size: int, most_positions: int) -> None:
        self._device, self._block_size, self._most_positions = device, block_size, most_positions

    def plan(
        self,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        first: int,
        windows: Iterable[int | None],
    ) -> ChunkPlan:
        return plan_chunks(
            tables,
            starts,
            counts,
            first=first,
            windows=windows,
            block_size=self._block_size,
            most_positions=self._most_positions,
            device=self._device,
        )


def takes_flash(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether chunks can attend by flash attention."""
    is_small = heads.head_dim % 8 == 0 and heads.head_dim <= 256
    return heads.softcap is None and is_small and dtype in (torch.bfloat16, torch.float16)


@final
class TritonMixer:
    """One step's attention, of a batch that was packed with `TritonRows`.

    `on_layer` is called with the number of layers that have queued their writes.
    """

    def __init__(
        self,
        batch: Batch,
        kernels: LayerKernels,
        scratch_of: Callable[[int], Scratch],
        on_layer: OnLayer | None = None,
    ) -> None:
        """`scratch_of`: for rows of up to so many queries."""
        self.token_T, self.read_U = batch.token_T, batch.read_U
        self._batch, self._kernels, self._scratch_of, self._on_layer = batch, kernels, scratch_of, on_layer
        pool = kernels.pool
        self._slot_T = batch.block_T * pool.block_size + batch.offset_T
        pool.clear(batch.fresh_blocks)
        chunks = [context for group in batch.groups for context in group.contexts.values() if context.chunk_end]
        device = batch.token_T.device
        self._runs = {  # for `flatten`, per chunk: its blocks, which begin at position 0
            id(one): (one.block_BP.int(), to_device([0, one.chunk_end], device, torch.int32)) for one in chunks
        }

    def mix(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        batch, kernels = self._batch, self._kernels
        q_THD = kernels.place(index, layer, qkv_TND, self._slot_T, batch.position_T)
        if self._on_layer is not None:
            self._on_layer(index + 1)
        parts = []
        plan: RowPlan | None = batch.paged
        if plan is not None:
            scratch = self._scratch_of(plan.rows.num_queries)
            parts.append(kernels.attend(index, layer, q_THD[: plan.num_tokens], plan.rows, scratch))
        if batch.chunks is not None:
            parts.append(attend_chunks(kernels.pool, index, q_THD, batch.chunks, layer.window, kernels.heads.scale))
        parts += [self._attend(index, group, layer.window, q_THD) for group in batch.groups]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend(self, index: int, group: Group, window: int | None, q_THD: Tensor) -> Tensor:
        heads, pool = self._kernels.heads, self._kernels.pool
        context: Context = group.contexts[window]
        q_BQHD = q_THD[group.first : group.first + group.num_rows * group.num_queries].view(
            group.num_rows, group.num_queries, heads.num_heads, heads.head_dim
        )
        end = context.chunk_end
        if end is None or heads.softcap is not None:
            return attend_gathered(pool, index, q_BQHD, context, heads.scale, heads.softcap)
        k_SKD, v_SKD = flatten(pool, index, *self._runs[id(context)], end, end, q_THD.dtype)
        k_1KSD, v_1KSD = (x.transpose(0, 1)[None] for x in (k_SKD, v_SKD))
        return attend_chunk(q_BQHD, k_1KSD, v_1KSD, end, heads.scale)


def make_mixing(
    pool: TorchPool, heads: Heads, dtype: torch.dtype, max_context_tokens: int, num_processors: int
) -> Callable[[Batch, OnLayer | None], TritonMixer]:
    """Makes the mixers of one engine, which share the tables of angles and the scratch. `num_processors`:
    multiprocessors of the device."""
    kernels = LayerKernels(pool, heads, dtype, max_context_tokens)
    scratch_of = cache(partial(kernels.make_scratch, num_processors=num_processors))
    return lambda batch, on_layer: TritonMixer(batch, kernels, scratch_of, on_layer)

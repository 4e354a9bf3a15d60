"""Attention of an eager batch on a CUDA device: prompt chunks and drafts.

One launch rotates and stores. Rows of up to 16 queries use paged attention. Chunks of all prompts use one flash call
per layer. Cases that flash attention does not support (float32, softcaps) use torch, chunk by chunk.

LayerKernels, the two launches of a layer, are used by graphs.py as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, final

import torch
from torch import Tensor

from pdserve.engine.gpu.kernels.attention import attend
from pdserve.engine.gpu.kernels.attention_plan import (
    MOST_QUERIES,
    AttentionScratch,
    Division,
    Rows,
    block_of,
    choose_tiling,
    make_scratch,
)
from pdserve.engine.gpu.kernels.fixed_shapes import edges
from pdserve.engine.gpu.kernels.kv import flatten, make_table, place
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.interface import OnLayer
from pdserve.engine.memory.pool import TorchPool
from pdserve.engine.model.attention import Context, Heads, MakeAttention, attend_chunk, contexts_of, rows_of
from pdserve.engine.model.attention import attend as attend_gathered
from pdserve.engine.model.batch import PackedBatch, RowGroup, to_device
from pdserve.engine.model.parameters import LayerWeights

# --- a layer's two launches -----------------------------------------------------------------------------------
# Its attention over one pool, with the model's parameters filled in.

# Shapes: T tokens, H query heads, K kv heads, N = H + 2 K, D head dim.


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


# --- prompt chunks --------------------------------------------------------------------------------------------
# All chunks of a step: one flash call per layer, after one copy of their contexts.
#
#     plan_chunks(groups, windows, ..) -> ChunkPlan
#     attend_chunks(pool, layer, q_THD, plan, window, scale) -> out_TN
#
# Flash attention reads KV in pages of 256 tokens or none at all, so contexts are gathered (kernels/kv.py). Its causal
# mask is aligned to the lower right corner of each row, so a context may begin at the first block inside a window. The
# contexts of one call are limited, because the copies take memory.

# Shapes: T tokens of the chunks, B rows of a call, P pages of a table, S positions of a call, H query heads,
#         K kv heads, D head dim.

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlashCall:
    """Some rows of a step, tokens first .. first + num_tokens - 1 of the chunks."""

    first: int
    num_tokens: int
    table_BP: Tensor  # int32: the blocks of the positions that are gathered
    query_B1: Tensor  # int32: where each row's tokens begin in the call, and the end
    key_B1: Tensor  # int32: where each row's gathered positions begin, and the end
    num_positions: int
    most_tokens: int  # of a row
    most_positions: int


@dataclass(frozen=True)
class ChunkPlan:
    first: int  # token of the packed batch
    calls: dict[int | None, tuple[FlashCall, ...]]  # by window


def plan_chunks(
    groups: Sequence[RowGroup],
    windows: Iterable[int | None],
    block_size: int,
    most_positions: int,
    device: torch.device,
) -> ChunkPlan:
    """All rows of consecutive groups. A call gathers up to `most_positions` positions, or those of one longer row."""
    tables = [table for group in groups for table in group.tables]
    starts = [start for group in groups for start in group.starts]
    counts = [count for group in groups for count in group.counts]
    calls = {}
    for window in windows:
        skipped = [0 if window is None else max(0, start - window + 1) // block_size for start in starts]
        lengths = [
            start + count - skip * block_size for start, count, skip in zip(starts, counts, skipped, strict=True)
        ]
        made, at = [], 0
        for rows in _runs(lengths, most_positions):
            pages = [tables[row][skipped[row] : -(-(starts[row] + counts[row]) // block_size)] for row in rows]
            queries, keys = [counts[row] for row in rows], [lengths[row] for row in rows]
            made.append(_call(at, pages, queries, keys, device))
            at += made[-1].num_tokens
        calls[window] = tuple(made)
    return ChunkPlan(groups[0].first, calls)


def attend_chunks(
    pool: TorchPool, layer: int, q_THD: Tensor, plan: ChunkPlan, window: int | None, scale: float | None
) -> Tensor:
    """The attention output of every token of the chunks, [T, H * D]. `q_THD` belongs to the packed batch."""
    parts = []
    for call in plan.calls[window]:
        k_SKD, v_SKD = flatten(
            pool, layer, call.table_BP, call.key_B1, call.num_positions, call.most_positions, q_THD.dtype
        )
        begin = plan.first + call.first
        parts.append(flash(q_THD[begin : begin + call.num_tokens], k_SKD, v_SKD, call, window, scale).flatten(1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def flash(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: FlashCall, window: int | None, scale: float | None
) -> Tensor:
    """[T, H, D]. The operator behind torch.nn.attention.varlen, whose own arguments differ between torch's versions."""
    out_THD: Tensor
    left = -1 if window is None else window - 1
    out_THD, *_ = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_SKD,
        v_SKD,
        call.query_B1,
        call.key_B1,
        call.most_tokens,
        call.most_positions,
        0.0,  # dropout
        True,  # causal
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )
    return out_THD


@cache
def use_fa3(device: torch.device) -> bool:
    """Replaces torch's own kernels by FlashAttention-3 if the device is a Hopper and the package `flash_attn_3` is
    installed. True if it did."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from torch.nn import attention

    activate = getattr(attention, "activate_flash_attention_impl", None)  # since torch 2.11
    if activate is None:
        return False
    try:
        activate("FA3")  # imports flash_attn_interface
    except (ImportError, RuntimeError, ValueError) as error:
        log.info("attention of prompts is torch's own", extra={"why_not_fa3": str(error)})
        return False
    log.info("attention of prompts is FlashAttention-3")
    return True


def _runs(lengths: Sequence[int], most: int) -> Iterator[range]:
    """Number of rows for one call."""
    first, total = 0, 0
    for row, length in enumerate(lengths):
        if row > first and total + length > most:
            yield range(first, row)
            first, total = row, 0
        total += length
    yield range(first, len(lengths))


def _call(
    first: int, pages: Sequence[Sequence[int]], queries: Sequence[int], keys: Sequence[int], device: torch.device
) -> FlashCall:
    width = max(map(len, pages))
    query_of, key_of = edges(queries), edges(keys)
    return FlashCall(
        first=first,
        num_tokens=query_of[-1],
        table_BP=to_device([[*page, *[0] * (width - len(page))] for page in pages], device, torch.int32),
        query_B1=to_device(query_of, device, torch.int32),
        key_B1=to_device(key_of, device, torch.int32),
        num_positions=key_of[-1],
        most_tokens=max(queries),
        most_positions=max(keys),
    )


# --- the whole batch ------------------------------------------------------------------------------------------

# Shapes: T tokens, B rows, P pages of a table, H query heads, N query, key and value heads, D head dim, S positions.

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

"""Attention of all prompt chunks of a step: one flash call per layer, after one copy of their contexts.

    plan_chunks(groups, windows, ..) -> ChunkPlan
    attend_chunks(pool, layer, q_THD, plan, window, scale) -> out_TN

Flash attention reads KV in pages of 256 tokens or none at all, so contexts are gathered (flatten.py). Its causal mask
is aligned to the lower right corner of each row, so a context may begin at the first block inside a window. The
contexts of one call are limited, because the copies take memory.
"""

# Shapes: T tokens of the chunks, B rows of a call, P pages of a table, S positions of a call, H query heads,
#         K kv heads, D head dim.

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pdserve.engine.batch import RowGroup
from pdserve.engine.gpu.flatten import flatten
from pdserve.engine.gpu.splits import edges
from pdserve.engine.host_to_device import to_device
from pdserve.engine.pool import TorchPool

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

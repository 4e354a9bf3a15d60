"""Turns the rows of a step into tensors: packed tokens with decode rows first, places for KV, and attention groups."""

# Shapes: T tokens in the packed batch, R rows, U tokens whose final state is read.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import Context, attend, make_context
from pdserve.engine.host_to_device import to_device
from pdserve.engine.interface import Row
from pdserve.engine.paged import PagedAttention
from pdserve.engine.pool import TorchPool
from pdserve.engine.rope import rotate


class RowKernel(Protocol):
    """Paged attention for rows of few queries, on the CPU or the GPU."""

    @property
    def most_queries(self) -> int: ...

    def plan(self, tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> Any:
        """Row i has counts[i] queries, at positions from starts[i] on. The result has `num_tokens`, their sum."""
        ...


class ChunkKernel(Protocol):
    """Attention for all rows of many queries at once, on the GPU."""

    def plan(
        self,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        first: int,
        windows: Iterable[int | None],
    ) -> Any:
        """Rows as above; their first token is number `first` of the packed batch."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together: tokens first .. first + num_rows * num_queries - 1 of the packed batch."""

    first: int
    num_rows: int
    num_queries: int
    contexts: dict[int | None, Context]  # by window


@dataclass(frozen=True, slots=True)
class Batch:
    token_T: Tensor
    position_T: Tensor
    block_T: Tensor  # place of the token's KV: block and offset in it
    offset_T: Tensor
    fresh_blocks: Tensor  # blocks that are new in this step and not filled by it
    kernel: RowKernel | None
    paged: Any | None  # the kernel's plan for the first tokens
    chunks: Any | None  # a ChunkKernel's plan for all other tokens
    groups: tuple[Group, ...]  # rows of neither plan
    # Packed indices of the tokens whose final state is needed: the sampled positions of all rows, then the targets of
    # all rows. None if that is every token in order, as in a step that only decodes.
    read_U: Tensor | None

    def place(
        self, pool: TorchPool, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Stores the step's rotated keys and its values, and returns the rotated queries."""
        if isinstance(self.kernel, PagedAttention):
            return self.kernel.place(layer, q_THD, k_TKD, v_TKD, *cos_sin, self.block_T, self.offset_T)
        pool.write(layer, rotate(k_TKD, *cos_sin), v_TKD, self.block_T, self.offset_T)
        return rotate(q_THD, *cos_sin)

    def attend(
        self,
        pool: TorchPool,
        layer: int,
        q_THD: Tensor,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """The attention output of every token of the step, [T, H * D]; see attention.attend."""
        parts = []
        if isinstance(self.kernel, PagedAttention) and self.paged is not None:
            q_paged_THD = q_THD[: self.paged.num_tokens]
            parts.append(self.kernel.attend(layer, q_paged_THD, self.paged, window, scale, softcap))
        for group in self.groups:
            q_group_THD = q_THD[group.first : group.first + group.num_rows * group.num_queries]
            q_BQHD = q_group_THD.view(group.num_rows, group.num_queries, *q_THD.shape[1:])
            parts.append(attend(pool, layer, q_BQHD, group.contexts[window], scale, softcap))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def pack(
    rows: Sequence[Row],
    windows: Iterable[int | None],
    block_size: int,
    device: torch.device,
    kernel: RowKernel | None = None,
    chunk_kernel: ChunkKernel | None = None,
) -> Batch:
    """Rows that `kernel` accepts come first and attend together.

    `chunk_kernel` takes all others. Without one, decode rows form a group for each number of drafts, and each prefill
    chunk is a group of its own.
    """
    kinds = tuple(dict.fromkeys(windows))
    most_paged = 0 if kernel is None else kernel.most_queries
    paged: list[int] = []
    decode: defaultdict[int, list[int]] = defaultdict(list)
    prefill: list[list[int]] = []
    for index, row in enumerate(rows):
        if row.num_queries <= most_paged:
            paged.append(index)
        elif len(row.tokens) == 1:
            decode[len(row.drafts)].append(index)
        else:
            prefill.append([index])
    together = [*(decode[count] for count in sorted(decode)), *prefill]
    tokens: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    fresh: list[int] = []
    first_R = [0] * len(rows)  # packed index of each row's first token
    firsts: list[int] = []
    for members in [paged, *together]:
        firsts.append(len(tokens))
        for index in members:
            row = rows[index]
            num_queries = row.num_queries
            end = row.start + num_queries
            first_R[index] = len(tokens)
            tokens += row.tokens
            tokens += row.drafts
            if num_queries == 1:
                positions.append(row.start)
                blocks.append(row.blocks[row.start // block_size])
            else:
                positions += range(row.start, end)
                blocks += [row.blocks[position // block_size] for position in range(row.start, end)]
            if end % block_size and end - end % block_size >= row.start:
                fresh.append(row.blocks[end // block_size])
    groups = []
    chunks = None
    if chunk_kernel is not None and together:
        members = [index for each in together for index in each]
        chunks = chunk_kernel.plan(
            [rows[index].blocks for index in members],
            [rows[index].start for index in members],
            [rows[index].num_queries for index in members],
            first=firsts[1],
            windows=kinds,
        )
        together, firsts = [], firsts[:1]
    for first, members in zip(firsts[1:], together, strict=True):
        tables, starts = [rows[index].blocks for index in members], [rows[index].start for index in members]
        num_queries = rows[members[0]].num_queries
        contexts = {window: make_context(tables, starts, num_queries, window, block_size, device) for window in kinds}
        groups.append(Group(first, len(members), num_queries, contexts))
    read: list[int] = []
    for row, first in zip(rows, first_R, strict=True):
        last = first + len(row.tokens) - 1
        read += range(last, last + row.num_samples)
    for row, first in zip(rows, first_R, strict=True):
        read += range(first, first + len(row.targets))
    position_T = to_device(positions, device)
    return Batch(
        token_T=to_device(tokens, device),
        position_T=position_T,
        block_T=to_device(blocks, device),
        offset_T=position_T % block_size,
        fresh_blocks=to_device(fresh, device),
        kernel=kernel,
        paged=None if kernel is None or not paged else plan_paged(kernel, [rows[index] for index in paged]),
        chunks=chunks,
        groups=tuple(groups),
        read_U=None if read == list(range(len(tokens))) else to_device(read, device),
    )


def plan_paged(kernel: RowKernel, rows: Sequence[Row]) -> Any:
    tables, starts = [row.blocks for row in rows], [row.start for row in rows]
    return kernel.plan(tables, starts, [row.num_queries for row in rows])

"""Turns the rows of a step into tensors: packed tokens with short rows first, places for KV, and groups of rows that
attend together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.interface import Row

# --- copies to the device -------------------------------------------------------------------------------------


def to_device(
    values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of `values`. On CUDA the copy is queued from pinned memory without blocking. From unpinned memory, as
    with `torch.tensor(values, device=...)`, each copy would wait for all work before it, so that the host could not
    prepare a step while another one runs."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if isinstance(values, np.ndarray):  # torch.tensor cannot pin what it makes of an array
        host = torch.from_numpy(np.asarray(values, order="C")).to(dtype).pin_memory()
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=True)
    return host.to(device, non_blocking=True)


# --- batch ----------------------------------------------------------------------------------------------------

# Shapes: T tokens in the packed batch, U tokens whose final state is read.


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that attend together: tokens first .. first + num_tokens - 1 of the packed batch.

    Row i has counts[i] queries, at positions from starts[i] on; its tokens follow those of row i - 1.
    """

    first: int
    num_tokens: int
    tables: list[Sequence[int]]  # the blocks of each row
    starts: list[int]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    token_T: Tensor
    position_T: Tensor
    block_T: Tensor  # place of the token's KV: block and offset in it
    offset_T: Tensor
    # Blocks that are new in this step and not filled by it, each with its number of filled positions.
    fresh_blocks: tuple[tuple[int, int], ...]
    short: RowGroup | None  # rows of few queries, first in the batch
    groups: tuple[RowGroup, ...]  # the other rows; those of a group have equal numbers of queries
    # Packed indices of the tokens whose final state is needed: the sampled positions of all rows, then the targets of
    # all rows. None if that is every token in order, as in a step that only decodes.
    read_U: Tensor | None


def pack(rows: Sequence[Row], block_size: int, device: torch.device, most_short: int = 0) -> PackedBatch:
    """Rows of up to `most_short` queries come first and form the group `short`.

    Of the others, decode rows form a group for each number of drafts, and each prefill chunk is a separate group.
    """
    short: list[int] = []
    decode: defaultdict[int, list[int]] = defaultdict(list)
    prefill: list[list[int]] = []
    for index, row in enumerate(rows):
        if row.num_queries <= most_short:
            short.append(index)
        elif len(row.tokens) == 1:
            decode[len(row.drafts)].append(index)
        else:
            prefill.append([index])
    tokens: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    fresh: list[tuple[int, int]] = []
    first_of = [0] * len(rows)  # packed index of each row's first token
    groups: list[RowGroup] = []
    for members in [short, *(decode[count] for count in sorted(decode)), *prefill]:
        first, counts = len(tokens), []
        for index in members:
            row = rows[index]
            num_queries = row.num_queries
            end = row.start + num_queries
            counts.append(num_queries)
            first_of[index] = len(tokens)
            tokens += row.tokens
            tokens += row.drafts
            if num_queries == 1:
                positions.append(row.start)
                blocks.append(row.blocks[row.start // block_size])
            else:
                positions += range(row.start, end)
                blocks += [row.blocks[position // block_size] for position in range(row.start, end)]
            if end % block_size and end - end % block_size >= row.start:
                fresh.append((row.blocks[end // block_size], end % block_size))
        tables, starts = [rows[index].blocks for index in members], [rows[index].start for index in members]
        groups.append(RowGroup(first, len(tokens) - first, tables, starts, counts))
    read: list[int] = []
    for row, first in zip(rows, first_of, strict=True):
        last = first + len(row.tokens) - 1
        read += range(last, last + row.num_samples)
    for row, first in zip(rows, first_of, strict=True):
        read += range(first, first + len(row.targets))
    token_T, position_T, block_T = to_device([tokens, positions, blocks], device).unbind()
    return PackedBatch(
        token_T=token_T,
        position_T=position_T,
        block_T=block_T,
        offset_T=position_T % block_size,
        fresh_blocks=tuple(fresh),
        short=groups[0] if short else None,
        groups=tuple(groups[1:]),
        read_U=None if read == list(range(len(tokens))) else to_device(read, device),
    )

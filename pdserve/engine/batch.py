"""Turns the rows of a step into tensors: tokens packed with decode rows first, where KV goes, who sees what."""

# Shapes: T tokens in the packed batch, R rows.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.attention import Context, make_context
from pdserve.engine.interface import Row


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
    block_T: Tensor  # where the token's KV goes: block and offset in it
    offset_T: Tensor
    fresh_blocks: Tensor  # begin a life in this step and are not filled by it
    groups: tuple[Group, ...]
    last_R: tuple[int, ...]  # packed index of each row's last token, in the order of the rows; its drafts follow


def pack(rows: Sequence[Row], windows: Iterable[int | None], block_size: int, device: torch.device) -> Batch:
    """Decode rows form a group for each number of drafts; each prefill chunk is a group of its own."""
    kinds = tuple(dict.fromkeys(windows))
    decode: defaultdict[int, list[int]] = defaultdict(list)
    prefill: list[list[int]] = []
    for index, row in enumerate(rows):
        if len(row.tokens) == 1:
            decode[len(row.drafts)].append(index)
        else:
            prefill.append([index])
    tokens: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    fresh: list[int] = []
    last_R = [0] * len(rows)
    groups: list[Group] = []
    for members in [*(decode[count] for count in sorted(decode)), *prefill]:
        first, num_queries = len(tokens), rows[members[0]].num_queries
        for index in members:
            row = rows[index]
            end = row.start + num_queries
            last_R[index] = len(tokens) + len(row.tokens) - 1
            tokens += row.tokens
            tokens += row.drafts
            positions += range(row.start, end)
            blocks += [row.blocks[position // block_size] for position in range(row.start, end)]
            if end % block_size and end - end % block_size >= row.start:
                fresh.append(row.blocks[end // block_size])
        tables, starts = [rows[index].blocks for index in members], [rows[index].start for index in members]
        contexts = {window: make_context(tables, starts, num_queries, window, block_size, device) for window in kinds}
        groups.append(Group(first, len(members), num_queries, contexts))
    position_T = torch.tensor(positions, device=device)
    return Batch(
        token_T=torch.tensor(tokens, device=device),
        position_T=position_T,
        block_T=torch.tensor(blocks, device=device),
        offset_T=position_T % block_size,
        fresh_blocks=torch.tensor(fresh, device=device, dtype=torch.int64),
        groups=tuple(groups),
        last_R=tuple(last_R),
    )

"""Divides the tiles of a step's rows among attention's programs, on the device: splits.py as a kernel.

    split(start_B, length_B, division) -> work

It runs once per step for each of the model's windows, within the graph, because lengths change from step to step. In a
graph that of the first window is part of the launch that prepares the rows (prepare.py).
"""

# Shapes: B rows, W programs of a kv head.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.splits import least_tiles

#: Words of the result before the rows' edges: share, tiles in all, then each program's first and last row.
HEAD_WORDS: Final = 2
_ROWS: Final = 512  # at a time
_PROGRAMS: Final = 16  # programs of attention per program of this kernel


@triton.jit
def tile_range(start, length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first tile that any query of the row sees, and the end of its tiles."""
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(start - WINDOW + 1, 0) // TILE
    return first, tl.maximum(tl.cdiv(length, TILE), first + 1)


@triton.jit
def _counts(start_of, length_of, row, num_rows, WINDOW: tl.constexpr, TILE: tl.constexpr):
    exists = row < num_rows
    start = tl.load(start_of + row, mask=exists, other=0)
    length = tl.load(length_of + row, mask=exists, other=0)
    first, end = tile_range(start, length, WINDOW, TILE)
    return tl.where(exists, end - first, 0)


@dataclass(frozen=True, slots=True)
class Division:
    """Among `num_programs` of each kv head, in tiles of so many positions."""

    num_programs: int
    tile: int
    window: int | None

    def new_work(self, start_B: Tensor) -> Tensor:
        """Memory for the result of `split`."""
        size = HEAD_WORDS + 2 * self.num_programs + len(start_B) + 1
        return torch.empty(size, dtype=torch.int32, device=start_B.device)

    @property
    def num_parts(self) -> int:
        """Programs that compute it."""
        return -(-self.num_programs // _PROGRAMS)

    @property
    def constants(self) -> dict[str, int]:
        """Of `split_part`."""
        sizes = {"HEAD": HEAD_WORDS, "ROWS": _ROWS, "PROGRAMS": _PROGRAMS}
        return {"WINDOW": self.window or 0, "TILE": self.tile, "LEAST": least_tiles(self.tile), **sizes}


@triton.jit
def split_part(
    part,
    work,  # [HEAD + 2 W + B + 1]
    start_of,  # [B]
    length_of,  # [B]
    num_rows,
    num_programs,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """What one program does; `part`: its number."""
    r = tl.arange(0, ROWS)
    total = num_rows * 0
    for base in range(0, num_rows, ROWS):
        total += tl.sum(_counts(start_of, length_of, base + r, num_rows, WINDOW, TILE), axis=0)
    share = tl.maximum(tl.cdiv(total, num_programs), LEAST)
    edges = work + HEAD + 2 * num_programs
    writes = part == 0
    tl.store(work, share, mask=writes)
    tl.store(work + 1, total, mask=writes)
    tl.store(edges, 0, mask=writes)

    program = part * PROGRAMS + tl.arange(0, PROGRAMS)
    begin = program * share
    last = tl.minimum(begin + share, total) - 1
    first_row = tl.zeros([PROGRAMS], tl.int32)
    last_row = tl.zeros([PROGRAMS], tl.int32)
    done = num_rows * 0
    for base in range(0, num_rows, ROWS):
        exists = base + r < num_rows
        count = _counts(start_of, length_of, base + r, num_rows, WINDOW, TILE)
        end = done + tl.cumsum(count, axis=0)
        done += tl.sum(count, axis=0)
        tl.store(edges + 1 + base + r, end, mask=exists & writes)
        # Counts the rows that end before the tile.
        first_row += tl.sum(((end[None, :] <= begin[:, None]) & exists[None, :]).to(tl.int32), axis=1)
        last_row += tl.sum(((end[None, :] <= last[:, None]) & exists[None, :]).to(tl.int32), axis=1)
    is_one = program < num_programs
    # If a program has no tile, its first row is after the last one.
    tl.store(work + HEAD + program, first_row, mask=is_one)
    tl.store(work + HEAD + num_programs + program, tl.where(begin < total, last_row, -1), mask=is_one)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _split(
    work,
    start_of,
    length_of,
    num_rows,
    num_programs,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    split_part(
        tl.program_id(0),
        work,
        start_of,
        length_of,
        num_rows,
        num_programs,
        WINDOW,
        TILE,
        LEAST,
        HEAD,
        ROWS,
        PROGRAMS,
    )


def split(start_B: Tensor, length_B: Tensor, division: Division) -> Tensor:
    """int32: share, all tiles, first and last row of each program, then the beginning of each row's tiles, and the
    end."""
    work = division.new_work(start_B)
    of = division.num_programs
    _split[(division.num_parts,)](work, start_B, length_B, len(length_B), of, num_warps=4, **division.constants)
    return work

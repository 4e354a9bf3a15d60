"""The work of a decode step's attention. The host chooses its rows, the tiling of a program and the scratch; the device
divides the tiles among the programs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.kernels.fixed_shapes import least_tiles, num_programs
from pdserve.engine.gpu.kernels.switches import gpu_switches

# --- division of the tiles among programs ---------------------------------------------------------------------
# fixed_shapes.py as a kernel:
#
#     split(start_B, length_B, division) -> work
#
# It runs once per step for each of the model's windows, within the graph, because lengths change from step to step. In
# a graph that of the first window is part of the launch that prepares the rows (`prepare`).

# Shapes: B rows, W programs of a kv head.

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


# --- rows, tiling and scratch ---------------------------------------------------------------------------------

# Shapes: B rows, P pages of a table, K kv heads, D head dim, M queries of a program, W programs of a kv head.

MOST_QUERIES: Final = 16


@dataclass(frozen=True)
class Rows:
    """The rows of a step, on the device. A graph's rows all have `num_queries`; others may have fewer."""

    num_queries: int  # maximum of a row
    table_BP: Tensor  # int32: the row's blocks, in order
    start_B: Tensor  # int32: position of the first query
    length_B: Tensor  # int32: number of positions, including the queries; 0 for a padding row
    first_B1: Tensor | None = None  # int32 [B + 1]: each row's first token, and the end; None: num_queries apart
    # How their tiles are divided, computed by the first layer that needs it.
    work: dict[Division, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def work_of(self, division: Division) -> Tensor:
        if division not in self.work:
            self.work[division] = split(self.start_B, self.length_B, division)
        return self.work[division]


@dataclass(frozen=True)
class Tiling:
    """Parameters of a program: positions at a time, warps, and loads in flight."""

    positions: int
    num_warps: int
    num_stages: int
    per_processor: int  # programs that a multiprocessor holds at once
    most_registers: int | None = None  # registers per thread; None: chosen by the compiler


@dataclass(frozen=True)
class AttentionScratch:
    """Partial results for the merge; one buffer for all layers and graphs of a stream."""

    num_programs: int  # W, of each kv head
    out: Tensor  # float32 [K, 2 W, M, D]
    weight: Tensor  # float32 [K, 2 W, M]: log2 of the sum of exponentials
    counts: Tensor  # int32 [K, W]: 0 between two launches


def make_scratch(
    num_queries: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_processors: int,
    device: torch.device,
) -> AttentionScratch:
    """`num_queries`: maximum per row; `num_processors`: multiprocessors of the device."""
    queries = num_heads // num_kv_heads * num_queries
    tiling = choose_tiling(head_dim, dtype, block_of(queries))
    return scratch_of(
        num_programs(num_kv_heads, num_processors, tiling.per_processor), queries, num_kv_heads, head_dim, device
    )


def scratch_of(programs: int, queries: int, num_kv_heads: int, head_dim: int, device: torch.device) -> AttentionScratch:
    """`queries`: of all heads of a kv head."""
    size = (num_kv_heads, 2 * programs, queries)
    out, weight = torch.empty((*size, head_dim), device=device), torch.empty(size, device=device)
    counts = torch.zeros((num_kv_heads, programs), dtype=torch.int32, device=device)
    return AttentionScratch(programs, out, weight, counts)


def block_of(queries: int) -> int:
    """M: tl.dot requires at least 16."""
    return max(16, int(triton.next_power_of_2(queries)))


def choose_tiling(head_dim: int, dtype: torch.dtype, num_query_rows: int, *, is_scaled: bool = False) -> Tiling:
    """By shared memory: a tile's keys and values are at most 16 KiB each. See tests/gpu/check_kernels.py --tune.

    `is_scaled`: the pool is int8 or fp8.
    """
    tiling = _staged_tiling(head_dim, dtype, num_query_rows, is_scaled=is_scaled)
    return replace(tiling, num_stages=1) if gpu_switches().attention == "few-stages" else tiling


def _staged_tiling(head_dim: int, dtype: torch.dtype, num_query_rows: int, *, is_scaled: bool) -> Tiling:
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    positions = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    # Stages include the load of the block's number: with five, the next tile is being loaded while one is computed;
    # with three, none is. float32 keeps three, and so do 64 queries of a scaled pool, which would spill.
    if num_query_rows >= 64:
        return Tiling(positions, 8, 3 if is_scaled or dtype == torch.float32 else 5, 2, 128)
    # Without a limit the compiler uses at most 168 registers up to this width, so three programs fit into 65,536.
    most_registers = 168 if row_bytes > 256 and dtype != torch.float32 else None
    return Tiling(positions, 4, 3 if dtype == torch.float32 else 5, 3, most_registers)


# --- preparation of the rows ----------------------------------------------------------------------------------
# Their tokens, which the previous step may have sampled, their block tables, and the division of their tiles. One
# launch instead of six small ones.

# Shapes: B rows, S sequence slots, P pages of a table.

_BLOCK: Final = 256


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _prepare(
    follows,
    sampled,
    token_in,
    seq_slot_of,
    table,
    token_out,
    table_out,
    work,
    start_of,
    length_of,
    num_pages,
    num_rows,
    num_programs,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= num_rows:  # the programs after those of the rows
        if tl.program_id(1) == 0:
            split_part(
                row - num_rows,
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
        return
    if tl.program_id(1) == 0:
        place = tl.load(follows + row)
        known = tl.load(token_in + row)
        tl.store(token_out + row, tl.where(place >= 0, tl.load(sampled + tl.maximum(place, 0)), known))
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(table + tl.load(seq_slot_of + row) * num_pages + page, mask=page < num_pages)
    tl.store(table_out + row.to(tl.int64) * num_pages + page, block, mask=page < num_pages)


def prepare(
    follows_B: Tensor,
    sampled_B: Tensor,
    token_B: Tensor,
    seq_slot_B: Tensor,
    table_SP: Tensor,
    out_B: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    division: Division,
) -> tuple[Tensor, Tensor]:
    """Writes the tokens into `out_B`, int64 as the others, and returns the tables, int32 [B, P], and `split`'s result.

    `follows_B`: the row of `sampled_B` that is a row's token, or -1.
    """
    num_rows, num_pages = len(token_B), table_SP.shape[1]
    table_BP = torch.empty((num_rows, num_pages), dtype=table_SP.dtype, device=table_SP.device)
    work = division.new_work(start_B)
    grid = (num_rows + division.num_parts, triton.cdiv(num_pages, _BLOCK))
    _prepare[grid](
        follows_B,
        sampled_B,
        token_B,
        seq_slot_B,
        table_SP,
        out_B,
        table_BP,
        work,
        start_B,
        length_B,
        num_pages,
        num_rows,
        division.num_programs,
        BLOCK=_BLOCK,
        **division.constants,
    )
    return table_BP, work

"""The host's part of the attention of decode rows: the rows of a step, the tiling of a program, and the scratch."""

# Shapes: B rows, P pages of a table, K kv heads, D head dim, M queries of a program, W programs of a kv head.

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.gpu.splits import num_programs
from pdserve.engine.gpu.switches import gpu_switches
from pdserve.engine.gpu.work import Division, split

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

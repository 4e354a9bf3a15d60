"""How the attention of a decode step is divided among a fixed number of programs, for any lengths. Pure.

All rows' tiles of positions form one sequence, row by row. Program p of a kv head takes tiles p * share to (p + 1) *
share - 1 of it, so the longest program has at most one tile more than the mean. A row whose tiles are all in one
program is finished there. The other rows have partial results, which a second kernel merges: a program has at most two
of them, for its first and its last row. The kernels of work.py and attention.py follow this module. The number of
programs depends only on the device, so a CUDA graph is valid for all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

LEAST_POSITIONS: Final = 128  # per program: with fewer, its start and the merge cost more than they gain


@dataclass(frozen=True, slots=True)
class TilePart:
    """Tiles begin .. end - 1 of a row, which one program computes for one kv head."""

    program: int
    row: int
    begin: int
    end: int
    slot: int | None  # place of its partial result; None: it is the whole row


def num_programs(num_kv_heads: int, num_processors: int, per_processor: int) -> int:
    """Number of programs per kv head, so that all of them run at once."""
    return max(1, per_processor * num_processors // num_kv_heads)


def least_tiles(tile: int) -> int:
    return max(1, LEAST_POSITIONS // tile)


def tile_range(start: int, length: int, tile: int, window: int = 0) -> tuple[int, int]:
    """The first tile that a query of the row sees, and the end. A row without positions also has a tile, for its
    zeros."""
    first = max(start - window + 1, 0) // tile if window else 0
    return first, max(-(-length // tile), first + 1)


def edges(counts: Sequence[int]) -> list[int]:
    """The beginning of each row's tiles in the sequence of all tiles, and the end."""
    return list(accumulate(counts, initial=0))


def share_of(num_tiles: int, programs: int, least: int) -> int:
    """Tiles of each program; the last program with tiles may have fewer."""
    return max(least, -(-num_tiles // programs))


def parts(ranges: Sequence[tuple[int, int]], programs: int, least: int) -> list[TilePart]:
    """In the order of programs; `ranges` are those of the rows, as `tile_range` gives them."""
    edge_of = edges([end - first for first, end in ranges])
    share, total = share_of(edge_of[-1], programs, least), edge_of[-1]
    found: list[TilePart] = []
    row = 0
    for program in range(programs):
        at, stop = program * share, min((program + 1) * share, total)
        begins = at
        while at < stop:
            upto = min(stop, edge_of[row + 1])
            first = ranges[row][0] - edge_of[row]
            is_whole = edge_of[row] >= begins and edge_of[row + 1] <= stop
            slot = None if is_whole else 2 * program + (edge_of[row] > begins)
            found.append(TilePart(program, row, first + at, first + upto, slot))
            at = upto
            row += at == edge_of[row + 1]
    return found


def imbalance(found: Sequence[TilePart], part_tiles: float = 0.0) -> float:
    """The load of the fullest program over the mean of the non-empty ones; `part_tiles` is the additional cost of a
    part."""
    loads: dict[int, float] = {}
    for part in found:
        loads[part.program] = loads.get(part.program, 0.0) + part.end - part.begin + part_tiles
    return max(loads.values()) * len(loads) / sum(loads.values())

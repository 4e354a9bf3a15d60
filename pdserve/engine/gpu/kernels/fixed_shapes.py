"""How steps of any size use a graph, whose shapes are fixed: shares of the rows' positions, buckets of rows, and slots
of the table of counts. Pure.

Attention is divided among a fixed number of programs. All rows' tiles of positions form one sequence, row by row.
Program p of a kv head takes tiles p * share to (p + 1) * share - 1 of it, so the longest program has at most one tile
more than the mean. A row whose tiles are all in one program is finished there. The other rows have partial results,
which a second kernel merges: a program has at most two of them, for its first and its last row. The kernels of
attention_plan.py and attention.py follow this rule. The number of programs depends only on the device, so a CUDA graph
is valid for all lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, final

from pdserve.core.errors import InternalError

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


# --- buckets of rows ------------------------------------------------------------------------------------------
# The numbers of rows for which graphs are captured, and the graph of a step. A matrix product of up to some hundred
# rows takes little longer than that of one row, so padding is cheap, but each graph costs capture time and memory. From
# 16 rows on, the buckets keep padding under a fifth.

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def buckets_for(most_rows: int) -> tuple[int, ...]:
    """Ascending, the last one holding `most_rows`."""
    smaller = [size for size in SIZES if size < most_rows]
    return (*smaller, most_rows)


def verified_tokens(most_rows: int, most_queries: int) -> int:
    """The maximum number of tokens of a step with drafts that uses a graph. It is not larger than the largest bucket of
    rows, because logits take memory."""
    return max(most_rows, min(SIZES[-1], most_rows * most_queries))


def choose(buckets: Sequence[int], num_rows: int) -> int | None:
    """The smallest bucket for the rows; None if there is none."""
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else None


# --- slots of the table of counts -----------------------------------------------------------------------------
# Assigns slots to sequences, and knows whether the counts are complete.
#
# A sequence is identified by its list of tokens, to which tokens are only appended. If a slot was last used for another
# number of tokens than its sequence has now (a step was computed elsewhere or abandoned), it must be filled again.


@dataclass(slots=True)
class _CountSlot:
    tokens: Sequence[int]  # the caller's list, kept so that its identity is not another's
    count: int  # number of its tokens that the device has counted after the last step
    step: int  # when it was last used


@final
class CountSlots:
    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: dict[int, _CountSlot] = {}
        self._number_of: dict[int, int] = {}  # by identity of the list
        self._free: list[int] = []
        self._step = 0

    def take(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[tuple[int, bool]]:
        """For each list of tokens and its present number of tokens, before one more is sampled: its slot (the lowest
        free one), and whether its counts are complete. A slot is freed only when another sequence needs it."""
        self._step += 1
        return [self._take(tokens, count) for tokens, count in sequences]

    def _take(self, tokens: Sequence[int], count: int) -> tuple[int, bool]:
        number = self._number_of.get(id(tokens))
        if number is None:
            number = self._new()
            self._number_of[id(tokens)] = number
            self._slots[number] = _CountSlot(tokens, -1, 0)
        slot = self._slots[number]
        if slot.step == self._step:
            raise InternalError("two rows of a step share a list of tokens")
        is_known = slot.count == count
        slot.count, slot.step = count + 1, self._step
        return number, is_known

    def _new(self) -> int:
        if not self._free:
            for number, slot in list(self._slots.items()):
                if slot.step < self._step - 1:  # this step may still need the slots of the last one
                    del self._slots[number], self._number_of[id(slot.tokens)]
                    self._free.append(number)
            self._free.sort(reverse=True)
        if self._free:
            return self._free.pop()
        if len(self._slots) == self._most:
            raise InternalError(f"more rows than the {self._most} slots of a table")
        return len(self._slots)

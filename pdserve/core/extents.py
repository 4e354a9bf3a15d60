"""Free block numbers kept as runs, so that an allocation is contiguous where memory allows. Pure.

A transfer needs one descriptor per run, so allocation uses best fit: the smallest run that is large enough, or else the
largest runs first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import final


@final
class FreeRuns:
    """A set of block numbers, stored as maximal runs of consecutive ones."""

    def __init__(self, num_blocks: int) -> None:
        self._len = 0
        self._length_from: dict[int, int] = {}  # first block of a run -> its length
        self._first_until: dict[int, int] = {}  # one past the last block of a run -> its first block
        self._by_size: list[tuple[int, int]] = []  # (length, first block), ascending
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        return self._len

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first block, length) of each run, ascending."""
        return iter(sorted(self._length_from.items()))

    def take(self, count: int) -> list[int]:
        """Removes and returns `count` blocks; the caller must ensure that there are as many."""
        assert count <= self._len
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            at = min(bisect_left(self._by_size, (wanted, -1)), len(self._by_size) - 1)
            length, first = self._by_size[at]
            used = min(wanted, length)
            self._remove(first, length)
            if used < length:
                self._insert(first + used, length - used)
            taken.extend(range(first, first + used))
        return taken

    def add(self, block: int) -> None:
        """Adds a block that is not in the set, and joins it with adjacent runs."""
        first, length = block, 1
        before = self._first_until.get(block)
        if before is not None:
            self._remove(before, block - before)
            first, length = before, length + block - before
        after = self._length_from.get(block + 1)
        if after is not None:
            self._remove(block + 1, after)
            length += after
        self._insert(first, length)

    def _insert(self, first: int, length: int) -> None:
        self._length_from[first] = length
        self._first_until[first + length] = first
        insort(self._by_size, (length, first))
        self._len += length

    def _remove(self, first: int, length: int) -> None:
        del self._length_from[first]
        del self._first_until[first + length]
        del self._by_size[bisect_left(self._by_size, (length, first))]
        self._len -= length


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first block, length) of the maximal ascending runs of `blocks`, in their order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs

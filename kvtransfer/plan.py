"""How blocks become bytes: extents, chunks, runs and coverage. Pure.

A grant lists blocks in prompt order. Frames use *grant indices*, which are positions in that list. Each side maps
indices to its own block numbers, and runs of consecutive numbers become single memory ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

DEFAULT_CHUNK_BYTES: Final = 4 * 2**20  # a transport may use less
# between GPUs, where a launch and a wake take far longer than the copy of a small chunk
DEVICE_CHUNK_BYTES: Final = 64 * 2**20
MAX_CHUNK_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Extent:
    """Blocks first, first + 1, ..., first + count - 1 of one pool."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blocks of one message: grant indices first, first + 1, ... read from these source blocks."""

    first: int
    sources: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.sources)

    def split(self, limit_blocks: int) -> tuple[Chunk, Chunk | None]:
        """At most `limit_blocks` blocks of it, and the rest."""
        if self.count <= limit_blocks:
            return self, None
        head, tail = self.sources[:limit_blocks], self.sources[limit_blocks:]
        return Chunk(self.first, head), Chunk(self.first + limit_blocks, tail)


def extents_of(blocks: Sequence[int]) -> list[Extent]:
    """The fewest extents that list `blocks` in the same order."""
    if not blocks:
        return []
    starts = [0, *(i for i, (left, right) in enumerate(pairwise(blocks), start=1) if right != left + 1)]
    return [Extent(blocks[a], b - a) for a, b in pairwise([*starts, len(blocks)])]


def byte_ranges(blocks: Sequence[int], block_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) in the pool's memory, one per run of consecutive blocks."""
    return [(e.first * block_bytes, (e.first + e.count) * block_bytes) for e in extents_of(blocks)]


def blocks_per_chunk(block_bytes: int, chunk_bytes: int) -> int:
    """How many blocks one chunk may hold: at least one, even if a block is larger than the limit."""
    return max(1, chunk_bytes // block_bytes)


def chunks_of(pushes: Sequence[tuple[int, int]], limit_blocks: int) -> Iterator[Chunk]:
    """Groups (grant index, source block) pairs into chunks of consecutive indices."""
    if pushes and len(pushes) <= limit_blocks:
        indices, sources = zip(*pushes, strict=True)
        if indices == tuple(range(indices[0], indices[0] + len(indices))):  # the usual case, which is much faster
            yield Chunk(indices[0], sources)
            return
    begin = 0
    for at in range(1, len(pushes) + 1):
        is_end = at == len(pushes)
        if is_end or at - begin == limit_blocks or pushes[at][0] != pushes[at - 1][0] + 1:
            yield Chunk(pushes[begin][0], tuple(source for _, source in pushes[begin:at]))
            begin = at


def mask(first: int, count: int) -> int:
    """Bits first .. first + count - 1 of a coverage bitmap."""
    return ((1 << count) - 1) << first


@dataclass(slots=True)
class Coverage:
    """Which of `size` grant indices have been seen."""

    size: int
    bits: int = 0

    def overlaps(self, first: int, count: int) -> bool:
        return bool(self.bits & mask(first, count))

    def add(self, first: int, count: int) -> None:
        self.bits |= mask(first, count)

    @property
    def count(self) -> int:
        return self.bits.bit_count()

    def count_in(self, first: int, count: int) -> int:
        return (self.bits & mask(first, count)).bit_count()

    @property
    def is_full(self) -> bool:
        return self.count == self.size

"""The content hash and the epoch of each block of a pool, for transfers and checks. Pure.

The worker's engine thread writes; transfer threads read single entries, which is atomic in the interpreter. The content
hashes are the prefix cache's chain hashes cut to 64 bits, also for a partly filled last block. That is enough to detect
a mix-up; the cache itself compares 128 bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, final

CHAIN_BITS: Final = 64
UNMARKED: Final = 0  # the block's contents have no hash (yet)
_CHAIN_BYTES: Final = CHAIN_BITS // 8


def chain64(block_hash: bytes) -> int:
    """The 64-bit form of a chain hash in a stamp; never UNMARKED."""
    return int.from_bytes(block_hash[:_CHAIN_BYTES], "little") or 1


@final
class BlockStamps:
    """Blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self._lives = array("Q", bytes(8 * num_blocks))
        self._chains = array("Q", bytes(8 * num_blocks))
        # reassigned blocks since the last `take_begun`, in order; None: not recorded
        self._begun: dict[int, None] | None = None

    def __len__(self) -> int:
        return len(self._lives)

    def begin(self, blocks: Iterable[int]) -> None:
        """These blocks were reassigned: their contents are invalid."""
        for block in blocks:
            self._lives[block] += 1
            self._chains[block] = UNMARKED
            if self._begun is not None:
                self._begun[block] = None

    def take_begun(self) -> list[tuple[int, int]]:
        """(block, epoch) of the blocks that were reassigned since the last call, for a follower that calls `reach`."""
        begun, self._begun = self._begun or {}, {}
        return [(block, self._lives[block]) for block in begun]

    def reach(self, block: int, life: int) -> None:
        """Sets the block's epoch to the leader's; a later epoch invalidates its contents."""
        if life > self._lives[block]:
            self._chains[block] = UNMARKED
            self._lives[block] = life

    def mark(self, block: int, chain: int) -> None:
        """The block's contents are final and have this hash."""
        self._chains[block] = chain

    def life(self, block: int) -> int:
        """How often the block was assigned. If it is equal before and after a copy, the block was not reused in
        between."""
        return self._lives[block]

    def chain(self, block: int) -> int:
        """The hash of its contents, or UNMARKED."""
        return self._chains[block]

    def lives(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return _picked(self._lives, blocks)

    def chains(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return _picked(self._chains, blocks)


def _picked(of: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    if len(blocks) > 1:
        picked: tuple[int, ...] = itemgetter(*blocks)(of)  # a few nanoseconds each
        return picked
    return tuple(of[block] for block in blocks)

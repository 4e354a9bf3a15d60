"""The content hash and the epoch of each block of a pool, for transfers and checks. Pure.

The worker's engine thread writes. Transfer threads read single entries, which is atomic in the interpreter. The content
hashes are the prefix cache's chain hashes, cut to 64 bits, also for a partly filled last block. That is enough to
detect a wrong block. The cache itself compares 128 bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, final

CONTENT_HASH_BITS: Final = 64
UNMARKED: Final = 0  # the block's contents have no hash, or not yet
_CONTENT_HASH_BYTES: Final = CONTENT_HASH_BITS // 8


def content_hash64(block_hash: bytes) -> int:
    """The 64-bit form of a chain hash in a stamp; never UNMARKED."""
    return int.from_bytes(block_hash[:_CONTENT_HASH_BYTES], "little") or 1


@final
class BlockStamps:
    """Blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self._epochs = array("Q", bytes(8 * num_blocks))
        self._content_hashes = array("Q", bytes(8 * num_blocks))
        # Reassigned blocks since the last `take_begun`, in order; None: not recorded.
        self._begun: dict[int, None] | None = None

    def __len__(self) -> int:
        return len(self._epochs)

    def begin(self, blocks: Iterable[int]) -> None:
        """Increments the epochs of reassigned blocks, and invalidates their contents."""
        for block in blocks:
            self._epochs[block] += 1
            self._content_hashes[block] = UNMARKED
            if self._begun is not None:
                self._begun[block] = None

    def take_begun(self) -> list[tuple[int, int]]:
        """(block, epoch) of the blocks that were reassigned since the last call. Follower ranks pass them to
        `reach`."""
        begun, self._begun = self._begun or {}, {}
        return [(block, self._epochs[block]) for block in begun]

    def reach(self, block: int, epoch: int) -> None:
        """Sets the block's epoch to the leader's. A later epoch invalidates the contents."""
        if epoch > self._epochs[block]:
            self._content_hashes[block] = UNMARKED
            self._epochs[block] = epoch

    def mark(self, block: int, content_hash: int) -> None:
        """Notes that the block's contents are final and have this hash."""
        self._content_hashes[block] = content_hash

    def epoch(self, block: int) -> int:
        """How often the block was assigned. If this number is equal before and after a copy, the block was not reused
        meanwhile."""
        return self._epochs[block]

    def content_hash(self, block: int) -> int:
        """The hash of the block's contents, or UNMARKED."""
        return self._content_hashes[block]

    def epochs(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return _picked(self._epochs, blocks)

    def first_reused(self, blocks: Sequence[int], epochs: Sequence[int]) -> int | None:
        """The index of the first block whose epoch has changed; None if there is none."""
        current = self.epochs(blocks)
        if current == tuple(epochs):
            return None
        return next(index for index, epoch in enumerate(epochs) if epoch != current[index])

    def content_hashes(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return _picked(self._content_hashes, blocks)


def _picked(of: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    if len(blocks) > 1:
        picked: tuple[int, ...] = itemgetter(*blocks)(of)  # a few nanoseconds each
        return picked
    return tuple(of[block] for block in blocks)

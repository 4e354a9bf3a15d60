"""What each block of a pool holds, for whoever moves or reads it: a name of its contents, a count of its lives. Pure.

The worker's engine thread writes; transfer threads read single entries, which the interpreter keeps whole. The names
are the prefix cache's chain hashes cut to 64 bits, the last block's partial contents included: enough to find a
mix-up, while the cache itself compares 128 bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, final

CHAIN_BITS: Final = 64
UNMARKED: Final = 0  # the block's contents have no name (yet)
_CHAIN_BYTES: Final = CHAIN_BITS // 8


def chain64(block_hash: bytes) -> int:
    """The name that stands for a chain hash in a stamp; never UNMARKED."""
    return int.from_bytes(block_hash[:_CHAIN_BYTES], "little") or 1


@final
class BlockStamps:
    """Blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self._lives = array("Q", bytes(8 * num_blocks))
        self._chains = array("Q", bytes(8 * num_blocks))
        self._begun: dict[int, None] | None = None  # since they were last taken, in order; None: nobody asks

    def __len__(self) -> int:
        return len(self._lives)

    def begin(self, blocks: Iterable[int]) -> None:
        """These blocks were handed out anew: what they held is void."""
        for block in blocks:
            self._lives[block] += 1
            self._chains[block] = UNMARKED
            if self._begun is not None:
                self._begun[block] = None

    def take_begun(self) -> list[tuple[int, int]]:
        """(block, life) of those that were handed out anew since the last call, for whoever follows with `reach`."""
        begun, self._begun = self._begun or {}, {}
        return [(block, self._lives[block]) for block in begun]

    def reach(self, block: int, life: int) -> None:
        """The block has this life where the lives are counted; what it held is void if it is a later one."""
        if life > self._lives[block]:
            self._chains[block] = UNMARKED
            self._lives[block] = life

    def mark(self, block: int, chain: int) -> None:
        """The block's contents are final and have this name."""
        self._chains[block] = chain

    def life(self, block: int) -> int:
        """How often the block has been handed out. Equal before and after a copy: nobody reused it meanwhile."""
        return self._lives[block]

    def chain(self, block: int) -> int:
        """The name of its contents, or UNMARKED."""
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

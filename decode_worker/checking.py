"""The debug mode kv_check: checks that each block of a row has the content hash of the row's text. Pure.

A different stamp means that a block was reassigned, or filled for another text. It is checked after each step and
before its tokens are used, so that no token that was sampled from such a block is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from decode_worker.decode_sequence import DecodeSequence
from pdserve.core.stamps import BlockStamps, chain64


@dataclass(frozen=True, slots=True)
class Mistake:
    index: int  # epochs of the sequence's blocks
    error: str


@final
class KvCheck:
    def __init__(self, stamps: BlockStamps) -> None:
        self._stamps = stamps

    def hold(self, resident: DecodeSequence) -> None:
        """The resident has just received its blocks."""
        resident.lives = self._stamps.lives(resident.blocks)

    def find(self, resident: DecodeSequence, block_size: int) -> Mistake | None:
        """The first block that was reassigned, or whose content hash is not that of the resident's tokens."""
        blocks, held = resident.blocks, resident.lives
        resident.lives = lives = self._stamps.lives(blocks)
        if lives[: len(held)] != held:
            index = next(index for index, life in enumerate(held) if life != lives[index])
            return Mistake(index, f"block {blocks[index]} was handed out again while it was held")
        full = resident.computed // block_size
        expected = tuple(map(chain64, resident.hashes[:full]))
        attempt = resident.attempt
        if resident.has_landed and resident.computed == attempt.num_tokens and resident.preemptions == 0:
            expected = attempt.chains(resident.hashes, attempt.token_ids, block_size)  # the partly filled one too
        chains = self._stamps.chains(blocks[: len(expected)])
        if chains == expected:
            return None
        index = next(index for index, chain in enumerate(chains) if chain != expected[index])
        return Mistake(index, f"block {blocks[index]} is stamped {chains[index]:016x}, expected {expected[index]:016x}")

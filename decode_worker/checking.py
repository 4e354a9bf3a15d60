"""The debug mode kv_check: checks that each block of a row has the content hash of the row's text. Pure.

A different stamp means that a block was reassigned, or filled for another text. It is checked after each step and
before its tokens are used, so that no token that was sampled from such a block is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from decode_worker.decode_sequence import DecodeSequence
from pdserve.core.stamps import BlockStamps, content_hash64


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
        resident.epochs = self._stamps.epochs(resident.blocks)

    def find(self, resident: DecodeSequence, block_size: int) -> Mistake | None:
        """The first block that was reassigned, or whose content hash is not that of the resident's tokens."""
        blocks, held = resident.blocks, resident.epochs
        resident.epochs = epochs = self._stamps.epochs(blocks)
        if epochs[: len(held)] != held:
            index = next(index for index, epoch in enumerate(held) if epoch != epochs[index])
            return Mistake(index, f"block {blocks[index]} was reassigned while it was held")
        full = resident.computed // block_size
        expected = tuple(map(content_hash64, resident.hashes[:full]))
        attempt = resident.attempt
        if resident.has_landed and resident.computed == attempt.num_tokens and resident.preemptions == 0:
            expected = attempt.content_hashes(
                resident.hashes, attempt.token_ids, block_size
            )  # the partly filled one too
        content_hashes = self._stamps.content_hashes(blocks[: len(expected)])
        if content_hashes == expected:
            return None
        index = next(index for index, content_hash in enumerate(content_hashes) if content_hash != expected[index])
        return Mistake(
            index, f"block {blocks[index]} is stamped {content_hashes[index]:016x}, expected {expected[index]:016x}"
        )

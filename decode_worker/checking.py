"""The debug mode kv_check: checks that each block of a row has the content hash of the row's text. Pure.

Another hash means that the block was reassigned, or filled for another text. Blocks are checked after each step, before
its tokens are used, so no token that was sampled from a wrong block is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from decode_worker.decode_sequence import DecodeSequence
from pdserve.core.stamps import BlockStamps, content_hash64


@dataclass(frozen=True, slots=True)
class WrongBlock:
    index: int  # position among the sequence's blocks
    error: str


@final
class KvCheck:
    def __init__(self, stamps: BlockStamps) -> None:
        self._stamps = stamps

    def record_epochs(self, sequence: DecodeSequence) -> None:
        """Must be called after blocks were allocated to the sequence."""
        sequence.epochs = self._stamps.epochs(sequence.blocks)

    def find(self, sequence: DecodeSequence, block_size: int) -> WrongBlock | None:
        """The first block that was reassigned, or whose content hash does not match the sequence's tokens."""
        blocks, held = sequence.blocks, sequence.epochs
        sequence.epochs = epochs = self._stamps.epochs(blocks)
        if epochs[: len(held)] != held:
            index = next(index for index, epoch in enumerate(held) if epoch != epochs[index])
            return WrongBlock(index, f"block {blocks[index]} was reassigned while a sequence used it")
        full = sequence.computed // block_size
        expected = tuple(map(content_hash64, sequence.hashes[:full]))
        attempt = sequence.attempt
        if sequence.has_received and sequence.computed == attempt.num_tokens and sequence.preemptions == 0:
            # Includes the partly filled last block.
            expected = attempt.content_hashes(sequence.hashes, attempt.token_ids, block_size)
        content_hashes = self._stamps.content_hashes(blocks[: len(expected)])
        if content_hashes == expected:
            return None
        index = next(index for index, content_hash in enumerate(content_hashes) if content_hash != expected[index])
        return WrongBlock(
            index, f"block {blocks[index]} is stamped {content_hashes[index]:016x}, expected {expected[index]:016x}"
        )

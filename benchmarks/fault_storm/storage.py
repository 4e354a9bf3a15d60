"""The memory of a process of the fault storm: the pool, the block allocator, and what each block must contain.

A block's contents follow from its transfer's number and its position, so every byte can be checked. A block that is
freed is overwritten at once. When it is allocated again, it must still contain that pattern: a late write shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import torch

from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.stamps import content_hash64
from pdserve.engine.memory.pool import BlockShape, TorchPool
from tests.support.fake_device import HiddenPool

NUM_BLOCKS: Final = 512
SHAPES: Final = {
    "small": BlockShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32),
    "bundled": BlockShape(num_layers=6, block_size=16, num_kv_heads=4, head_dim=32, dtype=torch.float32),
    "int8": BlockShape(num_layers=6, block_size=16, num_kv_heads=4, head_dim=32, dtype=torch.int8),
}
Memory = Literal["host", "stand-in", "cuda"]  # stand-in: on the host, as if it lay on a device
FREED: Final = 1 << 40  # Added to a transfer's number, for the contents of: a block that its transfer has freed,
REUSED: Final = 2 << 40  # a block that was allocated again while it was being sent,
OTHER_TEXT: Final = 3 << 40  # and a block that was computed for another prompt


class Storage:
    """A pool, the owners of its blocks, and what each block must contain."""

    def __init__(self, shape: BlockShape, memory: Memory = "host", runs_per_block: int = 1) -> None:
        device = torch.device("cuda" if memory == "cuda" else "cpu")
        self._pool = TorchPool(num_blocks=NUM_BLOCKS, shape=shape, device=device)
        self._pool.runs_per_block = runs_per_block
        self._runs = self._pool.raw.view(runs_per_block, NUM_BLOCKS, -1)
        self.pool: Any = HiddenPool(self._pool) if memory == "stand-in" else self._pool
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.stamps = self.allocator.stamps
        num_words = self.pool.block_bytes // 8
        self._base = np.random.default_rng(7).integers(1, 1 << 63, num_words, dtype=np.uint64)
        self._holds: list[tuple[int, int] | None] = [None] * NUM_BLOCKS
        self.wrong: list[str] = []

    def take(self, count: int) -> list[int] | None:
        """Allocates blocks, and checks that no one wrote to them since they were freed."""
        blocks = self.allocator.allocate(count)
        for block in blocks or ():
            self.look(block, "was written while nobody held it")
        return blocks

    def give_back(self, blocks: Sequence[int], number: int) -> None:
        """Overwrites the blocks and frees them."""
        for place, block in enumerate(blocks):
            self.write(block, number + FREED, place)
        self.allocator.release(blocks)

    def write(self, block: int, number: int, place: int) -> None:
        contents = torch.from_numpy(self._contents(number, place).view(np.uint8))
        runs = self._runs[:, block]
        runs.copy_(contents.view(runs.shape))  # on a device, ordered by its default stream, like an engine's writes
        self._holds[block] = (number, place)

    def fill(self, blocks: Sequence[int], number: int) -> None:
        """Writes the blocks as an engine does that has computed a prompt."""
        for place, block in enumerate(blocks):
            self.write(block, number, place)
            self.stamps.mark(block, content_hash_of(number, place))

    def must_hold(self, block: int, number: int, place: int) -> None:
        """Checks a block that was received."""
        self._holds[block] = (number, place)
        self.look(block, "was committed with wrong bytes")

    def look(self, block: int, complaint: str) -> None:
        held = self._holds[block]
        expected = np.zeros_like(self._base) if held is None else self._contents(*held)
        if not np.array_equal(self._whole(block), expected):
            self.wrong.append(f"block {block}, which must hold {held}, {complaint}")

    def expects_anything(self, block: int) -> None:
        """A transfer may write to this block: its contents are unknown until the transfer ends."""
        self._holds[block] = None

    def _whole(self, block: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return self._runs[:, block].cpu().numpy().reshape(-1).view(np.uint64)

    def _contents(self, number: int, place: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        factor = np.uint64(2 * (number * 64 + place) + 1)
        return self._base * factor

    def check_rest(self, held: Sequence[Sequence[int]]) -> None:
        try:
            self.allocator.check(holders=held)
        except AssertionError as error:
            self.wrong.append(f"the block accounting does not balance: {error}")
        for block in range(NUM_BLOCKS):
            self.look(block, "was written at rest")


def block_hash(number: int, place: int) -> bytes:
    return hashlib.blake2b(b"%d %d" % (number, place), digest_size=16).digest()


def content_hash_of(number: int, place: int) -> int:
    return content_hash64(block_hash(number, place))

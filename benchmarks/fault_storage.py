"""The memory of a process of the fault storm: the engine's pool, the worker's books, and what each block must hold.

A block's contents follow from its transfer's number and its place in it, so that whoever holds one knows every byte
that it must have. What comes back is written over at once and must still hold that when it is handed out again: a
write or a read after the end shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import torch

from benchmarks.fake_device import HiddenPool
from pdserve.core.blocks import BlockAllocator
from pdserve.core.stamps import content_hash64
from pdserve.engine.pool import BlockShape, TorchPool

NUM_BLOCKS: Final = 512
SHAPES: Final = {
    "small": BlockShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32),
    "bundled": BlockShape(num_layers=6, block_size=16, num_kv_heads=4, head_dim=32, dtype=torch.float32),
    "int8": BlockShape(num_layers=6, block_size=16, num_kv_heads=4, head_dim=32, dtype=torch.int8),
}
Memory = Literal["host", "stand-in", "cuda"]  # stand-in: on the host, as if it lay on a device
FREED: Final = 1 << 40  # added to a number: the contents of a block that its transfer gave back,
REUSED: Final = 2 << 40  # of one that was handed out anew while it was sent,
OTHER_TEXT: Final = 3 << 40  # and of one that was computed for another prompt


class Storage:
    """A pool, who holds its blocks, and what each must contain."""

    def __init__(self, shape: BlockShape, memory: Memory = "host") -> None:
        device = torch.device("cuda" if memory == "cuda" else "cpu")
        self._pool = TorchPool(num_blocks=NUM_BLOCKS, shape=shape, device=device)
        self.pool: Any = HiddenPool(self._pool) if memory == "stand-in" else self._pool
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.stamps = self.allocator.stamps
        num_words = self.pool.block_bytes // 8
        self._base = np.random.default_rng(7).integers(1, 1 << 63, num_words, dtype=np.uint64)
        self._holds: list[tuple[int, int] | None] = [None] * NUM_BLOCKS
        self.wrong: list[str] = []

    def take(self, count: int) -> list[int] | None:
        """Blocks whose contents nobody has touched since they came back."""
        blocks = self.allocator.allocate(count)
        for block in blocks or ():
            self.look(block, "was written while nobody held it")
        return blocks

    def give_back(self, blocks: Sequence[int], number: int) -> None:
        """Written over and released."""
        for place, block in enumerate(blocks):
            self.write(block, number + FREED, place)
        self.allocator.release(blocks)

    def write(self, block: int, number: int, place: int) -> None:
        contents = torch.from_numpy(self._contents(number, place).view(np.uint8))
        self._pool.raw[block].copy_(contents)  # on a device in the order of its default stream, as an engine's
        self._holds[block] = (number, place)

    def fill(self, blocks: Sequence[int], number: int) -> None:
        """As an engine that has computed a prompt."""
        for place, block in enumerate(blocks):
            self.write(block, number, place)
            self.stamps.mark(block, content_hash_of(number, place))

    def must_hold(self, block: int, number: int, place: int) -> None:
        """The block has come from elsewhere."""
        self._holds[block] = (number, place)
        self.look(block, "was committed with wrong bytes")

    def look(self, block: int, complaint: str) -> None:
        held = self._holds[block]
        expected = np.zeros_like(self._base) if held is None else self._contents(*held)
        if not np.array_equal(self._whole(block), expected):
            self.wrong.append(f"block {block}, which must hold {held}, {complaint}")

    def expects_anything(self, block: int) -> None:
        """A transfer writes here: until it ends, nothing is known of the contents."""
        self._holds[block] = None

    def _whole(self, block: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return self._pool.raw[block].cpu().numpy().view(np.uint64)

    def _contents(self, number: int, place: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        factor = np.uint64(2 * (number * 64 + place) + 1)
        return self._base * factor

    def check_rest(self, held: Sequence[Sequence[int]]) -> None:
        try:
            self.allocator.check(holders=held)
        except AssertionError as error:
            self.wrong.append(f"the books do not balance: {error}")
        for block in range(NUM_BLOCKS):
            self.look(block, "was written at rest")


def block_hash(number: int, place: int) -> bytes:
    return hashlib.blake2b(b"%d %d" % (number, place), digest_size=16).digest()


def content_hash_of(number: int, place: int) -> int:
    return content_hash64(block_hash(number, place))

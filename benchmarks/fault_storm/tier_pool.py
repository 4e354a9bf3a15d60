"""The blocks of the storms on tiers: a pool in this process, and what each block must contain."""

from __future__ import annotations

from hashlib import blake2b, shake_128
from typing import Final

BLOCK_BYTES: Final = 512
NUM_BLOCKS: Final = 96
NUM_FILE_BYTES: Final = 2**20
CONTENTS: Final = b"storm"
FEW: Final = 400  # blocks that killed writers write


class StormPool:
    """Two runs of bytes for each block."""

    num_blocks = NUM_BLOCKS
    block_bytes = BLOCK_BYTES
    runs_per_block = 2
    is_on_host = True
    descriptor = None

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
        self._run = BLOCK_BYTES // 2

    def read(self, block: int) -> bytes:
        run, count = self._run, NUM_BLOCKS * self._run
        first, second = self.buffer[block * run :][:run], self.buffer[count + block * run :][:run]
        return bytes(first) + bytes(second)

    def write(self, block: int, content: bytes) -> None:
        run, count = self._run, NUM_BLOCKS * self._run
        self.buffer[block * run : (block + 1) * run] = content[:run]
        self.buffer[count + block * run : count + (block + 1) * run] = content[run:]


def content_of(block_hash: bytes) -> bytes:
    return shake_128(block_hash).digest(BLOCK_BYTES)


def hash_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()

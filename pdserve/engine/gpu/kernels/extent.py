"""The bytes of a KV block that belong to a part of a transfer, and their checksum. Pure.

A part (a range of layers, and the kv heads of one tensor-parallel shard) is one or two extents of a block: its values
and, in a scaled block, its scales. An extent consists of runs of equal length at equal distances.

The checksum of n bytes, as little-endian 32-bit words w[0], w[1] ..., is a sum, so that thousands of programs can add
to it in any order:

    sum over i of  h ^ (h >> 32)   where   h = (w[i] + (i + 1) * GOLDEN) * MIX        all modulo 2^64

Each step is a bijection of w[i], so a change of one word is always detected, and so are swapped words. Other errors are
missed about once in 2^60 cases. It protects against accidents, not against attackers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GOLDEN: Final = 0x9E3779B97F4A7C15  # as in sampling.py
MIX: Final = 0xBF58476D1CE4E5B9
WORD_BYTES: Final = 4
_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StridedExtent:
    """Bytes first .. first + run_bytes - 1 of a block, and again each stride_bytes, num_runs times."""

    first: int
    run_bytes: int
    num_runs: int = 1
    stride_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.run_bytes * self.num_runs


def checksum(data: bytes | bytearray | memoryview) -> int:
    """The reference implementation, for a multiple of 4 bytes. It is slow; the kernels compute the same."""
    total = 0
    for index, word in enumerate(memoryview(data).cast("B").cast("I")):
        mixed = (word + (index + 1) * GOLDEN) * MIX & _MASK
        total += mixed ^ (mixed >> 32)
    return total & _MASK

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

GOLDEN: Final = 0x9E3779B97F4A7C15  # as in noise.py
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


def part_extents(
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_bytes: int,
    scales_first: int | None,
    layers: range,
    heads: range,
) -> tuple[StridedExtent, ...]:
    """The extents of layers and kv heads of a block-major block [L, 2, C, K, D]; head_bytes is one head of one token.

    `scales_first` is where the float32 scales begin, None for a block without.
    """
    if not layers or not heads or layers.stop > num_layers or heads.stop > num_kv_heads:
        raise ValueError(f"layers {layers}, heads {heads} of a block of {num_layers} layers and {num_kv_heads} heads")
    rows = 2 * block_size  # keys, then values
    extents = []
    for first, item_bytes in ((0, head_bytes), (scales_first, 4)):
        if first is None:
            continue
        layer_bytes = rows * num_kv_heads * item_bytes
        at = first + layers.start * layer_bytes
        if len(heads) == num_kv_heads:
            extents.append(StridedExtent(at, len(layers) * layer_bytes))
        else:
            run = len(heads) * item_bytes
            extents.append(
                StridedExtent(at + heads.start * item_bytes, run, len(layers) * rows, num_kv_heads * item_bytes)
            )
    return tuple(extents)

"""A pool in host memory as a Device, for a pair whose other pool is on a GPU. All work is done immediately.

Both sides of such a pair compare the checksum that pdserve.engine.gpu.kernels.extent defines. Here numpy computes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from kvtransfer.devices.staging_budget import StagingBudget
from kvtransfer.protocol.device import Blocks, Copying, Wake
from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.extent import GOLDEN, MIX, WORD_BYTES, StridedExtent

_AT_ONCE: Final = 1 << 16  # words at a time, so that intermediate values fit into the processor's cache
_OFFSETS: Final = np.arange(1, _AT_ONCE + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def zeroed(num_bytes: int) -> memoryview:
    """New memory. The kernel zeroes a page when it is first used; `bytearray` would zero all of it at once and hold the
    GIL meanwhile, so a connection's staging would stop every thread for tens of milliseconds."""
    return np.zeros(num_bytes, dtype=np.uint8).data


def word_sum(data: memoryview) -> int:
    """The checksum of engine/gpu/kernels/extent.py. The data is a multiple of 4 bytes long."""
    if len(data) % WORD_BYTES:
        raise InternalError(f"{len(data)} bytes, expected a multiple of {WORD_BYTES}")
    word_N = np.frombuffer(data, dtype=np.uint32)
    total, mix, half = 0, np.uint64(MIX), np.uint64(32)
    for first in range(0, len(word_N), _AT_ONCE):
        mixed_N = word_N[first : first + _AT_ONCE].astype(np.uint64)
        mixed_N += _OFFSETS[: len(mixed_N)]
        mixed_N += np.uint64(first * GOLDEN % 2**64)
        mixed_N *= mix
        mixed_N ^= mixed_N >> half
        total += int(mixed_N.sum(dtype=np.uint64))
    return total % 2**64


def digest_of(sums: Sequence[int]) -> bytes:
    """The checksum (8 bytes) of the blocks' checksums, in order, as sent in a chunk's frame."""
    return hashlib.blake2b(np.array(sums, dtype=np.uint64).tobytes(), digest_size=8).digest()


class HostBlocks:
    """Blocks in `memory`, `stride` bytes apart; there may be other bytes between them, and between a block's runs."""

    def __init__(
        self,
        memory: Any,
        num_blocks: int,
        block_bytes: int,
        first: int = 0,
        stride: int = 0,
        extent: StridedExtent | None = None,
    ) -> None:
        """`extent`: the runs of a block that is not contiguous; `block_bytes` is its size."""
        self.memory, self.num_blocks, self.block_bytes = memory, num_blocks, block_bytes
        self._first, self._stride, self._extent = first, stride or block_bytes, extent

    def view(self, block: int, count: int = 1) -> memoryview:
        assert 0 <= block <= self.num_blocks - count
        assert self.memory is not None, "closed"
        assert self._extent is None, "not one run of bytes"
        assert count == 1 or self._stride == self.block_bytes, "not one run of bytes"
        begin = self._first + block * self._stride
        return memoryview(self.memory)[begin : begin + count * self.block_bytes]

    def read(self, block: int) -> bytearray:
        return bytearray(b"".join(self._runs(block)))

    def write(self, block: int, data: bytes | bytearray) -> None:
        at = 0
        for run in self._runs(block):
            run[:] = data[at : at + len(run)]
            at += len(run)

    def narrowed(self, extent: StridedExtent) -> HostBlocks:
        assert self._extent is None, "a part of a part"
        last = extent.first + (extent.num_runs - 1) * extent.stride_bytes
        assert last + extent.run_bytes <= self.block_bytes
        part = self._part(self.num_blocks, extent.num_bytes, self._first + extent.first, self._stride)
        part._extent = extent if extent.num_runs > 1 else None
        return part

    def cut(self, first: int, count: int, num_bytes: int) -> HostBlocks:
        assert self._stride == self.block_bytes
        assert first + count <= self.num_blocks
        num_blocks = count * self.block_bytes // num_bytes
        return self._part(num_blocks, num_bytes, self._first + first * self.block_bytes, num_bytes)

    def close(self) -> None:
        self.memory = None

    def _runs(self, block: int) -> list[memoryview]:
        if self._extent is None:
            return [self.view(block)]
        assert 0 <= block < self.num_blocks
        assert self.memory is not None, "closed"
        begin, extent, memory = self._first + block * self._stride, self._extent, memoryview(self.memory)
        starts = [begin + index * extent.stride_bytes for index in range(extent.num_runs)]
        return [memory[start : start + extent.run_bytes] for start in starts]

    def _part(self, num_blocks: int, block_bytes: int, first: int, stride: int) -> HostBlocks:
        return HostBlocks(self.memory, num_blocks, block_bytes, first, stride)


@final
class PlainBytes:
    """Host memory, which needs no pinning."""

    def __init__(self, num_bytes: int) -> None:
        self.view = zeroed(num_bytes)

    def close(self) -> None:
        self.view = memoryview(b"")


@final
class Done:
    """A copy that is done."""

    is_done = True

    def __init__(self, digest: bytes = b"") -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest


@final
class HostDevice:
    name = "host"

    def __init__(self, memory: memoryview, block_bytes: int, budget: StagingBudget) -> None:
        self._memory, self._block_bytes, self.budget = memory, block_bytes, budget

    def pool(self) -> HostBlocks:
        return HostBlocks(self._memory, len(self._memory) // self._block_bytes, self._block_bytes)

    def staging(self, num_blocks: int) -> HostBlocks:
        return HostBlocks(zeroed(num_blocks * self._block_bytes), num_blocks, self._block_bytes)

    def pinned(self, num_bytes: int) -> PlainBytes:
        return PlainBytes(num_bytes)

    def export(self) -> bytes:
        raise InternalError("a pool in host memory is not opened by a device's driver")

    def open(self, exported: bytes) -> HostBlocks:
        raise InternalError("a pool in host memory is not opened by a device's driver")

    def fence(self) -> None:
        return None

    def copy(
        self,
        source: Blocks,
        sources: Sequence[int],
        target: Blocks | None,
        targets: Sequence[int],
        wake: Wake,
        after: Any,
        behind: Copying | None = None,
    ) -> Done:
        assert isinstance(source, HostBlocks)
        return self._done(copy_and_sum(source, sources, target, targets), wake)

    def move(
        self,
        staging: Blocks,
        host: Any,
        num_bytes: int,
        wake: Wake,
        *,
        is_to_host: bool,
        behind: Copying | None = None,
    ) -> Done:
        assert isinstance(staging, HostBlocks)
        move_bytes(staging, host, num_bytes, is_to_host=is_to_host)
        return self._done(b"", wake)

    def drain(self) -> None:
        """Nothing is ever in progress."""

    def _done(self, digest: bytes, wake: Wake) -> Done:
        wake()
        return Done(digest)


def copy_and_sum(source: HostBlocks, sources: Sequence[int], target: Blocks | None, targets: Sequence[int]) -> bytes:
    """Device.copy in host memory; returns the digest of the bytes read."""
    sums = []
    for index, block in enumerate(sources):
        data = source.read(block)
        if isinstance(target, HostBlocks):
            target.write(targets[index], data)
            data = target.read(targets[index])
        sums.append(word_sum(memoryview(data)))
    return digest_of(sums)


def move_bytes(staging: HostBlocks, host: Any, num_bytes: int, *, is_to_host: bool) -> None:
    """Device.move in host memory."""
    count = -(-num_bytes // staging.block_bytes)
    there, here = staging.view(0, count)[:num_bytes], host.view[:num_bytes]
    if is_to_host:
        here[:] = there
    else:
        there[:] = here

"""Blocks of device memory, pinned host memory, and the copy of blocks with their checksums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch

from pdserve.core.errors import TransferFailed
from pdserve.engine.gpu.extent import StridedExtent


@final
class CudaBlocks:
    """`raw` is uint8 [blocks, block_bytes] on the device, or [blocks, runs, bytes of a run]. Other bytes may be between
    two blocks or runs."""

    def __init__(self, raw: torch.Tensor, on_close: Callable[[], None] = lambda: None) -> None:
        self.raw: torch.Tensor | None = raw
        self.num_blocks, self.block_bytes = int(raw.shape[0]), math.prod(raw.shape[1:])
        self._on_close = on_close

    @property
    def tensor(self) -> torch.Tensor:
        assert self.raw is not None, "closed"
        return self.raw

    def narrowed(self, extent: StridedExtent) -> CudaBlocks:
        if extent.num_runs == 1:
            return CudaBlocks(self.tensor[:, extent.first : extent.first + extent.run_bytes])
        raw = self.tensor
        shape, strides = (len(raw), extent.num_runs, extent.run_bytes), (raw.stride(0), extent.stride_bytes, 1)
        return CudaBlocks(raw.as_strided(shape, strides, raw.storage_offset() + extent.first))

    def cut(self, first: int, count: int, num_bytes: int) -> CudaBlocks:
        flat = self.tensor[first : first + count].view(-1)
        num_blocks = flat.shape[0] // num_bytes
        return CudaBlocks(flat[: num_blocks * num_bytes].view(num_blocks, num_bytes))

    def close(self) -> None:
        if self.raw is not None:
            self.raw = None
            self._on_close()


@final
class PinnedBytes:
    def __init__(self, num_bytes: int) -> None:
        try:
            self.tensor: torch.Tensor | None = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise TransferFailed(f"the host cannot pin {num_bytes} bytes: {error}") from error
        self.view = memoryview(self.tensor.numpy().data)

    def close(self) -> None:
        """torch reuses the memory only when the queued copies have ended."""
        self.tensor, self.view = None, memoryview(b"")


def moved(
    source: torch.Tensor, source_B: torch.Tensor, target: torch.Tensor | None, target_B: torch.Tensor, relay: Any
) -> torch.Tensor:
    """Copies the source blocks to the target blocks and returns their checksums.

    `relay` does both in one pass if a block is one run of bytes on both sides. Otherwise torch packs the runs first, or
    unpacks them last, in another pass over the bytes.
    """
    if source.dim() == 3:
        packed = source.view(torch.int32).index_select(0, source_B).view(torch.uint8).flatten(1)
        source, source_B = packed, torch.arange(len(packed), dtype=torch.int32, device=packed.device)
    if target is None or target.dim() == 2:
        sums: torch.Tensor = relay(source, source_B, target, None if target is None else target_B)
        return sums
    sums = relay(source, source_B, None, None)
    blocks = source.index_select(0, source_B).view(-1, *target.shape[1:])
    target.view(torch.int32).index_copy_(0, target_B.long(), blocks.view(torch.int32))
    return sums

"""Memory of all KV blocks: one allocation, block-major, so that a block is one run of bytes over all layers."""

# Shapes: N blocks, L layers, C tokens per block, K kv heads, D head dim; 2 is keys, then values.

from __future__ import annotations

import mmap
from typing import final

import torch
from torch import Tensor

from pdserve.core.errors import InternalError


@final
class TorchPool:
    """`tensor` is [N, L, 2, C, K, D]. On the CPU `buffer` is the same memory as bytes."""

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
        self._buffer: memoryview | None = None
        if device.type == "cpu":
            # Private anonymous memory: page-aligned, zero, and touched only as blocks come into use.
            memory = mmap.mmap(-1, num_blocks * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._buffer = memoryview(memory)
            self.tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, device=device, dtype=dtype)

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise InternalError(f"the KV pool lies on {self.tensor.device}: it has no host buffer")
        return self._buffer

    def clear(self, block_B: Tensor) -> None:
        """Zeroes blocks that begin a new life partly filled.

        Attention reads whole blocks and gives the positions behind the end the weight 0; 0 * NaN from an earlier
        owner would still be NaN. It also keeps one request's KV out of the tail of a block that travels.
        """
        self.tensor.index_fill_(0, block_B, 0)

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, block_T: Tensor, offset_T: Tensor) -> None:
        """Stores the keys and values of a step's tokens."""
        pages_N2CKD = self.tensor[:, layer]
        pages_N2CKD[block_T, 0, offset_T] = k_TKD
        pages_N2CKD[block_T, 1, offset_T] = v_TKD

    def read(self, layer: int, block_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of P blocks per row, [B, K, P * C, D] each (K and S strided, D contiguous)."""
        num_rows, num_pages = block_BP.shape
        flat = block_BP.reshape(-1)
        keys, values = (
            self.tensor[:, layer, part]
            .index_select(0, flat)
            .view(num_rows, num_pages * self.block_size, *self.tensor.shape[-2:])
            .transpose(1, 2)
            for part in (0, 1)
        )
        return keys, values

"""Memory for tensors before they are converted to their final form, reused for the next one.

New pages cost more than the copy into them, and the allocator may keep freed memory. These pages are mapped separately,
so freeing them returns them to the system immediately.
"""

from __future__ import annotations

import mmap
from typing import Final, final

import torch
from torch import Tensor

# a region that is this much larger than the request is freed, such as that of the packed output head
_MOST_SLACK: Final = 8
_SMALL_BYTES: Final = 16 * 2**20  # a region up to this size is always kept


@final
class LoadScratch:
    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; overwrites what was taken before."""
        held = 0 if self._bytes is None else self._bytes.numel()
        if not num_bytes <= held <= max(_MOST_SLACK * num_bytes, _SMALL_BYTES):
            self._bytes = None  # freed first, so that both never exist together
        if self._bytes is None:
            self._bytes = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
        return self._bytes[:num_bytes]

    def take_matrix(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        return self.take(num_rows * num_columns * dtype.itemsize).view(dtype).view(num_rows, num_columns)

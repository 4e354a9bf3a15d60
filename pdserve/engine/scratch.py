"""Memory for tensors on their way to their final form, used again for the next one.

Fresh pages cost more than the copy into them; and what the allocator is given back it may keep. These pages are
mapped for themselves: letting go of them returns them to the system at once.
"""

from __future__ import annotations

import mmap
from typing import Final, final

import torch
from torch import Tensor

_MOST_SLACK: Final = 8  # a region that much larger than what is asked for goes back: the head's, once it is packed
_SMALL_BYTES: Final = 16 * 2**20  # is kept in any case


@final
class Scratch:
    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; what was taken before is overwritten."""
        held = 0 if self._bytes is None else self._bytes.numel()
        if not num_bytes <= held <= max(_MOST_SLACK * num_bytes, _SMALL_BYTES):
            self._bytes = None  # first, so that both are never there
        if self._bytes is None:
            self._bytes = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
        return self._bytes[:num_bytes]

    def take_matrix(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        return self.take(num_rows * num_columns * dtype.itemsize).view(dtype).view(num_rows, num_columns)

"""Memory for large results of kernels, used again as soon as no tensor needs it.

The C library returns large freed memory to the operating system, and new memory is cleared and mapped page by page: a
prefill of 2,048 tokens spent a third of its time on that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

import torch
from torch import Tensor

from pdserve.engine.kernels import task

_LEAST_BYTES: Final = 1 << 20  # smaller results are kept by the C library
_MOST_SLACK: Final = 2  # a result uses memory of at most this times its size
_MOST_KEPT_BYTES: Final = 1 << 30  # of memory that no tensor needs


@final
class _Region:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()  # begins at a cache line


class ResultMemory:
    def __init__(self) -> None:
        # Oldest first. A finalizer may run at any point of this thread, so there is no lock: each operation on the list
        # is atomic, and may find that another thread was first.
        self._free: list[_Region] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """As torch.empty."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES or task.is_recording():  # a recording gives tensors its own memory
            return torch.empty(shape, dtype=dtype)
        region = self._take(num_bytes)
        lent = region.memory[:num_bytes]
        finalizer = weakref.finalize(lent, self._give, region)  # torch keeps `lent` as long as any view
        finalizer.atexit = False  # at exit tensors may still be in use
        return torch.frombuffer(lent, dtype=dtype).view(tuple(shape))

    @property
    def free_bytes(self) -> int:
        return sum(region.memory.nbytes for region in list(self._free))

    def _take(self, num_bytes: int) -> _Region:
        fitting = [one for one in list(self._free) if num_bytes <= one.memory.nbytes <= _MOST_SLACK * num_bytes]
        for region in sorted(fitting, key=_num_bytes):
            with suppress(ValueError):  # another thread took it
                self._free.remove(region)
                return region
        return _Region(num_bytes)

    def _give(self, region: _Region) -> None:
        self._free.append(region)
        while self.free_bytes > _MOST_KEPT_BYTES:
            with suppress(IndexError):
                self._free.pop(0)


def _num_bytes(region: _Region) -> Any:
    return region.memory.nbytes


_memory: Final = ResultMemory()
empty: Final = _memory.empty

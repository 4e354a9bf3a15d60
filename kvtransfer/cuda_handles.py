"""Another process's device memory by a driver's handle. The only module that imports CuPy for cuda_ipc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdserve.core.errors import TransferFailed


def export(base: int) -> bytes:
    """A handle for the allocation that begins at `base`. Raises TransferFailed."""
    import cupy

    try:
        handle: bytes = bytes(cupy.cuda.runtime.ipcGetMemHandle(base))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise TransferFailed(f"the pool's memory cannot be shared: {error}") from error
    return handle


def open_handle(
    handle: bytes, device: int, offset: int, num_blocks: int, block_bytes: int
) -> tuple[torch.Tensor, Callable[[], None]]:
    """uint8 [num_blocks, block_bytes] at `offset` in the allocation, and what closes it. Raises TransferFailed."""
    import cupy

    with cupy.cuda.Device(device):
        try:
            base = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        except (cupy.cuda.runtime.CUDARuntimeError, ValueError, IndexError) as error:  # no 64 bytes: the last two
            raise TransferFailed(f"the sender's pool cannot be opened: {error}") from error
        num_bytes = num_blocks * block_bytes
        memory = cupy.cuda.UnownedMemory(base, offset + num_bytes, None, device)
        array: Any = cupy.ndarray((num_blocks, block_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, offset))

    def close() -> None:
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.ipcCloseMemHandle(base)

    return torch.as_tensor(array, device=torch.device("cuda", device)), close

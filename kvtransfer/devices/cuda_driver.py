"""Calls of the CUDA driver to allocate memory and to open memory of other processes, by ctypes.

ctypes releases the GIL during each call. Allocating, freeing, opening and closing memory may take milliseconds and wait
for the device. The engine's thread continues in the meantime. Every call needs the device's context on the calling
thread: `current` sets it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, final

import torch

from pdserve.core.errors import TransferFailed

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag: the memory may be another GPU's


class _Handle(ctypes.Structure):  # CUipcMemHandle, passed by value
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
}


@final
class Driver:
    def __init__(self, library: Any | None = None) -> None:
        """`library` replaces libcuda in tests. Raises TransferFailed if there is no CUDA driver."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise TransferFailed(f"the CUDA driver cannot be loaded: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Makes the device's primary context, which torch also uses, current on this thread within the block."""
        self._call("cuCtxPushCurrent_v2", "the device's context cannot be used", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", "the device's context cannot be left", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, num_bytes: int) -> int:
        """Memory on the current device. Raises TransferFailed."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", f"no {num_bytes} bytes of device memory", ctypes.byref(pointer), num_bytes)
        return pointer.value

    def base_of(self, pointer: int) -> int:
        """The beginning of the allocation that contains a device address. Raises TransferFailed."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        what = "the driver knows no allocation of the pool"
        self._call("cuMemGetAddressRange_v2", what, ctypes.byref(base), ctypes.byref(size), pointer)
        return base.value

    def export(self, base: int) -> bytes:
        """A handle for the allocation that begins at `base`. Raises TransferFailed."""
        handle = _Handle()
        # The driver has no such handle for memory of cuMemCreate.
        what = "the pool's memory cannot be shared; give up expandable_segments in PYTORCH_CUDA_ALLOC_CONF if it is set"
        self._call("cuIpcGetMemHandle", what, ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation on the current device. Raises TransferFailed."""
        if len(handle) != HANDLE_BYTES:
            raise TransferFailed(f"the sender's pool cannot be opened: a handle of {len(handle)} bytes")
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            "the sender's pool cannot be opened",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            _LAZY_PEER_ACCESS,
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Closes what `open` returned. Raises TransferFailed."""
        self._call("cuIpcCloseMemHandle", "the sender's pool cannot be closed", pointer)

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuInit", "the CUDA driver does not start", 0)
                self._call("cuDeviceGet", f"there is no CUDA device {device}", ctypes.byref(number), device)
                what = f"CUDA device {device} has no context"
                self._call("cuDevicePrimaryCtxRetain", what, ctypes.byref(context), number)
                self._contexts[device] = context
            return self._contexts[device]

    def _call(self, name: str, what: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise TransferFailed(f"{what} (CUDA status {status})")


@cache
def driver() -> Driver:
    """The driver of this process. Raises TransferFailed."""
    return Driver()


def tensor_at(pointer: int, device: torch.device, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes] at that address, which the tensor does not own.

    `device` is the device that uses the memory. torch must not look it up: for memory of another GPU it would find that
    GPU, and `torch.as_tensor` would copy the whole pool.
    """
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_blocks * block_bytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    raw = empty.set_(storage, 0, (num_blocks, block_bytes), (block_bytes, 1))
    if raw.data_ptr() != pointer:
        raise TransferFailed(f"torch copied memory at {pointer:#x} instead of using it")
    return raw

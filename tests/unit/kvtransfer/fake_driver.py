"""A stand-in for libcuda: device memory is memory of this process, and a handle contains an address."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from kvtransfer.devices.cuda_driver import HANDLE_BYTES

INVALID_VALUE, INVALID_CONTEXT = 1, 201


class FakeLibrary:
    """Like the driver, it converts arguments by their declared types, needs a context, rejects the handle of an address
    that begins no allocation, and does not open what its own process exported."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}  # The status that each call returns; 0 for calls that are not listed.
        self.bases: dict[int, int] = {}  # Address -> start of its allocation.
        self.allocated: list[int] = []
        self.exported: set[int] = set()  # by this process, which cannot open them
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.context: list[int] = []  # The calling thread's contexts; the last one is current.
        self._memory: list[Any] = []
        for name, does in {
            "cuInit": lambda flags: None,
            "cuDeviceGet": lambda number, index: _put(number, index),
            "cuDevicePrimaryCtxRetain": lambda context, number: _put(context, 1000 + number.value),
            "cuCtxPushCurrent_v2": lambda context: self.context.append(context.value),
            "cuCtxPopCurrent_v2": lambda context: _put(context, self.context.pop()),
            "cuMemAlloc_v2": self._allocate,
            "cuMemGetAddressRange_v2": self._range,
            "cuIpcGetMemHandle": self._export,
            "cuIpcOpenMemHandle_v2": self._open,
            "cuIpcCloseMemHandle": self._close,
        }.items():
            setattr(self, name, self._call(name, does))

    def _call(self, name: str, does: Callable[..., Any]) -> Callable[..., int]:
        needs_context = name.startswith(("cuMem", "cuIpc"))

        def call(*arguments: Any) -> int:
            assert self.context or not needs_context, f"{name} needs the device's context on its thread"
            for kind, argument in zip(call.argtypes, arguments, strict=True):  # type: ignore[attr-defined]
                kind.from_param(argument)  # ctypes' own conversion
            return self.statuses.get(name, 0) or does(*arguments) or 0

        return call

    def _allocate(self, pointer: Any, num_bytes: int) -> None:
        self._memory.append((ctypes.c_uint8 * num_bytes)())
        self.allocated.append(ctypes.addressof(self._memory[-1]))
        _put(pointer, self.allocated[-1])

    def _range(self, base: Any, size: Any, pointer: int) -> None:
        _put(base, self.bases[pointer])

    def _export(self, handle: Any, base: int) -> int:
        if base not in self.bases.values():
            return INVALID_VALUE
        self.exported.add(base)
        ctypes.memmove(handle, struct.pack(f"<Q{HANDLE_BYTES - 8}x", base), HANDLE_BYTES)
        return 0

    def _open(self, pointer: Any, handle: Any, flags: int) -> int:
        base = struct.unpack_from("<Q", bytes(handle))[0]
        if base in self.exported:
            return INVALID_CONTEXT
        self.opened.append(base)
        _put(pointer, base)
        return 0

    def _close(self, pointer: int) -> int:
        if pointer not in self.opened:
            return INVALID_VALUE
        self.opened.remove(pointer)
        self.closed.append(pointer)
        return 0


def _put(reference: Any, value: int) -> None:
    """Writes to the target of a `ctypes.byref`."""
    reference._obj.value = value


class Event:
    """Returns the given answers in turn, and the last one for ever."""

    def __init__(self, *answers: bool | RuntimeError) -> None:
        self.answers = list(answers) or [True]

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


class Stream(SimpleNamespace):
    cuda_stream, ptr = 77, 77

    def synchronize(self) -> None: ...


def cupy_of() -> SimpleNamespace:
    return SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda index: nullcontext(), Stream=lambda non_blocking: Stream()),
    )


class Communicator:
    """A communicator with CuPy 14's methods, which records its calls. Like CuPy's, it takes an id of 128 bytes, and
    addresses, counts and streams as integers. NCCL then takes only what is valid, and nothing after an abort."""

    def __init__(self, num_ranks: int, unique_id: bytes, rank: int) -> None:
        if type(unique_id) is not bytes:
            raise TypeError("Argument 'commId' has incorrect type (expected bytes)")
        if len(unique_id) != ID_BYTES:
            raise ValueError(f"commId length {len(unique_id)} != {ID_BYTES}.")
        assert 0 <= rank < num_ranks
        self.made_of, self.num_ranks = (num_ranks, unique_id, rank), num_ranks
        self.calls: list[tuple[Any, ...]] = []
        self.is_freed = False

    def abort(self) -> None:
        self.is_freed = True
        self.calls.append(("abort",))

    def check_async_error(self) -> None:
        assert not self.is_freed, "used after its abort"

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._message("send", pointer, count, dtype, peer, stream)

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._message("recv", pointer, count, dtype, peer, stream)

    def _message(self, name: str, *arguments: int) -> None:
        assert not self.is_freed, "used after its abort"
        for kind, argument in zip(_MESSAGE, arguments, strict=True):
            kind(operator.index(argument))
        pointer, count, dtype, peer, _ = arguments
        assert pointer
        assert count
        assert dtype == 1, "ncclUint8"
        assert 0 <= peer < self.num_ranks
        self.calls.append((name, *arguments))


ID_BYTES = 128
_MESSAGE = (ctypes.c_ssize_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)

"""Kernels that are called with one array of numbers, and run in torch's own threads.

A step calls a hundred kernels, and numba needs about a microsecond for each array of a call. Here a call passes
addresses, sizes and bits as integers. `TaskKernel` compiles the function when it is first called, and divides its items
among threads through a counter, so an item's bits do not depend on the division.

    number 0   how many items have been taken
    number 1   how many threads have begun
    number 2   the number of items
    from 3 on  the kernel's own numbers

Between `recording()` and its end, this thread's calls are only noted, for program.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.engine.kernels import jit, openmp

FIRST: Final = 3  # of the kernel's own numbers
FLOAT32, BFLOAT16, UINT8, INT8, INT32, INT64 = range(6)  # for `pointer`; bfloat16 is read as uint16
KINDS: Final = {"float32": FLOAT32, "bfloat16": BFLOAT16, "uint8": UINT8, "int8": INT8}
ANY: Final = 1 << 40  # the size of an array whose size a kernel does not need

_compiling: Final = threading.Lock()  # engines of one process share kernels
_recording: Final = threading.local()
_names: Final[dict[int, str]] = {}
_TYPES: Final = (types.float32, types.uint16, types.uint8, types.int8, types.int32, types.int64)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call that was noted: of the machine code at `address`. Work below `least` uses one thread."""

    address: int
    num_items: int
    work: int
    least: int
    numbers: tuple[int, ...]


def name_of(address: int) -> str:
    """Of the kernel whose machine code is there, for benchmarks."""
    return _names[address]


def is_recording() -> bool:
    """Whether this thread's calls are only noted."""
    return getattr(_recording, "calls", None) is not None


@contextmanager
def recording() -> Iterator[list[KernelCall]]:
    calls: list[KernelCall] = []
    _recording.calls = calls
    try:
        yield calls
    finally:
        del _recording.calls


@final
class TaskKernel:
    def __init__(self, function: Callable[[Any], None], name: str, *, least: int) -> None:
        """`function(task)` takes items until none is left. A call whose work is below `least` uses one thread.

        `name` differs for each kernel: `function` may be compiled several times, for several shapes or dtypes.
        """
        self._function, self._name, self._least = function, name, least
        self._compiled: Callable[[int], None] | None = None
        self._keep: Any = None

    def __call__(self, num_items: int, work: int, *numbers: int) -> None:
        kernel = self._compiled or self._compile()
        calls = getattr(_recording, "calls", None)
        if calls is not None:
            calls.append(KernelCall(self._keep.address, num_items, work, self._least, numbers))
            return
        task = (ctypes.c_int64 * (FIRST + len(numbers)))(0, 0, num_items, *numbers)
        if work < self._least:
            kernel(ctypes.addressof(task))
        else:
            openmp.run(kernel, ctypes.addressof(task))

    def _compile(self) -> Callable[[int], None]:
        with _compiling:
            if self._compiled is None:
                jit.name_for_cache(self._function, self._name)
                with jit.compiling_alone(self._function):
                    self._keep = jit.c_function(types.void(types.CPointer(types.int64)), self._function)
                _names[self._keep.address] = self._name
                self._compiled = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._keep.address)
        return self._compiled


@intrinsic
def take(_context: Any, task: Any, index: Any) -> Any:
    """Atomically increments task[index], and returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = context.cast(builder, args[1], signature.args[1], types.int64)
        return builder.atomic_rmw("add", builder.gep(args[0], [index]), ir.IntType(64)(1), "monotonic")

    return types.int64(task, index), generate


@intrinsic
def pointer(_context: Any, address: Any, kind: Any) -> Any:
    """The address as a pointer, for numba.carray. `kind` is a literal."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    pointed = types.CPointer(_TYPES[kind.literal_value])

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointed))

    return pointed(types.int64, kind), generate

"""Kernels that are called with one array of numbers, and run in torch's own threads.

A step calls a hundred kernels, and numba needs about a microsecond for each array of a call. Here a call passes
addresses, sizes and bits as integers. `TaskKernel` compiles the function when it is first called, and divides its items
among threads through a counter, so an item's bits do not depend on the division.

    number 0   how many items have been taken
    number 1   how many threads have begun
    number 2   the number of items
    from 3 on  the kernel's own numbers

Between `recording()` and its end, this thread's calls are only noted, for a KernelProgram.

The sections are: torch's threads, kernels, programs of recorded calls, memory of results.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from pdserve.engine.cpu.kernels import jit

# --- torch's own threads --------------------------------------------------------------------------------------
# There are tens of microseconds between the products of a decode step. In that time torch's OpenMP threads still spin,
# and take work within a few microseconds. Threads of our own would have to be woken first, and a second OpenMP pool
# would compete with torch's for the cores. So the parallel region is opened in the OpenMP library that torch has
# loaded. If that is not GNU's, our own threads are used.


def run(kernel: Callable[[int], None], task: int) -> None:
    """Calls kernel(task) on as many threads as torch has; each takes parts of the task until none is left.

    `kernel` is a ctypes function, `task` the address of its argument.
    """
    num_threads = torch.get_num_threads()
    parallel = _parallel()
    if num_threads == 1:
        kernel(task)
    elif parallel is None:
        jit.run_parts(lambda _: kernel(task), num_threads)
    else:
        parallel(kernel, task, num_threads, 0)


def barrier() -> int:
    """The address of a function at which the threads of `run` wait for each other; 0 if there is one thread."""
    library = _library()
    if torch.get_num_threads() == 1 or library is None:
        return 0
    return ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value or 0


def has_barrier() -> bool:
    return _library() is not None


@cache
def _parallel() -> Callable[..., None] | None:
    """GOMP_parallel(function, data, num_threads, flags), the function to which GCC compiles `omp parallel`."""
    library = _library()
    if library is None:
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]


@cache
def _library() -> ctypes.CDLL | None:
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        return ctypes.CDLL(str(path))
    return None


# --- kernels --------------------------------------------------------------------------------------------------

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
            run(kernel, ctypes.addressof(task))

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


# --- programs of recorded calls -------------------------------------------------------------------------------
# A program repeats recorded calls by one native call, as a CUDA graph does.
#
# A step of one row calls a hundred kernels that each take some microseconds; as many pass in Python between two of
# them. A program stores the numbers of all calls in one array. All threads walk through it in one parallel region, with
# a barrier before and after each call that several threads share.

_WIDTH: Final = 32  # numbers of a call: whole cache lines, because threads count in them
_ADDRESS, _LEAST, _IS_SHARED = _WIDTH - 3, _WIDTH - 2, _WIDTH - 1


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """Machine code, and the address of the numbers that it is called with, by one thread or by all."""

    address: int
    task: int
    is_shared: bool


@final
class KernelProgram:
    def __init__(self, calls: Sequence[KernelCall], inputs: Sequence[int]) -> None:
        """`inputs` are the addresses that differ from run to run. The calls that have the last one also differ in their
        number of items and work."""
        self._records = records = np.zeros((len(calls), _WIDTH), np.int64)
        for record, call in zip(records, calls, strict=True):
            assert FIRST + len(call.numbers) <= _ADDRESS
            record[2] = call.num_items
            record[FIRST : FIRST + len(call.numbers)] = call.numbers
            record[_ADDRESS], record[_LEAST], record[_IS_SHARED] = call.address, call.least, call.work >= call.least
        self._flat, self._at = records.reshape(-1), records.ctypes.data
        is_input = self._flat[:, None] == np.array(inputs)
        self._places, self._input_of = is_input.nonzero()
        self._varying = self._places[self._input_of == len(inputs) - 1] // _WIDTH

    def run(self, inputs: Sequence[int], num_items: int, work: int) -> None:
        records, calls = self._records, self._varying
        self._flat[self._places] = np.array(inputs)[self._input_of]
        records[:, :2] = 0
        records[calls, 2] = num_items
        records[calls, _IS_SHARED] = work >= records[calls, _LEAST]
        _walk()(len(records), 1, self._at, barrier())

    def calls(self) -> list[ProgramCall]:
        """The calls of the last run, ready to be repeated one by one, for benchmarks."""
        self._records[:, :2] = 0
        return [
            ProgramCall(int(record[_ADDRESS]), record.ctypes.data, bool(record[_IS_SHARED])) for record in self._records
        ]


@intrinsic
def _call(_context: Any, address: Any, task: Any) -> Any:
    """Calls the C function at `address` with the address of its task."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        of = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], of.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@cache
def _walk() -> TaskKernel:
    """walk(num_records, work, records, barrier): addresses; a barrier of 0 if there is one thread."""

    def walk(task: Any) -> None:
        thread, num_records, first, barrier = take(task, 1), task[2], task[3], task[4]
        was_shared = np.int64(0)
        for index in range(num_records):
            at = first + 8 * _WIDTH * index
            record = carray(pointer(at, INT64), (_WIDTH,))
            is_shared = record[_IS_SHARED]
            if barrier != 0 and index > 0 and is_shared + was_shared != 0:
                _call(barrier, 0)  # takes no argument, so this one is ignored
            if is_shared != 0 or thread == 0:
                _call(record[_ADDRESS], at)
            was_shared = is_shared

    return TaskKernel(walk, "walk", least=0)


# --- memory of results ----------------------------------------------------------------------------------------
# It is used again as soon as no tensor needs it. The C library returns large freed memory to the operating system, and
# new memory is cleared and mapped page by page: a prefill of 2,048 tokens spent a third of its time on that.

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
        if num_bytes < _LEAST_BYTES or is_recording():  # a recording gives tensors its own memory
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

"""Runs a kernel on torch's own threads.

There are tens of microseconds between the products of a decode step. In that time torch's OpenMP threads still spin,
and take work within a few microseconds. Threads of our own would have to be woken first, and a second OpenMP pool would
compete with torch's for the cores. So the parallel region is opened in the OpenMP library that torch has loaded. If
that is not GNU's, our own threads are used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from pdserve.engine.kernels import jit


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

"""Runs a kernel on torch's own threads.

Between a decode step's products lie tens of microseconds. torch's OpenMP threads still spin then and take work within
a few; a thread of ours would first have to be woken, and a second OpenMP pool would fight torch's for the cores. So the
parallel region is opened in the very library that torch has loaded. Where that is another OpenMP than GNU's, work goes
to our own threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from pdserve.engine.kernels import jit


def run(kernel: Callable[[int], None], task: int) -> None:
    """Calls kernel(task) on as many threads as torch has; each takes of the task's work until none is left.

    `kernel` is a C function as ctypes has it, `task` the address of what it is given.
    """
    num_threads = torch.get_num_threads()
    parallel = _parallel()
    if num_threads == 1:
        kernel(task)
    elif parallel is None:
        jit.run_parts(lambda _: kernel(task), num_threads)
    else:
        parallel(kernel, task, num_threads, 0)


@cache
def _parallel() -> Callable[..., None] | None:
    """GOMP_parallel(function, data, num_threads, flags): what GCC makes of `omp parallel`."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        parallel = ctypes.CDLL(str(path)).GOMP_parallel
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel  # type: ignore[no-any-return]
    return None

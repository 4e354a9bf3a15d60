"""Compiles kernels with numba if it is installed; GPU machines work without it.

task.py says how kernels are called, and task.py in which threads they run: there is no second pool of threads that
spins beside torch's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from pdserve.owned_folder import open_private

try:
    import numba
except ImportError:  # a machine whose engine runs on CUDA
    numba = None

# Reductions may be reordered into vector lanes. NaN and infinity are preserved.
_FAST_MATH: Final = {"nsz", "arcp", "contract", "afn", "reassoc"}
_COMPILE_S: Final = 60.0  # a process that compiles for longer is not waited for
_SOURCES: Final = Path(__file__).parent


def is_available() -> bool:
    return numba is not None


def target() -> tuple[str, str]:
    """The CPU that kernels are compiled for, and its features as "+avx2,-amx-tile"; numba's files are kept by both.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may name fewer features than this machine has.
    """
    from numba.core.registry import cpu_target

    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return name, features


@contextmanager
def compiling_alone(function: Callable[..., Any]) -> Iterator[None]:
    """A lock around the compilation of `function`, for several processes that start together.

    If no kernel of that name is cached, one process compiles while the others wait; they then load it from disk.
    """
    folder = cache_folder(function)
    descriptor = None if folder is None else _cold_lock(folder, function.__qualname__.rpartition(".")[2])
    if descriptor is None:
        yield
        return
    try:
        until_s = time.monotonic() + _COMPILE_S
        while time.monotonic() < until_s:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def cache_folder(function: Callable[..., Any]) -> Path | None:
    """Where numba stores the machine code of `function`; None if no folder is writable."""
    from numba.core.caching import FunctionCache

    try:
        return Path(FunctionCache(function).cache_path)
    except RuntimeError:
        return None


def _cold_lock(folder: Path, name: str) -> int | None:
    """A file to lock; None if a kernel of that name is cached already or cannot be cached."""
    if any(folder.glob(f"*{name}-*.nbi")):
        return None
    try:
        return open_private(folder / f"{name}.lock")
    except OSError:
        return None


def name_for_cache(function: Callable[..., Any], name: str) -> None:
    """Gives `function` a file name in numba's cache that stands for one machine code only.

    numba numbers the kernels of one function, such as those for several dtypes, in an index that processes update
    without a lock. If two processes compile at the same time, one kernel's number may lead to the code of another. With
    `name` and the revision in the file name, each index has one kernel, so all processes write the same code.
    """
    function.__qualname__ = f"{name}-{_revision()}"


@cache
def _revision() -> str:
    """A digest of what machine code depends on: the sources, which are inlined in each other, numba and the CPU.

    numba itself looks only at the time stamp of the file that defines a kernel.
    """
    digest = hashlib.blake2b(repr((numba.__version__, target())).encode(), digest_size=6)
    for source in sorted(_SOURCES.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """`function` as numba's C callback, cached on disk if possible. Requires numba and `name_for_cache`."""
    options = {"fastmath": _FAST_MATH, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.cfunc(signature, cache=True, **options)(function)
    except RuntimeError:
        return numba.cfunc(signature, **options)(function)


@cache
def bits(value: float) -> int:
    """A float64 as an integer, for kernels that take integers only."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function to be called from other kernels."""
    if numba is None:
        return function
    options = {"fastmath": _FAST_MATH, "error_model": "numpy", "boundscheck": False}
    return numba.njit(inline="always", **options)(function)  # type: ignore[no-any-return]


def run_parts(run: Callable[[int], object], num_parts: int) -> None:
    """Calls run(0) here and run(1) .. run(num_parts - 1) on other threads, and waits for all."""
    others = [_pool().submit(run, part) for part in range(1, num_parts)]
    run(0)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="kernel")

"""Memory of a pool on the host, which other processes of this machine may map but never write.

An anonymous memory file (memfd): nothing to unlink, nothing left behind by a SIGKILL, no limit of /dev/shm. It is
mapped by those who own it (a process, or the tensor-parallel ranks of one worker), and then sealed: the kernel
refuses every later mapping that could write, and every change of size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from typing import Final, final

_SEAL_FUTURE_WRITE: Final = 0x10  # fcntl has a name for it from Python 3.13 on


@final
class HostMemory:
    """`buffer`: num_bytes zero bytes from a page's beginning, touched only as they come into use.

    `descriptor` is the memory file, for another process to map from its first byte, as long as this object lives;
    None where the system has no sealed memory files.
    """

    def __init__(self, num_bytes: int, joined: int | None = None, *, is_sealed: bool = True) -> None:
        """`joined`: the memory file of another owner, which has not sealed it yet; it is taken over. Raises ValueError
        where that is shorter. Not `is_sealed`: others are to join, then `seal` is called."""
        self.descriptor = _memory_file(max(num_bytes, 1)) if joined is None else joined
        if self.descriptor is None:
            memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            weakref.finalize(self, os.close, self.descriptor)
            memory = mmap.mmap(self.descriptor, max(num_bytes, 1))
            if is_sealed and joined is None:
                self.seal()
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(memory)[:num_bytes]

    def seal(self) -> None:
        if self.descriptor is not None and not _seal(self.descriptor):
            self.descriptor = None


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can shrink the file under its readers. Raises OSError where it is no memory file."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def _memory_file(num_bytes: int) -> int | None:
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _seal(descriptor: int) -> bool:
    """False where the kernel knows no seal against later writers (before Linux 5.1)."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return False
    return True

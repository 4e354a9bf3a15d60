"""Memory of a pool on the host, which other processes of this machine may map but never write.

It is an anonymous memory file (memfd): it needs no unlinking, leaves nothing behind after a SIGKILL, and is not limited
by /dev/shm. Its owners map it (a process, or the tensor-parallel ranks of one worker) and then seal it: the kernel
refuses every later writable mapping and every change of size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from typing import Final, final

_SEAL_FUTURE_WRITE: Final = 0x10  # defined in fcntl from Python 3.13 on


@final
class HostMemory:
    """`buffer`: num_bytes zero bytes, page-aligned; pages are allocated when they are used.

    `descriptor` is the memory file, which other processes can map from its first byte as long as this object exists;
    None if the system has no sealed memory files.
    """

    def __init__(self, num_bytes: int, joined: int | None = None, *, is_sealed: bool = True) -> None:
        """`joined`: the memory file of another owner that has not sealed it yet; its descriptor is taken over. Raises
        ValueError if the file is shorter. `is_sealed` False: others will join, and then `seal` is called."""
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
    """Whether the file can no longer shrink. Raises OSError if it is no memory file."""
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
    """False if the kernel has no seal against later writable mappings (before Linux 5.1)."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return False
    return True

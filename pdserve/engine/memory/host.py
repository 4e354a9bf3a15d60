"""Memory of the host: pools that processes share, the memory and cores that it leaves to this process, and a tier for
blocks that leave a pool. Imports no torch.

Other processes of this machine may map a pool, but never write it. It is an anonymous memory file (memfd): it needs no
unlinking, leaves nothing behind after a SIGKILL, and is not limited by /dev/shm. Its owners map it (a process, or the
tensor-parallel ranks of one worker) and then seal it: the kernel refuses every later writable mapping and every change
of size.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.interface import Engine, KvPool

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
    import fcntl  # Linux only, and the commands of clients import this file

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
    import fcntl  # Linux only, and the commands of clients import this file

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return False
    return True


# --- memory and cores that are left ---------------------------------------------------------------------------
# The host and the process's control groups limit both.

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
# Of control groups of versions 2 and 1: the limit, what is used of it, and the cached file pages in memory.stat.
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Memory that is available without swapping, page cache included. None if unknown."""
    folders = (*cgroups(proc, cgroup), *cgroups(proc, cgroup / "memory", "memory"))
    limits = [host_bytes(proc / "meminfo"), *map(cgroup_bytes, folders)]
    return min((limit for limit in limits if limit is not None), default=None)


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Cores that this process may run on, at most as many as the quota of its control groups; 1 at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in cgroups(proc, cgroup) if (quota := cgroup_cores(folder)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def cgroups(proc: Path, root: Path, controller: str = "") -> Iterator[Path]:
    """The folders of this process's control group and its parents. A container sees its own group as the root.
    `controller`: that of a tree of version 1."""
    yield root
    groups = [line.split(":", 2) for line in _lines(proc / "self/cgroup") if line.count(":") > 1]
    path = next((path for _, names, path in groups if controller in names.split(",")), "")
    folder = root
    for part in Path(path).parts[1:]:
        folder = folder / part
        yield folder


def host_bytes(meminfo: Path) -> int | None:
    """MemAvailable: memory that is available without swapping, page cache included."""
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_bytes(folder: Path) -> int | None:
    """Memory that a container may still allocate, including its cached file pages, which can be freed."""
    for limit_name, used_name, cached_name in _CGROUP_FILES:
        limit, used = "".join(_lines(folder / limit_name)), "".join(_lines(folder / used_name))
        if limit.isdigit() and used.isdigit():
            words = [line.split() for line in _lines(folder / "memory.stat")]
            return max(0, int(limit) - int(used) + sum(int(one[1]) for one in words if one[0] == cached_name))
    return None  # "max", or no such container


def cgroup_cores(folder: Path) -> float | None:
    """The quota of cpu.max, which contains the CPU microseconds of each period, or `max`."""
    words = "".join(_lines(folder / "cpu.max")).split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


# --- host tier ------------------------------------------------------------------------------------------------
# Memory for blocks that have left a pool on the host (core/kv/host_tier.py), and the time of a copy.

AUTO: Final = -1  # of kv_host_bytes: left to the device
TIMED_BLOCKS: Final = 8
MOST_SHARE: Final = 0.9  # of the memory that is free
MOST_HASHES: Final = 2**19  # of pool and tier together: a router that attaches gets all of them in one message
BURST_BYTES: Final = 128 * 2**20  # copied for one allocation, while the engine waits
PAGED_BYTES: Final = 64 * 2**20  # of memory that gets its pages at a time


@final
class HostCopies:
    """Slots in the order of their numbers, each one run of bytes: the runs of a block one after the other."""

    def __init__(
        self, pool: KvPool, num_bytes: int, report: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        """Takes the whole memory at once, because an engine that waits for pages waits for seconds. `report` is called
        with the bytes so far. Raises ConfigError if not one block fits, or if the memory is not free."""
        import numpy as np  # workers load it anyway, and the commands of clients import this file

        self.num_slots = check_room(pool, num_bytes)
        self.most_saved = max(1, BURST_BYTES // pool.block_bytes)
        self._pool = pool_blocks(pool)
        num_bytes = self.num_slots * pool.block_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        flat = np.frombuffer(self._memory, np.uint8)
        for start in range(0, num_bytes, PAGED_BYTES):
            flat[start : start + PAGED_BYTES] = 0
            report(min(start + PAGED_BYTES, num_bytes), num_bytes)
        self._slots = flat.reshape(self.num_slots, pool.runs_per_block, -1)

    def save(self, block: int, slot: int) -> None:
        self._slots[slot] = self._pool[:, block]

    def load(self, slot: int, block: int) -> None:
        self._pool[:, block] = self._slots[slot]

    def copy_of(self, slot: int) -> Any:
        """The bytes of a slot, an array of (runs, bytes of a run)."""
        return self._slots[slot]

    def measure_s(self) -> float:
        """Seconds to load one block, the mean over some at different places. Overwrites the first blocks of the
        pool."""
        num_blocks = min(int(self._pool.shape[1]), TIMED_BLOCKS)
        step = max(1, self.num_slots // num_blocks)
        began_s = time.perf_counter()
        for block in range(num_blocks):
            self.load(block * step % self.num_slots, block)
        return (time.perf_counter() - began_s) / num_blocks


def check_room(pool: KvPool, num_bytes: int) -> int:
    """Number of slots in `num_bytes`. Raises ConfigError if not one block fits, or if the memory is not free."""
    num_slots = min(num_bytes // pool.block_bytes, MOST_HASHES - pool.num_blocks)
    if num_slots < 1:
        expected = (
            f"0, or at least {pool.block_bytes}, one block of this model, with a pool of fewer than {MOST_HASHES}"
        )
        raise ConfigError("kv_host_bytes", num_bytes, expected)
    free = free_bytes()
    pool_bytes = pool.num_blocks * pool.block_bytes if pool.is_on_host else 0  # it gets its pages later
    left = None if free is None else int(MOST_SHARE * (free - pool_bytes))
    if left is not None and num_bytes > left:
        raise ConfigError("kv_host_bytes", num_bytes, f"at most {max(left, 0)}: {free} bytes are free")
    return num_slots


def pool_blocks(pool: KvPool) -> Any:
    """The blocks of a pool on the host, an array of (runs, blocks, bytes of a run)."""
    import numpy as np  # workers load it anyway, and the commands of clients import this file

    num_bytes, runs = pool.num_blocks * pool.block_bytes, pool.runs_per_block
    flat = np.frombuffer(pool.buffer, np.uint8, count=num_bytes)
    return flat.reshape(runs, pool.num_blocks, pool.block_bytes // runs)


def host_copies(
    engine: Engine, config: WorkerConfig, report: Callable[[int, int], None] = lambda done, of: None
) -> HostCopies | None:
    """None if the tier is off, or if the pool is on a GPU. Raises ConfigError if the engine cannot have one."""
    num_bytes = host_bytes_of(engine, config)
    return HostCopies(engine.pool, num_bytes, report) if num_bytes and engine.pool.is_on_host else None


def host_bytes_of(engine: Engine, config: WorkerConfig) -> int:
    """The size of the tier; 0: off; AUTO: what a worker on a GPU takes by default. Raises ConfigError."""
    num_bytes = config.kv_host_bytes
    is_possible = config.is_prefix_cache_on and engine.spec.tp_degree == 1
    if num_bytes == AUTO:
        return AUTO if is_possible and not engine.pool.is_on_host else 0
    if num_bytes and not config.is_prefix_cache_on:
        raise ConfigError("kv_host_bytes", num_bytes, "0 while is_prefix_cache_on is false")
    if num_bytes and not is_possible:
        raise ConfigError("kv_host_bytes", num_bytes, "0 for a pool of several ranks")
    return num_bytes

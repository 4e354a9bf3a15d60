"""Memory and cores that this host and the process's control groups leave to it. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Memory that is available without swapping, page cache included. None if unknown."""
    limits = [host_bytes(proc / "meminfo"), *(cgroup_bytes(folder) for folder in cgroups(proc, cgroup))]
    return min((limit for limit in limits if limit is not None), default=None)


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Cores that this process may run on, at most as many as the quota of its control groups; 1 at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in cgroups(proc, cgroup) if (quota := cgroup_cores(folder)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def cgroups(proc: Path, root: Path) -> Iterator[Path]:
    """The folders of this process's control group and its parents. A container sees its own group as the root."""
    yield root
    [path] = [line[3:] for line in _lines(proc / "self/cgroup") if line.startswith("0::")] or [""]
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
    limit = "".join(_lines(folder / "memory.max"))
    used = "".join(_lines(folder / "memory.current"))
    if not limit.isdigit() or not used.isdigit():
        return None  # "max", or no such container
    cached = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith("inactive_file "))
    return max(0, int(limit) - int(used) + cached)


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

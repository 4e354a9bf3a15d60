"""One process's memory according to /proc, and its change from sample to sample."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

COUNTS: Final = ("descriptors", "threads", "segments")
_PRIVATE: Final = ("Private_Clean", "Private_Dirty")
_SEGMENT: Final = re.compile(r"/dev/shm/|/memfd:|/SYSV")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    requests: int  # answered since the warm-up
    private_bytes: int  # unique set size: what ends with the process
    resident_bytes: int
    descriptors: int
    threads: int
    segments: int  # mapped shared memory: files of /dev/shm, memory files, System V


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    bytes_per_request: float
    standard_error: float  # as of independent residuals


def sample(pid: int, requests: int) -> MemorySample:
    """Raises OSError where the process is gone."""
    folder = Path("/proc") / str(pid)
    rollup = dict(re.findall(r"^(\w+): +(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE))
    mapped = [line for line in (folder / "maps").read_text().splitlines() if _SEGMENT.search(line)]
    return MemorySample(
        requests=requests,
        private_bytes=1024 * sum(int(rollup[name]) for name in _PRIVATE),
        resident_bytes=1024 * int(rollup["Rss"]),
        descriptors=len(os.listdir(folder / "fd")),
        threads=len(os.listdir(folder / "task")),
        segments=len(mapped),
    )


def slope(samples: Sequence[MemorySample]) -> Slope:
    """Least squares over private bytes. Needs at least three samples."""
    mean_x = sum(one.requests for one in samples) / len(samples)
    mean_y = sum(one.private_bytes for one in samples) / len(samples)
    spread = sum((one.requests - mean_x) ** 2 for one in samples)
    rate = sum((one.requests - mean_x) * (one.private_bytes - mean_y) for one in samples) / spread
    left = sum((one.private_bytes - mean_y - rate * (one.requests - mean_x)) ** 2 for one in samples)
    return Slope(bytes_per_request=rate, standard_error=math.sqrt(left / (len(samples) - 2) / spread))


def rises(samples: Sequence[MemorySample]) -> tuple[str, ...]:
    """Counts whose lowest value in the last third is above their highest in the first third."""
    third = max(1, len(samples) // 3)
    return tuple(
        name
        for name in COUNTS
        if min(getattr(one, name) for one in samples[-third:]) > max(getattr(one, name) for one in samples[:third])
    )


def rise_per_request(samples: Sequence[MemorySample], name: str) -> float:
    """The increase of the count `name` per request."""
    return float(getattr(samples[-1], name) - getattr(samples[0], name)) / (samples[-1].requests - samples[0].requests)

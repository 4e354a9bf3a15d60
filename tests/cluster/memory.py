"""The memory of a cluster's processes under many short requests, and what of it grows.

A closed loop of clients sends distinct prompts of 4 to 80 tokens for 4 tokens each over the SDK, so that both paths are
used. After every `every` requests the loop pauses until nothing runs, and each process is measured from /proc. The
slope is the least-squares bytes of private memory per request after the warm-up, with its standard error.

The warm-up must fill every bounded memory: 4,096 ended transfers, 1,024 explanations, the prefix cache. It begins with
bursts of more clients than later, because the pool of connections to Redis is as large as the most lookups at a time
(32). What is kept for a fixed time instead of a fixed number shows as a slope.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve import AsyncClient
from pdserve.launch.running import Running

MAX_BYTES_PER_REQUEST: Final = 50.0
SHORTEST, LONGEST = 4, 80  # prompt tokens: below and above what decode workers prefer to compute themselves
MAX_TOKENS: Final = 4
BURST: Final = 64  # clients at a time
NUM_BURSTS: Final = 4
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


def growing(samples: Mapping[str, Sequence[MemorySample]]) -> list[str]:
    """What grows, from the samples of each process after the warm-up."""
    found = [f"{name}: {count}" for name, ones in samples.items() for count in rises(ones)]
    slopes = {name: slope(ones).bytes_per_request for name, ones in samples.items()}
    return found + [
        f"{name}: {one:.0f} bytes per request" for name, one in slopes.items() if one >= MAX_BYTES_PER_REQUEST
    ]


async def drive(target: str, count: int, at_once: int, draw: random.Random) -> None:
    """Raises whatever a request raises."""
    left = iter(range(count))

    async def one(client: AsyncClient) -> None:
        for _ in left:
            prompt = [draw.randrange(33, 122) for _ in range(draw.randint(SHORTEST, LONGEST))]
            await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)

    async with AsyncClient(target) as client:
        await asyncio.gather(*(one(client) for _ in range(at_once)))


def measure(
    cluster: Running, *, requests: int, warm_up: int, every: int, at_once: int
) -> dict[str, list[MemorySample]]:
    """Samples by process, the first one right after the warm-up."""
    draw = random.Random(1)
    for _ in range(NUM_BURSTS):
        asyncio.run(drive(cluster.target, 2 * BURST, BURST, draw))
    asyncio.run(drive(cluster.target, warm_up, at_once, draw))
    pids = cluster.pids()
    taken = {name: [sample(pid, 0)] for name, pid in pids.items()}
    for done in range(every, requests + 1, every):
        asyncio.run(drive(cluster.target, every, at_once, draw))
        for name, pid in pids.items():
            taken[name].append(sample(pid, done))
    if cluster.pids() != pids:
        raise RuntimeError(f"a process was restarted: {pids} became {cluster.pids()}")
    return taken

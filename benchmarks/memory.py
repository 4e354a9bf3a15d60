"""Checks that a cluster's memory does not grow under many short requests.

    python -m benchmarks.memory [--requests 20000] [--warm-up 8000] [--every 500] [--at-once 16] [--json]

A closed loop of `--at-once` clients sends distinct prompts of 4 to 80 tokens for 4 tokens each over the SDK, so that
both paths are used. After every `--every` requests the loop pauses until nothing runs, and each process is measured
from /proc: private memory (unique set size), resident memory, descriptors, threads, and mapped shared-memory segments.
The slope is the least-squares bytes of private memory per request after the warm-up, with its standard error. A process
meets the bar where the slope is below 50 bytes per request and its counts do not rise; the exit status is 1 otherwise.

The warm-up must fill every bounded memory: 4,096 ended transfers, 1,024 explanations, the prefix cache. It begins with
bursts of more clients than later, because the pool of connections to Redis is as large as the most lookups at a time
(32). What is kept for a fixed time instead of a fixed number shows as a slope.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.memory_samples import MemorySample, Slope, rises, sample, slope
from pdserve import AsyncClient
from pdserve.launch.running import Running

MAX_BYTES_PER_REQUEST: Final = 50.0
SHORTEST, LONGEST = 4, 80  # prompt tokens: below and above what decode workers prefer to compute themselves
MAX_TOKENS: Final = 4
BURST: Final = 64  # clients at a time
NUM_BURSTS: Final = 4
FLAGS: Final = (
    *("--model", "toy", "--prefill", "1", "--decode", "1"),
    *("--set", "worker.kv_blocks=1024"),  # the warm-up fills the prefix cache
    # A busy machine rejects nothing for its speed.
    *("--set", "router.slo_ttft_s=60", "--set", "router.slo_tpot_s=10"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    process: str
    first: MemorySample
    last: MemorySample
    slope: Slope
    rising: tuple[str, ...]  # counts that rose

    @property
    def is_met(self) -> bool:
        return self.slope.bytes_per_request < MAX_BYTES_PER_REQUEST and not self.rising


def judge(samples: Mapping[str, Sequence[MemorySample]]) -> list[Verdict]:
    """A verdict for each process, from its samples after the warm-up."""
    return [
        Verdict(process=name, first=ones[0], last=ones[-1], slope=slope(ones), rising=rises(ones))
        for name, ones in samples.items()
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
    cluster: Running, *, requests: int, warm_up: int, every: int, at_once: int, is_shown: bool = True
) -> dict[str, list[MemorySample]]:
    """Samples by process, the first one right after the warm-up."""
    draw = random.Random(1)
    for _ in range(NUM_BURSTS):
        asyncio.run(drive(cluster.target, 2 * BURST, BURST, draw))
    asyncio.run(drive(cluster.target, warm_up, at_once, draw))
    pids = cluster.pids()
    taken = {name: [sample(pid, 0)] for name, pid in pids.items()}
    began_s = time.monotonic()
    for done in range(every, requests + 1, every):
        asyncio.run(drive(cluster.target, every, at_once, draw))
        for name, pid in pids.items():
            taken[name].append(sample(pid, done))
        if is_shown:
            now = "  ".join(f"{name} {ones[-1].private_bytes / 2**20:.2f}" for name, ones in taken.items())
            print(f"{done:6d} requests, {done / (time.monotonic() - began_s):5.0f}/s   MiB private: {now}", flush=True)
    if cluster.pids() != pids:
        raise RuntimeError(f"a process was restarted: {pids} became {cluster.pids()}")
    return taken


def table(verdicts: Sequence[Verdict]) -> str:
    lines = ["process    private MiB     bytes/request   descriptors   threads   segments   verdict"]
    for one in verdicts:
        first, last = one.first, one.last
        verdict = "met" if one.is_met else "missed" + "".join(f", more {name}" for name in one.rising)
        lines.append(
            f"{one.process:<8} {first.private_bytes / 2**20:6.1f} {last.private_bytes / 2**20:6.1f}"
            f"   {one.slope.bytes_per_request:7.1f} +-{one.slope.standard_error:5.1f}"
            f"   {first.descriptors:4d} {last.descriptors:4d}    {first.threads:4d} {last.threads:4d}"
            f"   {first.segments:4d} {last.segments:4d}    {verdict}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=8_000)
    parser.add_argument("--every", type=int, default=500, help="requests between two samples")
    parser.add_argument("--at-once", type=int, default=16, help="clients of the closed loop")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with Running.start(*FLAGS) as cluster:
        samples = measure(
            cluster, requests=flags.requests, warm_up=flags.warm_up, every=flags.every, at_once=flags.at_once
        )
    verdicts = judge(samples)
    print(table(verdicts))
    if flags.json:
        print(json.dumps([asdict(one) | {"is_met": one.is_met} for one in verdicts]))
    return 0 if all(one.is_met for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

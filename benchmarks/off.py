"""What workers without tiers lose to what was built for tiers: `python -m benchmarks.agents --off`.

Alternates this checkout with another commit (by default the one before the first tier), which is checked out into a
temporary folder. Each has a process of its own, which imports that checkout and measures

- microseconds per block to allocate, to commit and to release the blocks of a text, as its length and the number of
  texts in the pool vary. Nearly every allocation evicts;
- TTFT and TPOT of requests, one after the other, to a cluster of one worker with the engine toy and no tier.

Printed are the ratios of this checkout to the other one, the median of the rounds with the minimum and the maximum.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parents[1]
BEFORE_TIERS: Final = "d9697026"
SHAPES: Final = ((1, 50_000), (16, 50_000), (256, 50_000))  # blocks of a text, blocks of the pool
BLOCKS: Final = 60_000  # of a measurement, beyond those that fill the pool
BLOCK_SIZE: Final = 16
MOST_RATIO: Final = 1.05
CLUSTER: Final = ("--engine", "toy", "--prefill", "0", "--decode", "1", "--set", "worker.toy_step_s=0.004")
REQUESTS: Final = 20  # of a round
PROMPT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 32


# --- the process of one checkout ------------------------------------------------------------------------------


def block_us(length: int, num_blocks: int, first: int) -> float:
    """`first`: number of the first text, so that none is ever seen again."""
    from pdserve.core.kv.blocks import BlockAllocator
    from pdserve.core.kv.cache import KvCache

    kv = KvCache(BlockAllocator(num_blocks), BLOCK_SIZE)

    def run(texts: range) -> None:
        for text in texts:
            hashes = [(text << 32 | at).to_bytes(16, "big") for at in range(length)]
            allocation = kv.allocate(length * BLOCK_SIZE, hashes)
            assert allocation is not None
            kv.commit(allocation.blocks, hashes, 0, length)
            kv.release(allocation.blocks)
            kv.take_changes()

    num_filling, num_texts = num_blocks // length + 1, BLOCKS // length
    run(range(first, first + num_filling))
    began_s = time.process_time()
    run(range(first + num_filling, first + num_filling + num_texts))
    return 1e6 * (time.process_time() - began_s) / (num_texts * length)


async def requests_s(target: str, round_: int) -> dict[str, float]:
    """Medians of TTFT and TPOT."""
    from pdserve import AsyncClient

    ttfts_s, tpots_s = [], []
    async with AsyncClient(target) as client:
        for number in range(REQUESTS):
            prompt = [3 + (round_ * 131 + number * 17 + at) % 90 for at in range(PROMPT_TOKENS)]
            began_s, times_s = time.perf_counter(), []
            async for _ in client.stream(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True):
                times_s.append(time.perf_counter())
            ttfts_s.append(times_s[0] - began_s)
            tpots_s.append((times_s[-1] - times_s[0]) / (OUTPUT_TOKENS - 1))
    return {"TTFT": statistics.median(ttfts_s), "TPOT": statistics.median(tpots_s)}


def answer_orders() -> None:
    from pdserve.launch.running import Running

    cluster = Running.start(*CLUSTER, timeout_s=120.0)
    try:
        for line in sys.stdin:
            number, found = int(json.loads(line)["round"]), dict[str, float]()
            if number < 0:
                break
            for at, (length, num_blocks) in enumerate(SHAPES):
                name = f"us per block, {length} a text, pool of {num_blocks}"
                found[name] = block_us(length, num_blocks, (number * len(SHAPES) + at) << 24)
            found |= asyncio.run(requests_s(cluster.target, number))
            print(json.dumps(found), flush=True)
    finally:
        cluster.stop(30.0)
    print(json.dumps({}), flush=True)


# --- both checkouts -------------------------------------------------------------------------------------------


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(HERE), *words], check=True, capture_output=True)

    with tempfile.TemporaryDirectory(prefix="pdserve-off-") as name:
        folder = Path(name) / "before"
        git("worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def report(commit: str, rounds: int) -> None:
    from benchmarks.harness import JsonProcess, spread, table

    def started(folder: Path) -> JsonProcess:
        # Without the folder of this file in the path (-P), which has modules with names of the standard library.
        return JsonProcess([sys.executable, "-P", __file__], {**os.environ, "PYTHONPATH": str(folder)})

    found: dict[str, list[tuple[float, float]]] = {}
    with checkout(commit) as folder:
        both = [started(HERE), started(folder)]
        try:
            for number in range(rounds):
                order = {"round": number}
                turns = both if number % 2 == 0 else both[::-1]
                said: list[dict[str, Any]] = [one.ask(order) for one in turns]
                now, before = said if number % 2 == 0 else said[::-1]
                for name in now:
                    found.setdefault(name, []).append((now[name], before[name]))
                print(f"round {number}: {now}, before {before}", flush=True)
        finally:
            for one in both:
                with suppress(OSError):  # it has ended by itself
                    one.ask({"round": -1})  # it stops its cluster
                one.close()
    rows = [["", "this checkout", f"{commit}", "ratio", f"bar {MOST_RATIO}"]]
    for name, pairs in found.items():
        ratios = [now / before for now, before in pairs]
        now, before = (statistics.median(column) for column in zip(*pairs, strict=True))
        verdict = "met" if statistics.median(ratios) <= MOST_RATIO else "missed"
        rows.append([name, f"{now:.4g}", f"{before:.4g}", spread(ratios, "{:.3f}"), verdict])
    print(table(rows))


if __name__ == "__main__":
    answer_orders()

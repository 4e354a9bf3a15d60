"""What the host tier of the KV cache costs and saves: `python -m benchmarks.tiers [--shape 125m]`.

- Copies of blocks out of the pool and back, beside one memcpy of as many bytes; rounds alternate.
- A decode step of the engine with one block saved and one loaded before it, beside a step alone; steps alternate.
- Sessions that grow, as those of agents do: each turn sends the conversation so far. Their KV needs `--times` as much
  memory as the pool has, and the turns of all sessions alternate, so without a tier a pool that evicts the least
  recently used block first has none of them when they come back. Rounds with and without a tier alternate, with a new
  cluster of one decode worker each, which also computes the prompts.

Of a turn, the blocks of its session's earlier turns are *reusable*; `cached_prompt_tokens` of the answer says how many
were served from the cache. Bars: copies at least 0.8 of a memcpy, a step at most 1.05 of one alone, at least 97 % of
the reusable tokens served, and the 90th percentile of the time of a request per output token 2.5 times better.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.harness import spread, table
from examples.make_random_model import SHAPES, write_model
from pdserve import AsyncClient
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine
from pdserve.engine.memory.host import HostCopies
from pdserve.testing import Cluster

BLOCK_SIZE: Final = 16
ROWS: Final = 8  # of a decode step
CONTEXT: Final = 256
PATIENT: Final = {"slo_ttft_s": 3600.0, "slo_tpot_s": 60.0}  # no request is rejected


@dataclass(frozen=True, slots=True)
class Turn:
    session: int
    reusable: int
    cached: int
    output_tokens: int
    seconds: float
    ttft_s: float


def copies(engine: Engine, rounds: int) -> list[list[str]]:
    """GB/s of each kind of copy."""
    pool = engine.pool
    count = min(pool.num_blocks, 128)
    store = HostCopies(pool, count * pool.block_bytes)
    source, target = np.ones(count * pool.block_bytes, np.uint8), np.ones(count * pool.block_bytes, np.uint8)
    parts = [slice(block * pool.block_bytes, (block + 1) * pool.block_bytes) for block in range(count)]

    def memcpy() -> None:
        for part in parts:
            target[part] = source[part]

    def save() -> None:
        for block in range(count):
            store.save(block, block)

    def load() -> None:
        for block in range(count):
            store.load(block, block)

    kinds = {"memcpy, a block at a time": memcpy, "save": save, "load": load}
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, run in kinds.items():
            began_s = time.perf_counter()
            run()
            speeds[name].append(count * pool.block_bytes / (time.perf_counter() - began_s) / 1e9)
    peer = speeds["memcpy, a block at a time"][1:]
    rows = [["copy", "GB/s", "of memcpy"]]
    for name, found in speeds.items():
        ratios = [ours / theirs for ours, theirs in zip(found[1:], peer, strict=True)]
        rows.append([name, spread(found[1:], "{:.2f}"), spread(ratios, "{:.2f}")])
    return rows


def steps(engine: Engine, rounds: int) -> list[list[str]]:
    spec, pool = engine.spec, engine.pool
    store = HostCopies(pool, 8 * pool.block_bytes)
    each = CONTEXT // spec.block_size + 1
    rows = [
        Row(
            tokens=[7],
            start=CONTEXT,
            blocks=list(range(number * each, (number + 1) * each)),
            sample=Sampling(temperature=0.0),
            history=[7] * (CONTEXT + 1),
            prompt_len=CONTEXT,
        )
        for number in range(ROWS)
    ]
    beside = pool.num_blocks - 1
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds * 10 + 4):
        has_copy = bool(number % 2)
        began_s = time.perf_counter()
        if has_copy:
            store.save(beside, number % 8)
            store.load(number % 8, beside)
        engine.step(rows)
        seconds[has_copy].append(time.perf_counter() - began_s)
    alone, with_copy = (statistics.median(seconds[one][2:]) for one in (False, True))
    return [
        ["step", "median ms", "of one alone"],
        ["alone", f"{alone * 1e3:.2f}", "1"],
        ["one block saved and loaded", f"{with_copy * 1e3:.2f}", f"{with_copy / alone:.3f}"],
    ]


async def replay(target: str, arguments: argparse.Namespace) -> list[Turn]:
    """The turns after the first of each session."""
    draw = random.Random(arguments.seed)
    texts: list[list[int]] = [[] for _ in range(arguments.sessions)]
    found: list[Turn] = []
    gate = asyncio.Semaphore(arguments.at_once)
    async with AsyncClient(target) as client:

        async def turn(session: int) -> None:
            text = texts[session]
            reusable = max(0, len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
            text += [draw.randrange(3, 4000) for _ in range(arguments.growth)]
            async with gate:
                began_s, ttft_s, ids = time.perf_counter(), 0.0, list[int]()
                stream = client.stream(text, max_tokens=arguments.answer, temperature=0.0, ignore_eos=True)
                async for piece in stream:
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    ids += piece.token_ids
                seconds = time.perf_counter() - began_s
            text += ids
            cached = stream.completion.usage.cached_prompt_tokens
            if reusable:
                found.append(Turn(session, reusable, min(cached, reusable), len(ids), seconds, ttft_s))

        for _ in range(arguments.turns):
            await asyncio.gather(*map(turn, range(arguments.sessions)))
    return found


def sessions(model: Path, block_bytes: int, arguments: argparse.Namespace) -> list[list[str]]:
    longest = arguments.turns * (arguments.growth + arguments.answer)
    working = arguments.sessions * -(-longest // BLOCK_SIZE)
    pool = max(working // arguments.times, arguments.at_once * -(-longest // BLOCK_SIZE) + 1)
    found: dict[bool, list[Turn]] = {False: [], True: []}
    shared = {"model": str(model), "block_size": BLOCK_SIZE}
    for number in range(2 * arguments.rounds):
        has_tier = bool(number % 2)
        worker = {**shared, "kv_blocks": pool, "kv_host_bytes": 2 * working * block_bytes if has_tier else 0}
        with Cluster(prefill=0, decode=1, router={"model": str(model), **PATIENT}, worker=worker) as cluster:
            found[has_tier] += asyncio.run(replay(cluster.address, arguments))
        print(f"round {number // 2 + 1}, {'with' if has_tier else 'without'} a tier", flush=True)
    rows = [["", "reusable tokens served", "TTFT p50, p90 ms", "seconds of a request per output token, p90"]]
    for has_tier, turns in found.items():
        share = 100 * sum(one.cached for one in turns) / sum(one.reusable for one in turns)
        per_token = statistics.quantiles([one.seconds / one.output_tokens for one in turns], n=10)[-1]
        ttft = statistics.quantiles([one.ttft_s * 1e3 for one in turns], n=10)
        rows.append(
            [
                "with a tier" if has_tier else "without",
                f"{share:.1f} %",
                f"{ttft[4]:.0f}, {ttft[-1]:.0f}",
                f"{per_token:.4f}",
            ]
        )
    print(f"working set {working} blocks, pool {pool} blocks")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--growth", type=int, default=128, help="tokens of each turn beside the conversation so far")
    parser.add_argument("--answer", type=int, default=16, help="tokens")
    parser.add_argument("--times", type=int, default=4, help="working set, in pools")
    parser.add_argument("--at-once", type=int, default=1, help="requests that run together")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.shape
        write_model(model, arguments.shape, torch.float32, 0)
        blocks = ROWS * (CONTEXT // BLOCK_SIZE + 1) + 1
        engine = load_engine(
            WorkerConfig(model=str(model), worker_id="d0", block_size=BLOCK_SIZE, kv_blocks=blocks), Role.DECODE
        )
        block_bytes = engine.spec.block_bytes
        print(f"{arguments.shape}: blocks of {block_bytes / 2**20:.2f} MiB\n", flush=True)
        print(table(copies(engine, arguments.rounds)), "\n", flush=True)
        print(table(steps(engine, arguments.rounds)), "\n", flush=True)
        engine.close()
        print(table(sessions(model, block_bytes, arguments)))


if __name__ == "__main__":
    main()

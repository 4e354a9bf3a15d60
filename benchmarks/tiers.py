"""What the host tier of the KV cache costs and saves: `python -m benchmarks.tiers [--shape 125m]`. With `--pull`: what
pulls between workers do (benchmarks/pulls.py).

- Copies of blocks out of the pool and back, beside one memcpy of as many bytes; rounds alternate.
- A decode step of the engine with one block saved and one loaded before it, beside a step alone; steps alternate.
- Sessions that grow, as those of agents do: each turn sends the conversation so far. Their KV needs `--times` as much
  memory as the pool has, and the turns of all sessions alternate, so without a tier a pool that evicts the least
  recently used block first has none of them when they come back. Rounds with and without a tier alternate, with a new
  cluster of one decode worker each, which also computes the prompts. With `--agents SCALE`, only these, and the
  sessions are the published ones of the simulator (`coding_agents`), with `SCALE` times their numbers of tokens, in the
  order of their arrivals, without the pauses.

With `--disk FOLDER` only the disk tier, in that folder: fetches of blocks that are not in memory, beside
sequential reads of a file of as many bytes, buffered and direct; and a decode step of the engine while blocks are
fetched, beside a step alone. Rounds alternate. Bars: 0.8 of the sequential read, and 1.05 of a step.

With `--store URL` only a shared store: fetches, which verify what they read, beside a loop of the same client.

Of a turn, the blocks of its session's earlier turns are *reusable*; `cached_prompt_tokens` of the answer says how many
were served from the cache. Bars: copies at least 0.8 of a memcpy, a step at most 1.05 of one alone, at least 97 % of
the reusable tokens served, and the 90th percentile of the time of a request per output token 2.5 times better.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import mmap
import os
import queue
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.harness import spread, table
from benchmarks.pulls import pulls
from examples.make_random_model import SHAPES, write_model
from pdserve import AsyncClient
from pdserve.config import WorkerConfig
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.fetch import Fetch
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine
from pdserve.engine.memory.disk import DiskTier, disk_tier
from pdserve.engine.memory.host import HostCopies
from pdserve.engine.memory.store import StoreTier, store_tier
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.testing import Cluster
from simulator.traces.workloads import coding_agents

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


def decode_rows(engine: Engine) -> list[Row]:
    each = CONTEXT // engine.spec.block_size + 1
    return [
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


def steps(engine: Engine, rounds: int) -> list[list[str]]:
    pool = engine.pool
    store = HostCopies(pool, 8 * pool.block_bytes)
    rows = decode_rows(engine)
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


# --- the disk tier ------------------------------------------------------------------------------------------------

READ_BYTES: Final = 16 * 2**20  # by one call


def fill_disk(engine: Engine, folder: Path) -> tuple[DiskTier, list[bytes]]:
    """A disk tier with a block for each of the pool's, in files that the system's memory does not hold."""
    pool = engine.pool
    config = WorkerConfig(
        model="tiers", worker_id="tiers", kv_disk_path=str(folder), kv_disk_bytes=4 * pool.num_blocks * pool.block_bytes
    )
    tier = disk_tier(engine, replace(config, kv_disk_write_bytes_s=2**40), None)
    assert tier is not None
    pool.buffer[:] = os.urandom(len(pool.buffer))
    hashes = [blake2b(block.to_bytes(4, "little"), digest_size=16).digest() for block in range(pool.num_blocks)]
    for block in reversed(range(pool.num_blocks)):  # as a pool evicts them
        while not tier.room:
            time.sleep(0.001)
        tier.take_block(hashes[block], block)
    assert tier.flush(600.0), "the blocks were not written"
    tier.files.sync()
    return tier, hashes


def forget_pages(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def fetch_all(tier: DiskTier | StoreTier, hashes: list[bytes], number: int) -> int:
    """Reads each block into the place where it was. Returns the number of verified ones."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    attempt = Attempt(key=AttemptKey(1, "r", 1), prompt_ids=(1,), sampling=Sampling())
    fetch = Fetch(
        number=number,
        source=tier.name,
        attempt=attempt,
        first=0,
        hashes=tuple(hashes),
        blocks=tuple(range(len(hashes))),
        started_s=0.0,
        predicted_s=tier.read_s(len(hashes)),
    )
    tier.begin(fetch, done.put)
    return done.get()


def read_file(path: Path, num_bytes: int, *, is_direct: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    into = mmap.mmap(-1, READ_BYTES)  # aligned to a page, as direct reads need it
    for offset in range(0, num_bytes, READ_BYTES):
        os.preadv(descriptor, [into], offset)
    os.close(descriptor)


def disk_reads(engine: Engine, folder: Path, rounds: int) -> list[list[str]]:
    """GB/s of files that are not in memory."""
    tier, hashes = fill_disk(engine, folder)
    num_bytes = len(hashes) * engine.pool.block_bytes // READ_BYTES * READ_BYTES
    plain = folder / "plain.kv"
    plain.write_bytes(os.urandom(num_bytes))
    before = bytes(engine.pool.buffer)
    predicted: list[float] = []
    number = 0

    def fetch() -> None:
        nonlocal number
        number += 1
        predicted.append(tier.read_s(len(hashes)))
        assert fetch_all(tier, hashes, number) == len(hashes), "a block was not verified"

    kinds: dict[str, Callable[[], None]] = {
        "sequential read": lambda: read_file(plain, num_bytes, is_direct=False),
        "sequential read, direct": lambda: read_file(plain, num_bytes, is_direct=True),
        "fetch of the tier": fetch,
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, run in kinds.items():
            forget_pages(folder)
            began_s = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began_s)
    assert bytes(engine.pool.buffer) == before, "the tier has changed a block"
    fetched = len(hashes) * engine.pool.block_bytes
    sizes = {name: fetched if name == "fetch of the tier" else num_bytes for name in kinds}
    speeds = {name: [sizes[name] / one / 1e9 for one in found[1:]] for name, found in seconds.items()}
    best = [max(pair) for pair in zip(speeds["sequential read"], speeds["sequential read, direct"], strict=True)]
    rows = [["", "GB/s", "of the better sequential read"]]
    for name, found in speeds.items():
        rows.append(
            [name, spread(found, "{:.2f}"), spread([a / b for a, b in zip(found, best, strict=True)], "{:.2f}")]
        )
    ratios = [took / said for took, said in zip(seconds["fetch of the tier"][1:], predicted[1:], strict=True)]
    rows.append(["measured / predicted time of a fetch", spread(ratios, "{:.2f}"), ""])
    tier.close()
    return rows


def steps_beside_reads(engine: Engine, folder: Path, rounds: int) -> list[list[str]]:
    """Blocks of a decode step are not fetched meanwhile."""
    tier, hashes = fill_disk(engine, folder)
    rows = decode_rows(engine)
    used = ROWS * (CONTEXT // engine.spec.block_size + 1)
    pause, stop, number = threading.Event(), threading.Event(), itertools.count(1)
    num_fetched = 0

    def read() -> None:
        nonlocal num_fetched
        while not stop.is_set():
            if pause.wait(0.01):
                done: queue.SimpleQueue[int] = queue.SimpleQueue()
                blocks = tuple(range(used, engine.pool.num_blocks))
                fetch = Fetch(
                    number=next(number),
                    source=tier.name,
                    attempt=Attempt(key=AttemptKey(1, "r", 1), prompt_ids=(1,), sampling=Sampling()),
                    first=used,
                    hashes=tuple(hashes[used:]),
                    blocks=blocks,
                    started_s=0.0,
                    predicted_s=0.0,
                )
                tier.begin(fetch, done.put)
                num_fetched += done.get()
                forget_pages(folder)

    reader = threading.Thread(target=read)
    reader.start()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for is_beside in (False, True):
            (pause.set if is_beside else pause.clear)()
            time.sleep(0.3)
            for _ in range(30):
                began_s = time.perf_counter()
                engine.step(rows)
                seconds[is_beside].append(time.perf_counter() - began_s)
    stop.set()
    reader.join()
    tier.close()
    alone, beside = (statistics.median(seconds[one]) for one in (False, True))
    return [
        ["step", "median ms", "of one alone"],
        ["alone", f"{alone * 1e3:.2f}", "1"],
        [f"beside fetches ({num_fetched} blocks)", f"{beside * 1e3:.2f}", f"{beside / alone:.3f}"],
    ]


def store_reads(engine: Engine, url: str, rounds: int) -> list[list[str]]:
    """GB/s of blocks in a shared store, beside a loop of the same client, which asks for as many at a time."""
    pool = engine.pool
    config = WorkerConfig(model="tiers", worker_id="tiers", kv_store=url, cluster_secret=secrets.token_hex(16))
    tier = store_tier(engine, replace(config, kv_store_write_bytes_s=2**40), None)
    assert tier is not None
    pool.buffer[:] = os.urandom(len(pool.buffer))
    before = bytes(pool.buffer)
    hashes = [blake2b(block.to_bytes(4, "little"), digest_size=16).digest() for block in range(pool.num_blocks)]
    names = [tier._seal.name(one) for one in hashes]
    began_s = time.perf_counter()
    for block, block_hash in enumerate(hashes):
        while not tier.room:
            time.sleep(0.001)
        tier.take_block(block_hash, block)
    assert tier.flush(600.0), "the blocks were not written"
    wrote_s = time.perf_counter() - began_s
    predicted: list[float] = []
    number = itertools.count(1)

    def plain() -> None:
        most = tier.store.most_got
        for at in range(0, len(names), most):
            assert None not in tier.store.get(names[at : at + most])

    def fetch() -> None:
        predicted.append(tier.read_s(len(hashes)))
        assert fetch_all(tier, hashes, next(number)) == len(hashes), "a block was not verified"

    kinds = {"plain loop of the client": plain, "fetch of the tier, verified": fetch}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, run in kinds.items():
            began_s = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began_s)
    assert bytes(pool.buffer) == before, "the tier has changed a block"
    num_bytes = len(hashes) * pool.block_bytes
    rows = [["", "GB/s", "of the plain loop"], ["written, sealed", f"{num_bytes / wrote_s / 1e9:.2f}", ""]]
    for name, found in seconds.items():
        ratios = [plain_s / one for plain_s, one in zip(seconds["plain loop of the client"], found, strict=True)]
        rows.append(
            [name, spread([num_bytes / one / 1e9 for one in found[1:]], "{:.2f}"), spread(ratios[1:], "{:.2f}")]
        )
    ratios = [took / said for took, said in zip(seconds["fetch of the tier, verified"], predicted, strict=True)]
    rows.append(["measured / predicted time of a fetch", spread(ratios[1:], "{:.2f}"), ""])
    tier.store.delete(names)
    tier.close()
    return rows


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


def agent_turns(arguments: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Prompt and length of the answer of each turn of sessions that begin together. Prompts have tokens of the trace
    for the answers before."""
    trace = coding_agents(
        rate_rps=36.0 * arguments.sessions, duration_s=1.0, seed=arguments.seed, scale=arguments.agents
    )
    return [
        (
            [
                random.Random(f"{arguments.seed} {one} {at}").randrange(3, 4000)
                for one in request.block_ids
                for at in range(trace.block_tokens)
            ][: request.prompt_tokens],
            request.output_tokens,
        )
        for request in itertools.islice(trace, arguments.requests)
    ]


async def replay_agents(target: str, turns: list[tuple[list[int], int]]) -> list[Turn]:
    """One after another; those with reusable blocks are measured."""
    seen: set[tuple[int, ...]] = set()
    found: list[Turn] = []
    async with AsyncClient(target) as client:
        for text, answer in turns:
            prefixes = [tuple(text[:end]) for end in range(BLOCK_SIZE, len(text), BLOCK_SIZE)]
            reusable = BLOCK_SIZE * sum(one in seen for one in prefixes)
            seen.update(prefixes)
            began_s, ttft_s, num_tokens = time.perf_counter(), 0.0, 0
            stream = client.stream(text, max_tokens=answer, temperature=0.0, ignore_eos=True)
            async for piece in stream:
                ttft_s = ttft_s or time.perf_counter() - began_s
                num_tokens += len(piece.token_ids)
            seconds = time.perf_counter() - began_s
            cached = stream.completion.usage.cached_prompt_tokens
            if reusable:
                found.append(Turn(0, reusable, min(cached, reusable), num_tokens, seconds, ttft_s))
    return found


def sessions(model: Path, block_bytes: int, arguments: argparse.Namespace) -> list[list[str]]:
    longest = arguments.turns * (arguments.growth + arguments.answer)
    working = arguments.sessions * -(-longest // BLOCK_SIZE)
    agents = [] if arguments.agents is None else agent_turns(arguments)
    if agents:
        longest = max(len(text) + answer for text, answer in agents)
        ends = range(BLOCK_SIZE, longest + 1, BLOCK_SIZE)
        working = len({tuple(text[:end]) for text, _ in agents for end in ends if end <= len(text)})
    pool = max(working // arguments.times, arguments.at_once * -(-longest // BLOCK_SIZE) + 1)
    found: dict[bool, list[Turn]] = {False: [], True: []}
    shared = {"model": str(model), "block_size": BLOCK_SIZE}
    for number in range(2 * arguments.rounds):
        has_tier = bool(number % 2)
        worker = {**shared, "kv_blocks": pool, "kv_host_bytes": 2 * working * block_bytes if has_tier else 0}
        with Cluster(prefill=0, decode=1, router={"model": str(model), **PATIENT}, worker=worker) as cluster:
            replayed = replay_agents(cluster.address, agents) if agents else replay(cluster.address, arguments)
            found[has_tier] += asyncio.run(replayed)
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
    parser.add_argument("--agents", type=float, metavar="SCALE", help="published sessions, such as 0.01")
    parser.add_argument("--requests", type=int, default=150, help="of published sessions, at most")
    parser.add_argument("--times", type=int, default=4, help="working set, in pools")
    parser.add_argument("--at-once", type=int, default=1, help="requests that run together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="only the disk tier, in a new folder of this one")
    parser.add_argument("--store", metavar="URL", help="only a shared store; redis: a real one, started for this")
    parser.add_argument("--blocks", type=int, default=768, help="of a fetch from disk or store")
    parser.add_argument(
        "--pull", action="store_true", help="measure pulls between workers instead (benchmarks/pulls.py)"
    )
    parser.add_argument("--prompt", type=int, default=1536, help="tokens of a prompt that is pulled")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.shape
        write_model(model, arguments.shape, torch.float32, 0)
        is_slow = arguments.disk is not None or arguments.store
        blocks = ROWS * (CONTEXT // BLOCK_SIZE + 1) + (arguments.blocks if is_slow else 1)
        engine = load_engine(
            WorkerConfig(model=str(model), worker_id="d0", block_size=BLOCK_SIZE, kv_blocks=blocks), Role.DECODE
        )
        block_bytes = engine.spec.block_bytes
        print(f"{arguments.shape}: blocks of {block_bytes / 2**20:.2f} MiB\n", flush=True)
        if arguments.pull:
            engine.close()
            del engine
            print(table(pulls(model, arguments.prompt, arguments.rounds, Path(folder), block_bytes)))
            return
        if arguments.store:
            with contextlib.ExitStack() as stack:
                url = stack.enter_context(EmbeddedRedis.start()).url if arguments.store == "redis" else arguments.store
                print(table(store_reads(engine, url, arguments.rounds)), flush=True)
            engine.close()
            return
        if arguments.disk is not None:
            with tempfile.TemporaryDirectory(dir=arguments.disk) as where:
                print(table(disk_reads(engine, Path(where), arguments.rounds)), "\n", flush=True)
            with tempfile.TemporaryDirectory(dir=arguments.disk) as where:
                print(table(steps_beside_reads(engine, Path(where), arguments.rounds)), flush=True)
            engine.close()
            return
        if arguments.agents is None:
            print(table(copies(engine, arguments.rounds)), "\n", flush=True)
            print(table(steps(engine, arguments.rounds)), "\n", flush=True)
        engine.close()
        print(table(sessions(model, block_bytes, arguments)))


if __name__ == "__main__":
    main()

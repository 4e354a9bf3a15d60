"""Prefix index in Redis: seconds per lookup, compared with one pipelined HKEYS per block in the same run.

    python -m benchmarks.prefix [--repeats 300] [--tiers]

HKEYS per block is the schema of llm-d (one hash per block, one field per pod). Both answer the same question about the
same chains with the same server and client library; rounds alternate. "Two depths": half of the workers hold the whole
chain and the others its first half, so that the second phase has work. With `--tiers`, every second block of half of
the workers is not in the pool but in host memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pdserve.core.kv.tier_reads import Tier
from pdserve.core.types import Role
from pdserve.prefix.connection import connect
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.publisher import WorkerPublisher
from pdserve.prefix.redis_index import RedisIndex
from pdserve.prefix.registry import Registration

LENGTHS = (16, 64, 256, 1024)
BARS_MS = {16: 0.2, 64: 0.4, 256: 0.6, 1024: 1.6}
CHAINS = 24
WORKERS = 8
ROUND = 20  # lookups of one kind in a row: long enough that the other kind's garbage is not theirs to collect
SEED = bytes(32)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--tiers", action="store_true", help="blocks below the pool")
    arguments = parser.parse_args()
    with EmbeddedRedis.start() as server:
        chains = [[os.urandom(16) for _ in range(max(LENGTHS))] for _ in range(CHAINS)]
        index = RedisIndex(server.url, "bench", hash_seed=SEED, timeout_s=10.0)
        await index.start()
        workers = [await _publish(server.url, number, chains, arguments.tiers) for number in range(WORKERS)]
        peer = connect(server.url, timeout_s=30.0, max_connections=2)
        await _fill_peer(peer, chains)
        while len(await index.lookup(chains[0])) < WORKERS:
            await asyncio.sleep(0.05)
        if arguments.tiers:
            found = await index.lookup(chains[0])
            assert len(found.tiers) == WORKERS // 2, "the lookups see other tiers"
        print(f"{CHAINS} chains x {max(LENGTHS)} blocks x {WORKERS} workers, {server.url.split(':')[0]}, ms\n")
        print("| blocks | p50 | p99 | HKEYS p50 | HKEYS p99 | times faster | bar p50 | two depths p50 |")
        print("|---|---|---|---|---|---|---|---|")
        for number, length in enumerate(LENGTHS):
            same = [chain[:length] for chain in chains[::2]]
            halved = [chain[:length] for chain in chains[1 + 2 * number :: 2 * len(LENGTHS)]]
            ours, theirs = await _alternate(arguments.repeats, same, index.lookup, lambda c: _hkeys(peer, c))
            two, _ = await _alternate(arguments.repeats // 2, halved, index.lookup, index.lookup)
            print(
                f"| {length} | {_p(ours, 50):.3f} | {_p(ours, 99):.3f} | {_p(theirs, 50):.3f} | {_p(theirs, 99):.3f} "
                f"| {_p(theirs, 50) / _p(ours, 50):.1f} | {BARS_MS[length]} | {_p(two, 50):.3f} |"
            )
        for worker in workers:
            await worker.stop()
        await index.close()
        await peer.aclose()


async def _publish(url: str, number: int, chains: Sequence[Sequence[bytes]], has_tiers: bool) -> WorkerPublisher:
    worker_id = f"w{number}"
    facts = Registration(worker_id=worker_id, incarnation="1", role=Role.DECODE, endpoint="127.0.0.1:1")
    worker = WorkerPublisher(url, "bench", facts, hash_seed=SEED, lease_s=60.0)
    for at, chain in enumerate(chains):
        is_whole = at % 2 == 0 or number % 2 == 0
        stored = chain if is_whole else chain[: LENGTHS[at // 2 % len(LENGTHS)] // 2]
        is_lower = has_tiers and number // 2 % 2 == 1
        worker.offer(stored, tiers=bytes([Tier.POOL, Tier.HOST] * (len(stored) // 2)) if is_lower else b"")
    await worker.start()
    while not worker.is_connected or worker.num_waiting:
        await asyncio.sleep(0.01)
    return worker


async def _fill_peer(peer: Any, chains: Sequence[Sequence[bytes]]) -> None:
    pods = {f'{{"podIdentifier":"10.0.0.{number}","deviceTier":"gpu"}}': "" for number in range(WORKERS)}
    for chain in chains:
        async with peer.pipeline(transaction=False) as pipeline:
            for one in chain:
                pipeline.hset(b"peer:" + one, mapping=pods)
            await pipeline.execute()


async def _hkeys(peer: Any, chain: Sequence[bytes]) -> Mapping[str, int]:
    async with peer.pipeline(transaction=False) as pipeline:
        for one in chain:
            pipeline.hkeys(b"peer:" + one)
        rows = await pipeline.execute()
    depths: dict[str, int] = {}
    alive = set(rows[0])
    for at, row in enumerate(rows):
        for pod in alive.difference(row):
            depths[pod] = at
        alive.intersection_update(row)
    return {**depths, **dict.fromkeys(alive, len(rows))}


Lookup = Callable[[Sequence[bytes]], Awaitable[Mapping[str, int]]]


async def _alternate(
    repeats: int, chains: Sequence[Sequence[bytes]], one: Lookup, other: Lookup
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for first in range(0, repeats, ROUND):
        for lookup, into in zip((one, other), times, strict=True):
            for turn in range(first, first + ROUND):
                began_s = time.perf_counter()
                found = await lookup(chains[turn % len(chains)])
                into.append(time.perf_counter() - began_s)
                assert len(found) == WORKERS, found
    return times


def _p(seconds: Sequence[float], percent: int) -> float:
    return 1e3 * statistics.quantiles(seconds, n=100)[percent - 1]


if __name__ == "__main__":
    asyncio.run(main())

"""Fetches of blocks from a disk tier and from a shared store, beside plain reads of as many bytes."""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from benchmarks.harness import spread
from benchmarks.tiers.host import CONTEXT, ROWS, decode_rows
from pdserve.config import WorkerConfig
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.fetch import Fetch
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine
from pdserve.engine.memory.disk import DiskTier, disk_tier
from pdserve.engine.memory.store import StoreTier, store_tier

# --- the disk tier -----------------------------------------------------------------------------------------------

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


def fetch_all(tier: DiskTier | StoreTier, hashes: list[bytes], number: int, first: int = 0) -> int:
    """Reads each block from number `first` on into the place where it was. Returns the number of verified ones."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    attempt = Attempt(key=AttemptKey(1, "r", 1), prompt_ids=(1,), sampling=Sampling())
    fetch = Fetch(
        number=number,
        source=tier.name,
        attempt=attempt,
        first=first,
        hashes=tuple(hashes[first:]),
        blocks=tuple(range(first, len(hashes))),
        started_s=0.0,
        predicted_s=tier.read_s(len(hashes) - first),
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
                num_fetched += fetch_all(tier, hashes, next(number), used)
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


# --- a shared store ---------------------------------------------------------------------------------------------


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

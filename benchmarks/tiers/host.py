"""Copies of blocks between pool and host tier, beside one memcpy of as many bytes, and beside a decode step."""

from __future__ import annotations

import statistics
import time
from typing import Final

import numpy as np

from benchmarks.harness import spread
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.memory.host import HostCopies

ROWS: Final = 8  # of a decode step
CONTEXT: Final = 256


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

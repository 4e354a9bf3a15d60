"""Faults of the files of the disk tier: calls that fail at random, and processes that are killed while they write."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, CONTENTS, FEW, NUM_FILE_BYTES, content_of, hash_of
from pdserve.engine.memory.block_files import BlockFiles, FileCalls


class Faults(FileCalls):
    """The system's calls, of which a share fails. After `kill`, nothing reaches the files."""

    def __init__(self, rng: random.Random, share: float, counts: Counter[str]) -> None:
        self._rng, self._share, self._counts = rng, share, counts
        self._is_dead = False
        self._dies_in = -1  # bytes until the process "dies" in a write

    def kill(self) -> None:
        """Dies in the middle of a later write, or before it."""
        self._dies_in = self._rng.randrange(3 * BLOCK_BYTES)

    def die(self) -> None:
        self._is_dead = True

    def _draw(self, kinds: Sequence[str]) -> str:
        if self._rng.random() >= self._share:
            return ""
        kind = self._rng.choice(kinds)
        self._counts[kind] += 1
        return kind

    def read(self, descriptor: int, parts: Sequence[Any], offset: int) -> int:
        match self._draw(["slow read", "EIO in a read", "short read", "flipped bit in a read", "nothing is read"]):
            case "slow read":
                time.sleep(self._rng.choice([0.0005, 0.005]))
            case "EIO in a read":
                raise OSError(errno.EIO, "injected")
            case "short read":
                return super().read(
                    descriptor, [memoryview(parts[0])[: self._rng.randrange(1, len(parts[0]) + 1)]], offset
                )
            case "nothing is read":
                return 0
            case "flipped bit in a read":
                count = super().read(descriptor, parts, offset)
                part = memoryview(self._rng.choice(parts)).cast("B")
                part[self._rng.randrange(len(part))] ^= 1 << self._rng.randrange(8)
                return count
        return super().read(descriptor, parts, offset)

    def write(self, descriptor: int, parts: Sequence[Any], offset: int) -> int:
        data = b"".join(bytes(part) for part in parts)
        if self._dies_in >= 0:
            self._is_dead, cut = True, min(self._dies_in, len(data))
            self._dies_in = -1
            self._counts["killed in a write"] += 1
            if cut:
                super().write(descriptor, [data[:cut]], offset)
            return len(data)
        if self._is_dead:
            return len(data)
        match self._draw(
            ["slow write", "EIO in a write", "disk full", "torn write", "flipped bit", "lost write", "short"]
        ):
            case "slow write":
                time.sleep(self._rng.choice([0.0005, 0.005]))
            case "EIO in a write":
                raise OSError(errno.EIO, "injected")
            case "disk full":
                super().write(descriptor, [data[: self._rng.randrange(1, len(data) + 1)]], offset)
                raise OSError(errno.ENOSPC, "injected")
            case "torn write":  # the system said that it was written
                super().write(descriptor, [data[: self._rng.randrange(1, len(data) + 1)]], offset)
                return len(data)
            case "lost write":
                return len(data)
            case "short":
                return super().write(descriptor, [data[: self._rng.randrange(1, len(data) + 1)]], offset)
            case "flipped bit":
                flipped = bytearray(data)
                flipped[self._rng.randrange(len(flipped))] ^= 1 << self._rng.randrange(8)
                return super().write(descriptor, [flipped], offset)
        return super().write(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        if self._draw(["EIO in a sync"]):
            raise OSError(errno.EIO, "injected")

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        if self._draw(["disk full"]):
            raise OSError(errno.ENOSPC, "injected")
        if not self._is_dead:
            os.ftruncate(descriptor, num_bytes)


# --- processes that are killed ----------------------------------------------------------------------------------


def open_files(folder: Path) -> BlockFiles:
    return BlockFiles(
        folder, "w", block_bytes=BLOCK_BYTES, num_bytes=NUM_FILE_BYTES, most_slots=10**6, contents=CONTENTS
    )


def write_until_killed(folder: Path, seed: int, limit: int) -> None:
    """Ends only if it is killed."""
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    files, rng = open_files(folder), random.Random(seed)
    print("ready", flush=True)
    while True:
        count = rng.randrange(1, min(20, files.room) + 1)
        hashes = {hash_of(rng.randrange(FEW)) for _ in range(count)}
        try:
            files.write([(one, memoryview(content_of(one))) for one in hashes])
        except OSError:
            time.sleep(0.001)


def kill_writers(folder: Path, seed: int, num_kills: int) -> tuple[int, list[str]]:
    """The number of blocks that were read from the files of killed processes, and what was wrong."""
    rng, num_read, wrong = random.Random(seed), 0, list[str]()
    for number in range(num_kills):
        limit = rng.choice([0, 0, 20_000])
        command = [sys.executable, "-m", "benchmarks.fault_storm.files", str(folder), str(seed + number), str(limit)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(rng.random() * 0.05)
            writer.kill()
        files = open_files(folder)
        for name in map(hash_of, range(FEW)):
            into = memoryview(bytearray(BLOCK_BYTES))
            for group in files.groups([name], 1):
                num_read += 1
                if files.read(group, [[into]]) == [True] and bytes(into) != content_of(name):
                    wrong.append(f"a wrong block after kill {number + 1}")
        files.close()
    return num_read, wrong


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""A storm of faults on the tiers below the pool: no wrong block may be used, and no block or file may be lost.

Prompts take blocks from a small pool over the real allocator, host tier, fetch stage, disk tier and files, in this
process. The bytes of each block follow from its hash, and every block that a prompt gets from a cache is compared. The
calls that read and write files fail at random (files.py): torn, with flipped bits, late, short, with EIO or ENOSPC. The
worker is killed in the middle of writes and starts again from its files, its clock jumps, and blocks turn out to be
wrong. Other processes write to files until they are killed for real, some with a limit on the size of files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any, Final

from benchmarks.fault_storm.files import Faults, kill_writers
from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, CONTENTS, NUM_BLOCKS, NUM_FILE_BYTES, StormPool, content_of
from benchmarks.harness import table
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import FetchAborted, Fetches, FetchStarted
from pdserve.core.kv.host_tier import HostTier, LoadRule, LowerTiers
from pdserve.core.types import Sampling
from pdserve.engine.memory.block_files import BlockFiles
from pdserve.engine.memory.disk import DiskTier
from pdserve.engine.memory.host import HostCopies
from pdserve.engine.memory.slow_tier import SlowTier
from pdserve.worker.tiers import FetchSource

HOST_BLOCKS: Final = 64
TEXTS: Final = 96
LONGEST: Final = 24  # blocks of a text
END_S: Final = 30.0
HOST: Final = "host"  # the tier, as a source of fetches
SPOILED: Final = b"\xee" * BLOCK_BYTES


@dataclass
class TierResult:
    fetches: int = 0
    filled: int = 0  # verified blocks
    missed: int = 0
    written: int = 0
    loaded: int = 0  # from the host tier
    saved: int = 0
    restarts: int = 0
    prompts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def operations(self) -> int:
        """Reads and writes of blocks, in all tiers."""
        return self.filled + self.missed + self.written + self.loaded + self.saved

    def __add__(self, other: TierResult) -> TierResult:
        return TierResult(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass
class _Prompt:
    attempt: Attempt
    hashes: list[bytes]


class TierStorm:
    def __init__(self, folder: Path, seed: int, *, share: float = 0.15) -> None:
        self.rng = random.Random(seed)
        self.result = TierResult()
        self._folder, self._share = folder, share
        self._all_files = folder
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._texts = self._make_texts()
        self._clock_s = 0.0
        self._number = 0
        self._open()

    def _make_texts(self) -> list[list[bytes]]:
        """Chains of hashes, many of which begin alike."""
        texts: list[list[bytes]] = []
        for number in range(TEXTS):
            text = list(self.rng.choice(texts)[: self.rng.randrange(LONGEST)]) if texts and number % 2 else []
            while len(text) < LONGEST:
                parent = text[-1] if text else b""
                text.append(blake2b(parent + number.to_bytes(4, "little"), digest_size=16).digest())
            texts.append(text)
        return texts

    def _num_descriptors(self) -> int:
        """Of the storm's files: other threads of the process may open others."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                count += os.readlink(f"/proc/self/fd/{name}").startswith(str(self._all_files))
        return count

    def _open(self) -> None:
        self._open_pool()
        self.tiers = self._open_tiers()
        lower = LowerTiers(*self.tiers.values())
        tier = self._host_tier(lower)
        blocks = BlockAllocator(NUM_BLOCKS, tier=tier, lower=lower, on_reuse=self._reused)
        if isinstance(disk := self.tiers.get("disk"), DiskTier):
            blocks.lower_changed(disk.files.hashes(), ())
        self.kv = KvCache(blocks, 1)
        self.fetches = Fetches(self.kv, self._sources(), lambda uncached, cached: 1e6)
        self._waiting: dict[AttemptKey, _Prompt] = {}

    def now(self) -> float:
        return time.monotonic() + self._clock_s

    # -- overridden for a pool on a device (device.py) ----------------------------------------------------------

    def _open_pool(self) -> None:
        self.pool: Any = StormPool()
        self.copies: Any = HostCopies(self.pool, HOST_BLOCKS * BLOCK_BYTES)

    def _staged(self, num_readers: int) -> dict[str, Any]:
        """How a lower tier reaches the pool and the host tier."""
        return {"copies": self.copies}

    def _host_tier(self, lower: LowerTiers) -> HostTier | None:
        return HostTier(self.copies, LoadRule(0.0, lambda uncached, cached: 0.0), 32, lower)

    def _sources(self) -> list[FetchSource]:
        """Of fetches, the fastest first."""
        return [*self.tiers.values()]

    def _spoil(self, blocks: Sequence[int]) -> None:
        """A step that was launched before a fetch writes to its blocks."""
        for block in blocks:
            self.pool.write(block, SPOILED)

    def _close_pool(self) -> None:
        """After the tiers."""

    # -------------------------------------------------------------------------------------------------------------

    def _reused(self, hashes: Sequence[bytes], blocks: Sequence[int], holds: Callable[[int, bytes], bool]) -> None:
        """A second text uses the blocks. Overridden by a storm with a store."""

    def _open_tiers(self) -> dict[str, SlowTier[Any, Any]]:
        self.files_calls = Faults(random.Random(self.rng.random()), self._share, self.result.faults)
        files = BlockFiles(
            self._folder,
            "w",
            block_bytes=BLOCK_BYTES,
            num_bytes=NUM_FILE_BYTES,
            most_slots=10**6,
            contents=CONTENTS,
            calls=self.files_calls,
        )
        disk = DiskTier(
            files,
            self.pool,
            write_bytes_s=2.0**34,
            now=self.now,
            first_pause_s=0.001,
            **self._staged(DiskTier.num_readers),
        )
        disk.changed = lambda added, removed: self._calls.put(lambda: self.kv.blocks.lower_changed(added, removed))
        return {disk.name: disk}

    # -- the engine's thread --------------------------------------------------------------------------------------

    def _pump(self, timeout_s: float = 0.0) -> None:
        try:
            while True:
                self._calls.get(timeout=timeout_s or None, block=timeout_s > 0.0)()
                timeout_s = 0.0
        except queue.Empty:
            return

    def _act(self, effects: Any) -> None:
        for effect in effects:
            match effect:
                case FetchStarted(fetch):
                    self.result.fetches += 1
                    self._spoil(fetch.blocks)
                    try:
                        self._source(fetch.source).begin(fetch, partial(self._post_end, fetch.number))
                    except Exception:  # as in a worker: a broken source is a miss
                        self._post_end(fetch.number, 0)
                case FetchAborted(number, source):
                    self._source(source).abort(number)

    def _source(self, name: str) -> FetchSource:
        return self.tiers[name]

    def _post_end(self, number: int, count: int) -> None:
        self._calls.put(lambda: self._end(number, count))

    def _end(self, number: int, count: int) -> None:
        fetch = self.fetches.ended(number, count)
        self.result.filled += count if fetch.source != HOST else 0  # which the tier counts
        self.result.missed += len(fetch.blocks) - count

    def prompt(self) -> None:
        self._number += 1
        self.result.prompts += 1
        text = self.rng.choice(self._texts)[: self.rng.randrange(1, LONGEST + 1)]
        attempt = Attempt(key=AttemptKey(1, str(self._number), 1), prompt_ids=(1,), sampling=Sampling())
        self._waiting[attempt.key] = _Prompt(attempt, text)

    def advance(self) -> None:
        """Starts what can start, and lets others wait."""
        self._pump()
        now_s = time.monotonic()
        for key, prompt in list(self._waiting.items()):
            self._act(self.fetches.consider(prompt.attempt, prompt.hashes, now_s))
            if self.fetches.is_waiting(key):
                if self.rng.random() < 0.01:  # its client left
                    del self._waiting[key]
                    self._act(self.fetches.leave(key))
                continue
            if self._compute(prompt.hashes):
                del self._waiting[key]
                self._act(self.fetches.leave(key))

    def _compute(self, hashes: list[bytes]) -> bool:
        allocation = self.kv.allocate(len(hashes) + 1, hashes)
        if allocation is None:
            return False
        blocks, cached = allocation.blocks, allocation.cached_tokens
        for block, block_hash in zip(blocks[:cached], hashes, strict=False):
            if self.pool.read(block) != content_of(block_hash):
                self.result.wrong.append(f"block {block} after {self.result.prompts} prompts")
        for block, block_hash in zip(blocks[cached:-1], hashes[cached:], strict=True):
            self.pool.write(block, content_of(block_hash))
        self.kv.commit(blocks, hashes, cached, len(hashes))
        if self.rng.random() < 0.01:
            self.kv.invalidate(self.rng.choice(blocks[:-1]))
        self.kv.release(blocks)
        return True

    def quiet(self) -> None:
        """Waits until no fetch runs."""
        until_s = time.monotonic() + END_S
        for key in list(self._waiting):
            del self._waiting[key]
            self._act(self.fetches.leave(key))
        while self.fetches:
            assert time.monotonic() < until_s, "a fetch never ends"
            self._pump(0.05)
        self._pump()

    def check(self) -> None:
        self.fetches.check()
        self.kv.blocks.check(holders=list(self.fetches.held()))

    def close(self, *, is_killed: bool = False) -> None:
        """Ends this worker; killed, what it writes meanwhile is torn or lost."""
        if is_killed:
            self.files_calls.kill() if self.rng.random() < 0.7 else self.files_calls.die()
            if self.rng.random() < 0.5:
                self._pump(0.002)
        self.quiet()
        self.files_calls.die() if is_killed else None
        for lower in self.tiers.values():
            self.result.written += lower.events["written"]
            self.result.faults[f"found damaged, {lower.name}"] += lower.events["damaged"]
            lower.close()
        self._close_pool()
        if (tier := self.kv.blocks.tier) is not None:
            self.result.loaded += tier.num_loaded
            self.result.saved += tier.num_saved
        self._pump()
        self.check()
        if self.kv.blocks.num_referenced:
            self.result.wrong.append(f"{self.kv.blocks.num_referenced} blocks are lost")
        self._check_folder()

    def _check_folder(self) -> None:
        names = set(os.listdir(self._folder / "w")) - {"lock"}
        sizes = [os.stat(self._folder / "w" / name).st_size for name in names]
        if sum(sizes) > NUM_FILE_BYTES:
            self.result.wrong.append(f"files of {sum(sizes)} bytes")

    def restart(self) -> None:
        self.close(is_killed=True)
        self.result.restarts += 1
        self._open()

    def run(self, num_operations: int, progress: Callable[[TierResult], None] = lambda result: None) -> TierResult:
        began_s, descriptors = time.monotonic(), self._num_descriptors()
        done = 0
        while done < num_operations:
            for _ in range(200):
                while len(self._waiting) < 8:
                    self.prompt()
                self.advance()
                if not self.rng.randrange(500):
                    self._clock_s += self.rng.choice([-1e6, 1e6, 3600.0, -1.0])  # the machine's clock jumps
            self.check()
            self.restart()
            done = self.result.operations
            self.result.seconds = time.monotonic() - began_s
            progress(self.result)
        self.close()
        left = self._num_descriptors() - descriptors
        if left > 0:
            self.result.wrong.append(f"{left} descriptors are lost")
        return self.result


def storm(num_operations: int, seed: int, num_kills: int, progress: Callable[[TierResult], None]) -> TierResult:
    former = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        result = TierStorm(Path(folder) / "kv", seed).run(num_operations, progress)
        count_kills(result, num_kills, *kill_writers(Path(folder) / "killed", seed, num_kills))
    result.wrong += lost_threads(former)
    return result


def count_kills(result: TierResult, num_kills: int, num_read: int, wrong: list[str]) -> None:
    """Adds what was read from the files or objects of killed writers."""
    result.filled += num_read
    result.restarts += num_kills
    result.wrong += wrong


def lost_threads(former: Collection[threading.Thread]) -> list[str]:
    """Threads that run and are none of `former`, as errors."""
    frames = sys._current_frames()
    added = [one for one in threading.enumerate() if one not in former and one.name.startswith("kv-")]
    return [f"the thread {one.name} is lost: {_calls_of(frames.get(one.ident or 0))}" for one in added]


def _calls_of(frame: FrameType | None) -> str:
    calls = [] if frame is None else traceback.extract_stack(frame)
    return ", ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(calls))


Run = Callable[[int, int, int, Callable[[TierResult], None]], TierResult]


def report(num_operations: int, seed: int, run: Run = storm, tiers: str = "disk") -> int:
    """The exit status. `tiers`: those below memory."""
    logging.disable(logging.ERROR)  # every injected fault would be a line
    result = run(num_operations, seed, max(5, num_operations // 2000), progress)
    print(file=sys.stderr)
    rows: list[list[object]] = [
        ["reads and writes of blocks", "prompts", "restarts", "wrong or lost", "seconds"],
        [result.operations, result.prompts, result.restarts, len(result.wrong), f"{result.seconds:.0f}"],
    ]
    print(table([[str(cell) for cell in row] for row in rows]))
    print(
        f"\n{tiers}: {result.written} written, {result.filled} read and verified, {result.missed} missed in "
        f"{result.fetches} fetches; host tier: {result.saved} saved, {result.loaded} loaded\n"
    )
    print(table([["fault", "times"], *([name, str(count)] for name, count in sorted(result.faults.items()))]))
    for line in result.wrong[:20]:
        print(f"MISSED: {line}", file=sys.stderr)
    return int(bool(result.wrong))


def progress(result: TierResult) -> None:
    print(
        f"\rtiers: {result.operations} reads and writes, {result.restarts} restarts, {len(result.wrong)} wrong   ",
        end="",
        file=sys.stderr,
        flush=True,
    )

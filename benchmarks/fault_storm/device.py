"""A storm of faults on the tiers of a pool on a device, over the stand-in for a device that the tests use: no wrong
block may be used, and no block, file, descriptor, thread, place in a staging or pinned memory may be lost.

Prompts, files, store and their faults are those of tiers.py and store.py. The pool is on the device, so blocks go
through its staging and pinned memory (kvtransfer/device_tier.py, device_staging.py), whose staging areas are so small
that they are often full. Calls of the device fail at random, also after they have queued their work; its copies flip
bits, or take so long that they are given up, and end later. After some restarts there is no host tier.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from benchmarks.fault_storm.files import kill_writers
from benchmarks.fault_storm.store import StoreStorm
from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, NUM_BLOCKS
from benchmarks.fault_storm.tiers import HOST_BLOCKS, SPOILED, TierResult, TierStorm, count_kills, lost_threads
from kvtransfer.device_staging import DeviceStaging
from kvtransfer.device_tier import DeviceTier, pin_slots
from pdserve.core.errors import InternalError, TransferFailed
from pdserve.core.kv.host_tier import HostTier, LoadRule, LowerTiers
from pdserve.worker.tiers import FetchSource
from tests.support.fake_device import DevicePool, FakeCopying, FakeDevice, Trouble, wait_for

ROWS: Final = 24  # of pinned memory, for blocks on their way to a lower tier
GATHERED: Final = 6  # places on the device for them
HOST_ROWS: Final = 12  # and for those on their way to the host tier
FAILED: Final = 0.04  # of the calls of the device
FLIPPED: Final = 0.02  # of its copies
OVERDUE: Final = 0.02


class FaultyDevice(FakeDevice):
    def __init__(self, pool: DevicePool, rng: random.Random, counts: Counter[str]) -> None:
        super().__init__(pool, Trouble(seed=rng.randrange(2**32), delay_s=0.0001, late=0.01, late_s=0.01))
        self._faults, self._counts = rng, counts
        self._guard = threading.Lock()  # of these two
        self._flip = threading.local()  # what the call that is being queued may damage
        self.memory: list[Any] = []  # that was given out
        self.defects: list[str] = []

    def _draws(self, kind: str, share: float) -> bool:
        with self._guard:
            is_drawn = self._faults.random() < share
            self._counts[kind] += is_drawn
            return is_drawn

    def fence(self) -> Any:
        if self._draws("the device is asked in vain", FAILED / 4):
            raise TransferFailed("injected")
        return super().fence()

    def gather(self, source: Any, sources: Sequence[int], target: Any, targets: Sequence[int], after: Any) -> Any:
        self._flip.views = [target.view(number) for number in targets]
        return super().gather(source, sources, target, targets, after)

    def move_blocks(
        self, blocks: Any, numbers: Sequence[int], host: Any, slots: Sequence[int], wake: Any, **named: Any
    ) -> Any:
        size = blocks.block_bytes
        if named["is_to_host"]:
            self._flip.views = [host.view[slot * size : (slot + 1) * size] for slot in slots]
        else:
            self._flip.views = [blocks.view(number) for number in numbers]
        return super().move_blocks(blocks, numbers, host, slots, wake, **named)

    def _queue(self, work: Callable[[], bytes], *arguments: Any, **named: Any) -> FakeCopying:
        views, self._flip.views = getattr(self._flip, "views", []), []
        if self._draws("a call fails", FAILED / 2):
            raise TransferFailed("injected")
        flipped = views if self._draws("flipped bit in a copy", FLIPPED if views else 0.0) else []

        def damaged() -> bytes:
            result = work()
            if flipped:
                with self._guard:
                    view = self._faults.choice(flipped)
                    view[self._faults.randrange(len(view))] ^= 1 << self._faults.randrange(8)
            return result

        copying = super()._queue(damaged, *arguments, **named)
        if self._draws("a copy is overdue", OVERDUE):
            copying._ends_s = 0.0  # so it has failed, until it ends
        if self._draws("a call fails that has queued its work", FAILED / 2):
            for number, one in list(self._copyings.items()):
                if one is copying and number in self._uses:  # nobody needs what it reads, so others may write there
                    stream, uses = self._uses[number]
                    self._uses[number] = stream, [use for use in uses if use.writes]
            raise TransferFailed("injected")
        return copying

    def _check(self, *arguments: Any) -> None:
        try:
            super()._check(*arguments)
        except InternalError as error:  # else it would count as a call that fails
            self.defects.append(error.message)
            raise

    def pinned(self, num_bytes: int) -> Any:
        self.memory.append(super().pinned(num_bytes))
        return self.memory[-1]

    def staging(self, num_blocks: int) -> Any:
        self.memory.append(super().staging(num_blocks))
        return self.memory[-1]


class StormDevicePool(DevicePool):
    """Steps of the engine write to it. They wait for each other, and for the copies that hold the engine."""

    device: FaultyDevice

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_BYTES)
        self.steps = ThreadPoolExecutor(1, "storm-engine")
        self._launched: list[Future[None]] = []

    def read(self, block: int) -> bytes:
        return bytes(self.on_device[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def write(self, block: int, content: bytes) -> None:
        """By a step that has ended."""
        wait(self._launched)
        self._launched.clear()
        self.device.run_step(lambda: self._put(block, content))

    def launch(self, blocks: Sequence[int], content: bytes, takes_s: float) -> None:
        """A step that writes to the blocks, later."""
        held, ended = list(self.device._held), self.device.begin_step()

        def run() -> None:
            try:
                wait_for(held)
                time.sleep(takes_s)
                for block in blocks:
                    self._put(block, content)
            finally:
                ended.set()

        self._launched.append(self.steps.submit(run))

    def _put(self, block: int, content: bytes) -> None:
        self.on_device[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content


class OnDevice(TierStorm):
    """Pool, host tier and stagings of a worker on a GPU."""

    def _open_pool(self) -> None:
        self.pool = StormDevicePool()
        self.device = self.pool.device = FaultyDevice(self.pool, random.Random(self.rng.random()), self.result.faults)
        self._stagings: list[DeviceStaging] = []
        self.copies = None
        if self.rng.random() < 0.8:
            slots = pin_slots(self.device, self.pool, HOST_BLOCKS * BLOCK_BYTES, lambda done, of: None)
            self.copies = DeviceTier(self.device, self.pool, slots, self.device.staging(HOST_ROWS), self.now)

    def _staged(self, num_readers: int) -> dict[str, Any]:
        staging = DeviceStaging(self.device, self.pool, self.copies, num_readers)
        staging.num_rows = ROWS
        del staging._free[GATHERED:]
        self._stagings.append(staging)
        return {"copies": None, "staging": staging}

    def _host_tier(self, lower: LowerTiers) -> HostTier | None:
        if self.copies is None:
            return None
        rule = LoadRule(0.0, lambda uncached, cached: 0.0)
        tier = HostTier(self.copies, rule, self.copies.most_saved, lower, queued=self.copies)
        self.copies.serve(tier, lambda block_hash: self._calls.put(lambda: self._drop_copy(block_hash)))
        return tier

    def _drop_copy(self, block_hash: bytes) -> None:
        self.result.faults["found damaged, host"] += 1
        self.kv.blocks.drop_copy(block_hash)

    def _sources(self) -> list[FetchSource]:
        return [*([] if self.copies is None else [self.copies]), *super()._sources()]

    def _source(self, name: str) -> FetchSource:
        return self.copies if self.copies is not None and name == self.copies.name else super()._source(name)

    def _spoil(self, blocks: Sequence[int]) -> None:
        self.pool.launch(blocks, SPOILED, self.rng.choice([0.0, 0.0, 0.002]))

    def _close_pool(self) -> None:
        self.pool.steps.shutdown()
        lost = [f"{one} of {GATHERED} places" for staging in self._stagings if (one := len(staging._free)) != GATHERED]
        if self.copies is not None:
            self.copies.close()
            if len(self.copies._free_rows) != HOST_ROWS or self.copies._num_pending:
                lost.append(f"{len(self.copies._free_rows)} of {HOST_ROWS} rows")
        open_memory = [one for one in self.device.memory if (one.memory is not None if _is_staging(one) else one.view)]
        if open_memory:
            lost.append(f"{len(open_memory)} areas are not closed")
        self.device.end()
        self.result.wrong += [f"in the memory of copies: {one}" for one in lost] + self.device.defects


def _is_staging(memory: Any) -> bool:
    return hasattr(memory, "num_blocks")


class DeviceStorm(OnDevice):
    """With a disk tier."""


class DeviceStoreStorm(OnDevice, StoreStorm):
    """With a shared store, and after some restarts a disk tier."""


def storm(
    num_operations: int, seed: int, num_kills: int, progress: Callable[[TierResult], None] = lambda result: None
) -> TierResult:
    """With a disk tier first, then with a store in a folder."""
    former = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        result = DeviceStorm(Path(folder) / "kv", seed).run(num_operations // 2, progress)
        count_kills(result, num_kills, *kill_writers(Path(folder) / "killed", seed, num_kills))
        result += DeviceStoreStorm(Path(folder) / "with-store", seed + 1).run(num_operations // 2, progress)
    result.wrong += lost_threads(former)
    return result

"""The disk tier: blocks that leave memory are written to files behind the engine, and read back into the pool for
prompts that wait for them (core/kv/fetch.py).

Threads work on the files of block_files.py. The writer has a bounded queue, whose blocks are copies: if it is full,
a block is dropped. It writes at a bounded rate, and pauses after errors, for instance of a full disk. The reader reads
directly into the blocks of the pool that the fetch holds. Every failure is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, final

import numpy as np

from pdserve.build import FULL_VERSION
from pdserve.config import WorkerConfig
from pdserve.core.attempt import Attempt
from pdserve.core.errors import ConfigError
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.hashing import hash_seed
from pdserve.engine.interface import Engine, EngineSpec, KvPool
from pdserve.engine.memory.block_files import PAGE, BlockFiles, FileCalls, Group, Place
from pdserve.engine.memory.host import MOST_HASHES, HostCopies, pool_blocks

log = logging.getLogger(__name__)

QUEUE_BYTES: Final = 128 * 2**20  # of copies that wait to be written
BATCH_BYTES: Final = 8 * 2**20  # written by one call
SYNC_BYTES: Final = 64 * 2**20  # written until the system is made to store them, which shows late errors
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
EVENTS: Final = ("written", "dropped", "damaged", "failed_writes", "failed_reads")
SLOW_BYTES_S: Final = 50e6  # assumed if the device could not be measured
READ_S: Final = 0.001  # for a fetch, beside its bytes
READS: Final = 2  # of one fetch at a time, so that one is under way while another is verified
GAIN: Final = 0.3  # weight of the newest fetch
MOST_FACTOR: Final = 100.0
LATE: Final = 4.0  # times its prediction, a read is late, and nothing is predicted until it ends;
LATE_S: Final = 0.1  # but not sooner than this, for which a thread may wait for a core
FORGOTTEN_S: Final = 60.0  # after which a slow device is tried again
NICE: Final = 15  # about a thirtieth of a core that the engine wants
DRAIN_S: Final = 3.0  # for what waits to be written at the end
JOIN_S: Final = 5.0  # for all threads, of the time that the worker has to end


@final
class ReadSpeed:
    """Predicts the time of a fetch. Pure."""

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s` was measured at the start."""
        self._bytes_s = bytes_s
        self._factor = 1.0  # of measured times to those that the start predicts
        self._seen_s = -math.inf

    def predict_s(self, num_bytes: int, now_s: float) -> float:
        factor = self._factor if now_s - self._seen_s < FORGOTTEN_S else min(self._factor, 1.0)
        return (READ_S + num_bytes / self._bytes_s) * factor

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        factor = seconds / (READ_S + num_bytes / self._bytes_s)
        factor = min(max(factor, 1.0 / MOST_FACTOR), MOST_FACTOR)
        self._factor += GAIN * (factor - self._factor)
        self._seen_s = now_s


@final
class DiskTier:
    """Its public methods are called on the engine's thread. `changed` is called on that of the writer or reader, with
    the hashes that were added and removed."""

    name = "disk"

    def __init__(
        self,
        files: BlockFiles,
        pool: KvPool,
        copies: HostCopies | None,
        *,
        write_bytes_s: float,
        changed: Callable[[Sequence[bytes], Sequence[bytes]], None],
        now: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.files = files
        self._copies, self._changed, self._now = copies, changed, now
        self._write_bytes_s = write_bytes_s
        self._blocks = pool_blocks(pool)
        self._speed = ReadSpeed(files.read_bytes_s() or SLOW_BYTES_S)
        self._counts = dict.fromkeys(EVENTS, 0)
        num_staged = max(1, min(QUEUE_BYTES // pool.block_bytes, files.num_slots))
        self._memory = mmap.mmap(-1, num_staged * pool.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._staged = np.frombuffer(self._memory, np.uint8).reshape(num_staged, pool.block_bytes)
        self._free = list(range(num_staged))
        self._writes: deque[tuple[bytes, int]] = deque()
        self._queued: dict[bytes, int] = {}  # the valid ones of them
        self._wrong: set[bytes] = set()  # to be removed from the files
        self._is_erasing = False
        self._paused_until_s = -math.inf
        self._first_pause_s = self._pause_s = first_pause_s
        self._reads: deque[tuple[Fetch, Callable[[int], None]]] = deque()
        self._read_now: Fetch | None = None
        self._read_began_s, self._late_at_s = 0.0, math.inf  # of that
        self._aborted: set[int] = set()
        self._num_pending = 0  # blocks of all fetches that have not ended
        self._guard = threading.Lock()
        self._may_write = threading.Condition(self._guard)
        self._may_read = threading.Condition(self._guard)
        self._is_closing = False
        self._close_by_s = math.inf
        self._groups: SimpleQueue[tuple[Fetch, Group] | None] = SimpleQueue()  # to be read; None ends a thread
        self._results: SimpleQueue[tuple[Group, list[bool]]] = SimpleQueue()  # one for each group
        # They end with the process, also if the device hangs.
        self._threads = [
            threading.Thread(target=self._write_all, name="kv-disk-writer", daemon=True),
            threading.Thread(target=self._read_all, name="kv-disk-reader", daemon=True),
            *(threading.Thread(target=self._read_groups, name="kv-disk-reads", daemon=True) for _ in range(READS)),
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def events(self) -> Mapping[str, int]:
        """Total counts: blocks written, dropped because the queue was full or writing paused, and found damaged;
        writes and reads that failed."""
        with self._guard:
            return dict(self._counts)

    def _count(self, event: str, count: int = 1) -> None:
        with self._guard:
            self._counts[event] += count

    # -- blocks that leave memory ---------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        with self._guard:
            return len(self._free)

    def take_block(self, block_hash: bytes, block: int) -> None:
        """A block leaves the pool."""
        slot = self._slot_for(block_hash)
        if slot is not None:
            runs = self._blocks[:, block]
            self._staged[slot].reshape(runs.shape)[:] = runs
            self._queue(block_hash, slot)

    def take_copy(self, block_hash: bytes, copy: int) -> None:
        """A copy leaves the host tier."""
        assert self._copies is not None, "there is no host tier"
        slot = self._slot_for(block_hash)
        if slot is not None:
            self._staged[slot] = self._copies.copy_of(copy).reshape(-1)
            self._queue(block_hash, slot)

    def drop(self, block_hash: bytes) -> None:
        """The block is wrong. The writer removes it from the files before it writes another one."""
        with self._guard:
            self.files.forget(block_hash)
            self._queued.pop(block_hash, None)
            self._wrong.add(block_hash)
            self._may_write.notify()

    def _slot_for(self, block_hash: bytes) -> int | None:
        if self.files.is_young(block_hash):
            return None
        with self._guard:
            if block_hash in self._queued or self._is_closing:
                return None
            if not self._free or self._now() < self._paused_until_s:
                self._counts["dropped"] += 1
                return None
            return self._free.pop()

    def _queue(self, block_hash: bytes, slot: int) -> None:
        with self._guard:
            self._queued[block_hash] = slot
            self._writes.append((block_hash, slot))
            self._may_write.notify()

    # -- blocks that prompts wait for -----------------------------------------------------------------------------

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        files = self.files
        return next((at for at, one in enumerate(hashes) if one not in files), len(hashes))

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        now_s = self._now()
        if now_s >= self._late_at_s:
            return math.inf
        return self._speed.predict_s((self._num_pending + num_blocks) * self.files.block_bytes, now_s)

    def read_s(self, num_blocks: int) -> float:
        """To read so many blocks, without a queue."""
        return self._speed.predict_s(num_blocks * self.files.block_bytes, self._now())

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        with self._guard:
            is_open = not self._is_closing
            if is_open:
                self._num_pending += len(fetch.blocks)
                self._reads.append((fetch, end))
                self._may_read.notify()
        if not is_open:
            end(0)

    def abort(self, number: int) -> None:
        with self._guard:
            running = self._read_now
            if running is not None and number == running.number:
                self._aborted.add(number)
                self._observe(len(running.blocks), is_whole=False)
                return
            waiting = next((one for one in self._reads if one[0].number == number), None)
            if waiting is None:
                return
            self._reads.remove(waiting)
            self._num_pending -= len(waiting[0].blocks)
        waiting[1](0)

    def _observe(self, num_blocks: int, *, is_whole: bool) -> None:
        """The read has taken this long for so many blocks; unless `is_whole`, it takes longer."""
        now_s = self._now()
        took_s = now_s - self._read_began_s
        if is_whole or took_s > self.read_s(num_blocks):
            self._speed.observe(num_blocks * self.files.block_bytes, took_s, now_s)

    def close(self) -> None:
        """Ends the threads. What waits is written, as far as that does not take long. Idempotent."""
        with self._guard:
            if self._is_closing:
                return
            self._is_closing, self._close_by_s = True, time.monotonic() + DRAIN_S
            reads, self._reads = list(self._reads), deque()
            self._may_write.notify_all()
            self._may_read.notify_all()
        for _, end in reads:
            end(0)
        until_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else the device hangs, and the process ends soon
            self.files.close()

    def flush(self, timeout_s: float) -> bool:
        """Waits until the queue of the writer is empty; for tests and measurements."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with self._guard:
                if not (self._queued or self._writes or self._wrong or self._is_erasing):
                    return True
            time.sleep(0.001)
        return False

    # -- the reader -----------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        """Reads one fetch after the other."""
        _yield_to_engine()
        while True:
            with self._guard:
                while not self._reads and not self._is_closing:
                    self._may_read.wait()
                if self._is_closing:
                    break
                fetch, end = self._reads.popleft()
                self._read_now, self._read_began_s = fetch, self._now()
                predicted_s = self.read_s(len(fetch.blocks))
                self._late_at_s = self._read_began_s + max(LATE * predicted_s, LATE_S)
            count = 0
            try:
                count = self._read(fetch)
            except Exception:  # the prompt must not wait for it
                log.exception("a fetch of the disk tier failed")
            finally:
                with self._guard:
                    self._read_now, self._late_at_s = None, math.inf
                    self._aborted.discard(fetch.number)
                    self._num_pending -= len(fetch.blocks)
                end(count)
        for _ in range(READS):
            self._groups.put(None)

    def _read(self, fetch: Fetch) -> int:
        """The number of leading blocks that are verified. Nothing writes to any of the blocks after it, also if it
        raises."""
        num_read = 0
        is_good = [False] * len(fetch.blocks)
        num_open = 0
        try:
            for group in self.files.groups(fetch.hashes, self._blocks.shape[0]):
                self._groups.put((fetch, group))
                num_open += 1
        finally:
            for _ in range(num_open):
                group, results = self._results.get()
                num_read += len(results)
                for index, good in zip(group.indexes, results, strict=False):
                    is_good[index] = good
        if num_read:
            with self._guard:
                self._observe(num_read, is_whole=True)
        return next((at for at, good in enumerate(is_good) if not good), len(is_good))

    def _read_groups(self) -> None:
        _yield_to_engine()
        while (wanted := self._groups.get()) is not None:
            fetch, group = wanted
            results: list[bool] = []  # none: it was not read
            try:
                if fetch.number not in self._aborted and not self._is_closing:
                    results = self._read_group(fetch, group)
            except Exception:  # a defect here must not end the thread, for which a fetch would wait
                log.exception("a read of the disk tier failed")
            finally:
                self._results.put((group, results))

    def _read_group(self, fetch: Fetch, group: Group) -> list[bool]:
        try:
            good = self.files.read(group, [list(self._blocks[:, fetch.blocks[index]]) for index in group.indexes])
            damaged = [fetch.hashes[index] for index, one in zip(group.indexes, good, strict=True) if not one]
            self._count("damaged", len(damaged))
        except OSError as error:
            self._count("failed_reads")
            log.warning("the disk tier cannot be read", extra={"error": str(error)})
            good = [False] * len(group.indexes)
            damaged = [fetch.hashes[index] for index in group.indexes]
        if damaged:
            for at, index in enumerate(group.indexes):
                if not good[at]:
                    self.files.forget(fetch.hashes[index], group.segment, group.first_slot + at)
            self._changed((), [one for one in damaged if one not in self.files])
        return good

    # -- the writer -----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        _yield_to_engine()
        num_unsynced = 0
        while True:
            with self._guard:
                while not self._writes and not self._wrong and not self._is_closing:
                    self._may_write.wait()
                is_done = not self._writes and not self._wrong
                if self._is_closing and (is_done or time.monotonic() >= self._close_by_s):
                    return
                wrong, self._wrong = self._wrong, set()
                self._is_erasing = bool(wrong)
                most = min(max(1, BATCH_BYTES // self.files.block_bytes), self.files.room)
                batch = [self._writes.popleft() for _ in range(min(most, len(self._writes)))]
                wanted = [(block_hash, slot) for block_hash, slot in batch if self._queued.get(block_hash) == slot]
            num_bytes = len(wanted) * self.files.block_bytes
            began_s = self._now()
            places: list[Place] = []
            error = None
            try:
                if wrong:  # before one of them is written anew
                    self.files.erase(wrong)
                    wrong = set()
                if wanted:
                    places = self.files.write([(block_hash, self._staged[slot]) for block_hash, slot in wanted])
                num_unsynced += num_bytes
                if num_unsynced >= SYNC_BYTES:
                    num_unsynced = 0
                    self.files.sync()
                self._pause_s = self._first_pause_s
            except OSError as failure:
                error, places = failure.with_traceback(None), []  # which refers to open files
            except Exception as failure:  # a defect here must not end the thread
                log.exception("the disk tier's writer failed")
                error, places = OSError(str(failure)), []
            with self._guard:
                added = []
                for (block_hash, slot), place in zip(wanted, places, strict=False):
                    if self._queued.get(block_hash) == slot:  # else it turned out to be wrong meanwhile
                        self.files.add(block_hash, place)
                        added.append(block_hash)
                self._wrong |= wrong
                self._is_erasing = False
                for block_hash, slot in batch:
                    if self._queued.get(block_hash) == slot:
                        del self._queued[block_hash]
                    self._free.append(slot)
                self._counts["written"] += len(places)
            left = [one for one in self.files.take_left() if one not in self.files]
            if added or left:
                self._changed(added, left)
            if error is not None:
                self._failed(error)
                if self._is_closing:
                    return
            else:
                self._wait(num_bytes / self._write_bytes_s - (self._now() - began_s))

    def _failed(self, error: OSError) -> None:
        self._count("failed_writes")
        log.warning(
            "the disk tier cannot be written; writing pauses", extra={"error": str(error), "pause_s": self._pause_s}
        )
        self._paused_until_s = self._now() + self._pause_s
        self._wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _wait(self, seconds: float) -> None:
        """Ends early when the tier closes."""
        with self._guard:
            if seconds > 0.0 and not self._is_closing:
                self._may_write.wait_for(lambda: self._is_closing, seconds)


def _yield_to_engine() -> None:
    """Lets this thread have what the engine's threads leave: they wait for each other in every layer, so a core that is
    taken from one of them stalls all."""
    if sys.platform == "linux":  # elsewhere, it would concern the process
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def disk_tier(
    engine: Engine,
    config: WorkerConfig,
    copies: HostCopies | None,
    changed: Callable[[Sequence[bytes], Sequence[bytes]], None],
    report: Callable[[int, int], None] = lambda done, of: None,
    calls: FileCalls | None = None,
) -> DiskTier | None:
    """None if the tier is off. Raises ConfigError if the engine's pool cannot have one, or the folder is not usable."""
    if not config.kv_disk_path:
        return None
    spec, pool = engine.spec, engine.pool
    if not config.is_prefix_cache_on:
        raise ConfigError("kv_disk_path", config.kv_disk_path, "no folder while is_prefix_cache_on is false")
    if not pool.is_on_host or spec.tp_degree > 1:
        raise ConfigError("kv_disk_path", config.kv_disk_path, "no folder for a pool on GPUs, or of several ranks")
    files = BlockFiles(
        Path(config.kv_disk_path),
        config.worker_id,
        block_bytes=pool.block_bytes,
        num_bytes=config.kv_disk_bytes,
        most_slots=MOST_HASHES - pool.num_blocks - (0 if copies is None else copies.num_slots),
        contents=contents_of(spec, Path(config.model)),
        is_aligned=is_aligned(pool_blocks(pool)),
        calls=calls,
        report=report,
    )
    return DiskTier(files, pool, copies, write_bytes_s=config.kv_disk_write_bytes_s, changed=changed)


def is_aligned(blocks: Any) -> bool:
    """Whether each run of bytes begins and ends at a page."""
    return bool(blocks.ctypes.data % PAGE == 0 and blocks.shape[2] % PAGE == 0)


def contents_of(spec: EngineSpec, model: Path) -> bytes:
    """Identifies everything that makes the bytes of a block differ for equal tokens.

    The hash of the weights has samples only, and blocks on disk outlive a change of the weights or of the program. So
    the sizes and times of the files in the folder `model`, if it is one, and the program's build are parts of it.
    """
    files = sorted(model.iterdir()) if model.is_dir() else []
    times = [(file.name, status.st_size, status.st_mtime_ns) for file in files if (status := file.stat())]
    facts = (spec.kv_dtype, spec.kv_layers, spec.kv_heads, spec.kv_head_dim, spec.block_bytes, times, FULL_VERSION)
    seed = hash_seed(spec.weights_hash, spec.dtype, spec.layout, spec.block_size)
    return blake2b(seed + repr(facts).encode(), digest_size=32).digest()

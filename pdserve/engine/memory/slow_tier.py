"""What the tiers below memory have in common: blocks that leave memory are written behind the engine, and read back
into the pool for prompts that wait for them (core/kv/fetch.py).

The writer has a bounded queue, whose blocks are copies (staging.py): if it is full, a block is dropped. It writes
at a bounded rate, and pauses after errors, for instance of a full disk. The reader takes one fetch after the other, of
which several threads read a part each. Every failure is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, final

from pdserve.build import FULL_VERSION
from pdserve.clock import steady
from pdserve.core.attempt import Attempt
from pdserve.core.durations import clamped_s
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.hashing import hash_seed
from pdserve.core.kv.tier_reads import Tier, TierSpeed
from pdserve.engine.interface import EngineSpec, KvPool
from pdserve.engine.memory.host import HostCopies
from pdserve.engine.memory.staging import HostStaging, Staging, most_rows

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 8 * 2**20  # written by one call
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
EVENTS: Final = ("written", "dropped", "damaged", "failed_writes", "failed_reads")
READ_S: Final = 0.001  # for a fetch, beside its bytes
GAIN: Final = 0.3  # weight of the newest fetch
MOST_FACTOR: Final = 100.0
LATE: Final = 4.0  # times its prediction, a read is late, and nothing is predicted until it ends;
LATE_S: Final = 0.1  # but not sooner than this, for which a thread may wait for a core
FORGOTTEN_S: Final = 60.0  # after which a slow device is tried again
NICE: Final = 15  # about a thirtieth of a core that the engine wants
DRAIN_S: Final = 3.0  # for what waits to be written at the end
JOIN_S: Final = 5.0  # for all threads, of the time that the worker has to end
HANGS_S: Final = 1.0  # after which the end does not wait for a write to make room


def contents_id(spec: EngineSpec, files: Sequence[tuple[object, ...]], person: bytes = b"") -> bytes:
    """Identifies everything that makes the bytes of a block differ for equal tokens. `files`: facts of the
    model's files, because the hash of the weights has samples only. `person`: each kind of tier has its own."""
    facts = (spec.kv_dtype, spec.kv_layers, spec.kv_heads, spec.kv_head_dim, spec.block_bytes, files, FULL_VERSION)
    seed = hash_seed(spec.weights_hash, spec.dtype, spec.layout, spec.block_size)
    return blake2b(seed + repr(facts).encode(), digest_size=32, person=person).digest()


@final
class ReadSpeed:
    """Predicts the time of a fetch. Pure."""

    def __init__(self, bytes_s: float, fixed_s: float = READ_S) -> None:
        """Both were measured at the start. `fixed_s`: for a fetch, beside its bytes."""
        self._bytes_s, self._fixed_s = bytes_s, fixed_s
        self._factor = 1.0  # of measured times to those that the start predicts
        self._seen_s = -math.inf

    def predict_s(self, num_bytes: int, now_s: float) -> float:
        return (self._fixed_s + num_bytes / self._bytes_s) * self._factor_at(now_s)

    def of_tier(self, tier: Tier, block_bytes: int, num_pending: int, now_s: float) -> TierSpeed:
        """`predict_s` for any number of blocks, after `num_pending` other ones."""
        factor = self._factor_at(now_s)  # once, because another thread observes
        fixed_s, block_s = factor * self._fixed_s, factor * block_bytes / self._bytes_s
        return TierSpeed(
            tier=tier,
            block_s=clamped_s(block_s),
            fixed_s=clamped_s(fixed_s),
            queue_s=clamped_s(num_pending * block_s),
        )

    def _factor_at(self, now_s: float) -> float:
        return self._factor if now_s - self._seen_s < FORGOTTEN_S else min(self._factor, 1.0)

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        factor = seconds / (self._fixed_s + num_bytes / self._bytes_s)
        factor = min(max(factor, 1.0 / MOST_FACTOR), MOST_FACTOR)
        self._factor += GAIN * (factor - self._factor)
        self._seen_s = now_s


class Part(Protocol):
    """A part of a fetch, which one thread reads."""

    @property
    def indexes(self) -> Sequence[int]:
        """Which of the fetch's blocks."""
        ...


ReadPart = TypeVar("ReadPart", bound=Part)
Written = TypeVar("Written")


class SlowTier(ABC, Generic[ReadPart, Written]):
    """Its public methods are called on the engine's thread."""

    name: ClassVar[str]
    num_readers: ClassVar[int]  # of one fetch at a time

    def __init__(
        self,
        pool: KvPool,
        copies: HostCopies | None,
        *,
        speed: ReadSpeed,
        most_staged: int,
        write_bytes_s: float,
        now: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
        staging: Staging | None = None,
    ) -> None:
        """`most_staged`: blocks that may wait to be written, at most QUEUE_BYTES. `staging`: None: the pool is on the
        host."""
        self._now = steady(now)
        self._block_bytes = pool.block_bytes
        self._write_bytes_s = write_bytes_s
        self._speed = speed
        self._counts = dict.fromkeys(EVENTS, 0)
        num_staged = max(1, min(most_rows(pool), most_staged))
        self._staging = HostStaging(pool, copies, num_staged) if staging is None else staging
        self._free = list(range(min(num_staged, self._staging.num_rows)))
        self._num_arriving = 0  # rows that do not have their block yet
        self._writes: deque[tuple[bytes, int]] = deque()
        self._queued: dict[bytes, int] = {}  # the valid ones of them, and of those that arrive
        self._wrong: set[bytes] = set()  # to be removed from what was written
        self._is_erasing = False
        self._paused_until_s = -math.inf
        self._first_pause_s = self._pause_s = first_pause_s
        self._reads: deque[tuple[Fetch, Any, Callable[[int], None]]] = deque()  # with the fences of the staging
        self._read_now: Fetch | None = None
        self._read_began_s, self._late_at_s = 0.0, math.inf  # of that
        self._aborted: set[int] = set()
        self._num_pending = 0  # blocks of all fetches that have not ended
        self._guard = threading.Lock()
        self._may_write = threading.Condition(self._guard)
        self._may_read = threading.Condition(self._guard)
        self._conditions = [self._may_write, self._may_read]  # that threads wait for
        self._writing_since_s: float | None = None
        self._is_closing = self._is_closed = False
        self._close_by_s = math.inf
        self._parts: SimpleQueue[tuple[Fetch, ReadPart, Any] | None] = SimpleQueue()  # to be read; None ends a thread
        self._results: SimpleQueue[tuple[ReadPart, list[bool]]] = SimpleQueue()  # one for each part
        self._threads: list[threading.Thread] = []

    def _start(self, **others: Callable[[], None]) -> None:
        """Starts the threads, and `others` by their names, which need little of a core. They end with the process, also
        if the device hangs. If one cannot be started, the tier is closed."""
        copying: list[tuple[str, Callable[[], None]]] = [("writer", self._write_all), ("reader", self._read_all)]
        copying += [("reads", self._read_parts)] * self.num_readers
        targets: list[tuple[str, Callable[[], None]]]
        targets = [(purpose, partial(_yielding, target)) for purpose, target in copying]
        for purpose, target in [*targets, *others.items()]:
            thread = threading.Thread(target=target, name=f"kv-{self.name}-{purpose}", daemon=True)
            try:
                thread.start()
            except BaseException:
                self.close()
                raise
            self._threads.append(thread)

    # -- implemented by each tier -----------------------------------------------------------------------------------

    @abstractmethod
    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        """As in `BlockSource`."""

    @abstractmethod
    def _is_kept(self, block_hash: bytes) -> bool:
        """Whether the block need not be written. On the engine's thread."""

    @abstractmethod
    def _forget(self, block_hash: bytes) -> None:
        """The block is not to be found any more. `_guard` is held."""

    @abstractmethod
    def _parts_of(self, fetch: Fetch) -> Sequence[ReadPart]:
        """Of the blocks that are there."""

    @abstractmethod
    def _read_part(self, fetch: Fetch, part: ReadPart, fence: Any) -> list[bool]:
        """Which blocks of the part are in the pool, and verified."""

    @property
    @abstractmethod
    def _most_written(self) -> int:
        """How many blocks the next call of `_write` takes."""

    @abstractmethod
    def _write(self, blocks: Sequence[tuple[bytes, Any]]) -> Sequence[Written]:
        """Writes the blocks, each an array of bytes. Returns what `_add` needs of each; false if it was there. Raises
        OSError."""

    @abstractmethod
    def _add(self, block_hash: bytes, written: Written) -> None:
        """The block can be found. `_guard` is held."""

    @abstractmethod
    def _erase(self, hashes: Collection[bytes]) -> None:
        """Removes blocks so that nobody finds them again. Raises OSError."""

    def _has_written(self, added: Sequence[bytes]) -> None:
        """Blocks were added, and others may have made room."""

    def _ended(self) -> None:
        """No thread runs any more."""

    # -- counts -----------------------------------------------------------------------------------------------------

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
            return min(len(self._free), self._staging.room)

    @property
    def is_stuck(self) -> bool:
        """Whether the writer pauses after an error, or its present call takes long."""
        now_s, since_s = self._now(), self._writing_since_s
        return now_s < self._paused_until_s or (since_s is not None and now_s - since_s > HANGS_S)

    def take_block(self, block_hash: bytes, block: int) -> None:
        """A block leaves the pool."""
        slot = self._slot_for(block_hash, self._staging.room)
        if slot is not None:
            self._staging.take_block(block, slot, partial(self._copied, block_hash, slot))

    def take_copy(self, block_hash: bytes, copy: int) -> None:
        """A copy leaves the host tier."""
        slot = self._slot_for(block_hash, 1)
        if slot is not None:
            self._staging.take_copy(copy, slot, partial(self._copied, block_hash, slot))

    def start_copies(self) -> None:
        self._staging.start_copies()

    def drop(self, block_hash: bytes) -> None:
        """The block is wrong. The writer removes what was written of it before it writes another one."""
        with self._guard:
            self._forget(block_hash)
            self._queued.pop(block_hash, None)
            self._wrong.add(block_hash)
            self._may_write.notify()

    def _slot_for(self, block_hash: bytes, room: int) -> int | None:
        if self._is_kept(block_hash):
            return None
        with self._guard:
            if block_hash in self._queued or self._is_closing:
                return None
            if not self._free or room == 0 or self._now() < self._paused_until_s:
                self._counts["dropped"] += 1
                return None
            slot = self._queued[block_hash] = self._free.pop()
            self._num_arriving += 1
            return slot

    def _copied(self, block_hash: bytes, slot: int, is_right: bool) -> None:
        with self._guard:
            self._num_arriving -= 1
            if self._queued.get(block_hash) == slot and is_right:
                self._writes.append((block_hash, slot))
            else:
                if not is_right:
                    self._counts["dropped"] += 1
                if self._queued.get(block_hash) == slot:  # else it turned out to be wrong meanwhile
                    del self._queued[block_hash]
                self._free.append(slot)
            self._may_write.notify()

    # -- blocks that prompts wait for -----------------------------------------------------------------------------

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        now_s = self._now()
        if now_s >= self._late_at_s:
            return math.inf
        return self._speed.predict_s((self._num_pending + num_blocks) * self._block_bytes, now_s)

    def read_s(self, num_blocks: int) -> float:
        """To read so many blocks, without a queue."""
        return self._speed.predict_s(num_blocks * self._block_bytes, self._now())

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        fence = self._staging.fence()
        with self._guard:
            is_open = not self._is_closing
            if is_open:
                self._num_pending += len(fetch.blocks)
                self._reads.append((fetch, fence, end))
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
        waiting[2](0)

    def _observe(self, num_blocks: int, *, is_whole: bool) -> None:
        """The read has taken this long for so many blocks; unless `is_whole`, it takes longer."""
        now_s = self._now()
        took_s = now_s - self._read_began_s
        if is_whole or took_s > self.read_s(num_blocks):
            self._speed.observe(num_blocks * self._block_bytes, took_s, now_s)

    def begin_close(self) -> None:
        """What waits is written, as far as that does not take long. Nothing else is taken. Idempotent."""
        with self._guard:
            if self._is_closing:
                return
            self._is_closing, self._close_by_s = True, time.monotonic() + DRAIN_S
            reads, self._reads = list(self._reads), deque()
            for condition in self._conditions:
                condition.notify_all()
        for _, _, end in reads:
            end(0)

    def close(self, within_s: float | None = None) -> None:
        """Waits for the end of the threads, but for a call that hangs not longer than `within_s`; None: JOIN_S.
        Idempotent."""
        self.begin_close()
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + (JOIN_S if within_s is None else within_s)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else the device hangs, and the process ends soon
            self._ended()
            self._staging.close(max(0.0, until_s - time.monotonic()))

    def flush(self, timeout_s: float) -> bool:
        """Waits until the queue of the writer is empty; for tests and measurements."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with self._guard:
                if not (self._queued or self._writes or self._wrong or self._is_erasing):
                    return True
            time.sleep(0.001)
        return False

    # -- the readers ------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        """Reads one fetch after the other."""
        while True:
            with self._guard:
                while not self._reads and not self._is_closing:
                    self._may_read.wait()
                if self._is_closing:
                    break
                fetch, fence, end = self._reads.popleft()
                self._read_now, self._read_began_s = fetch, self._now()
                predicted_s = self.read_s(len(fetch.blocks))
                self._late_at_s = self._read_began_s + max(LATE * predicted_s, LATE_S)
            count = 0
            try:
                count = self._read(fetch, fence)
            except Exception:  # the prompt must not wait for it
                log.exception("a fetch failed", extra={"tier": self.name})
            finally:
                with self._guard:
                    self._read_now, self._late_at_s = None, math.inf
                    self._aborted.discard(fetch.number)
                    self._num_pending -= len(fetch.blocks)
                end(count)
        for _ in range(self.num_readers):
            self._parts.put(None)

    def _read(self, fetch: Fetch, fence: Any) -> int:
        """The number of leading blocks that are verified. Nothing writes to any of the blocks after it, also if it
        raises."""
        num_read = 0
        is_good = [False] * len(fetch.blocks)
        num_open = 0
        try:
            for part in self._parts_of(fetch):
                self._parts.put((fetch, part, fence))
                num_open += 1
        finally:
            for _ in range(num_open):
                part, results = self._results.get()
                num_read += len(results)
                for index, good in zip(part.indexes, results, strict=False):
                    is_good[index] = good
        if num_read:
            with self._guard:
                self._observe(num_read, is_whole=True)
        return next((at for at, good in enumerate(is_good) if not good), len(is_good))

    def _read_parts(self) -> None:
        while (wanted := self._parts.get()) is not None:
            fetch, part, fence = wanted
            results: list[bool] = []  # none: it was not read
            try:
                if fetch.number not in self._aborted and not self._is_closing:
                    results = self._read_part(fetch, part, fence)
            except Exception:  # a defect here must not end the thread, for which a fetch would wait
                log.exception("a read of a tier failed", extra={"tier": self.name})
            finally:
                self._results.put((part, results))

    def _cannot_read(self, error: OSError) -> None:
        self._count("failed_reads")
        log.warning("a tier cannot be read", extra={"tier": self.name, "error": str(error)})

    # -- the writer -----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._guard:
                while not self._writes and not self._wrong and not self._is_closing:
                    self._may_write.wait()
                if self._is_closing and not self._writes and not self._wrong:  # what still arrives is written too
                    self._may_write.wait_for(
                        lambda: self._writes or self._wrong or not self._num_arriving,
                        max(0.0, self._close_by_s - time.monotonic()),
                    )
                is_done = not self._writes and not self._wrong
                if self._is_closing and (is_done or time.monotonic() >= self._close_by_s):
                    return
                wrong, self._wrong = self._wrong, set()
                self._is_erasing = bool(wrong)
                most = min(max(1, BATCH_BYTES // self._block_bytes), self._most_written)
                batch = [self._writes.popleft() for _ in range(min(most, len(self._writes)))]
                wanted = [(block_hash, slot) for block_hash, slot in batch if self._queued.get(block_hash) == slot]
            began_s = self._writing_since_s = self._now()
            results: Sequence[Written] = []
            error = None
            try:
                if wrong:  # before one of them is written anew
                    self._erase(wrong)
                    wrong = set()
                if wanted:
                    results = self._write([(block_hash, self._staging.row(slot)) for block_hash, slot in wanted])
                self._pause_s = self._first_pause_s
            except OSError as failure:
                error, results = failure.with_traceback(None), []  # which refers to open files
            except Exception as failure:  # a defect here must not end the thread
                log.exception("the writer of a tier failed", extra={"tier": self.name})
                error, results = OSError(str(failure)), []
            self._writing_since_s = None
            num_written = sum(map(bool, results))
            with self._guard:
                added = []
                for (block_hash, slot), written in zip(wanted, results, strict=False):
                    if self._queued.get(block_hash) == slot:  # else it turned out to be wrong meanwhile
                        self._add(block_hash, written)
                        added.append(block_hash)
                self._wrong |= wrong
                self._is_erasing = False
                for block_hash, slot in batch:
                    if self._queued.get(block_hash) == slot:
                        del self._queued[block_hash]
                    self._free.append(slot)
                self._counts["written"] += num_written
            self._has_written(added)
            if error is not None:
                self._failed(error)
                if self._is_closing:
                    return
            else:
                self._wait(num_written * self._block_bytes / self._write_bytes_s - (self._now() - began_s))

    def _failed(self, error: OSError) -> None:
        self._count("failed_writes")
        extra = {"tier": self.name, "error": str(error), "pause_s": self._pause_s}
        log.warning("a tier cannot be written; writing pauses", extra=extra)
        self._paused_until_s = self._now() + self._pause_s
        self._wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _wait(self, seconds: float) -> None:
        """Ends early when the tier closes."""
        with self._guard:
            if seconds > 0.0 and not self._is_closing:
                self._may_write.wait_for(lambda: self._is_closing, seconds)


def _yielding(target: Callable[[], None]) -> None:
    """Lets this thread have what the engine's threads leave: they wait for each other in every layer, so a core that is
    taken from one of them stalls all."""
    if sys.platform == "linux":  # elsewhere, it would concern the process
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
    target()

"""A stand-in for a CUDA device in memory files. A thread for each stream does its work later, in the stream's order.

It behaves like the real one in these ways. A call returns before the bytes have moved, after an unpredictable time.
Streams run concurrently: work of one overtakes earlier work of another unless it was ordered behind it. Another process
opens a pool by the handle from `export`, and may be unable to read it after its owner was killed. The engine waits only
for the copies that hold it (`run_step`), so a block that is used again too early has other bytes in its copy. Work
that uses the same slot of pinned memory, or the same block of staging, as other work in progress on another stream is
an error at once, if one of both writes. `Trouble` adds every failure that a real device may show.
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import select
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtransfer.devices.copy_limits import CopyLimits, StagingBudget, StreamLoads
from kvtransfer.protocol.device import COPY_S, Blocks, Copying, Wake
from kvtransfer.transports.tcp_staged import HostBlocks, PlainBytes, digest_of, move_bytes, word_sum, zeroed
from pdserve.core.errors import InternalError, TransferFailed
from tests.support.transfer_ends import HostPool

DRAIN_S = 60.0
_EXPORT = struct.Struct("<IIII")  # process, descriptor, blocks, bytes per block


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Probability of each failure, per copy or message; no failures by default."""

    seed: int = 1
    delay_s: float = 0.0005  # of each, at most
    late: float = 0.0  # a copy takes up to late_s
    late_s: float = 0.4
    killed: float = 0.0  # the process is killed during a copy
    hung: float = 0.0  # a message never ends
    failed: float = 0.0  # the library reports an asynchronous error
    flipped: float = 0.0  # one bit of a message is flipped
    # Access to a killed process's memory or messages raises an error; else memory stays readable and messages hang.
    loses_the_dead: bool = False


PLAIN = Trouble()


class DevicePool(HostPool):
    """An engine's pool on a device. Code that asks for its bytes on the host is wrong."""

    is_on_host = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_device, self.handle = self.memory, self.descriptor
        del self.buffer
        self.descriptor = None

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise InternalError("the KV pool lies on a device: it has no host buffer")
        raise AttributeError(name)


class HiddenPool:
    """A pool in host memory (TorchPool, HostPool) that looks like one on a device."""

    is_on_host = False
    runs_per_block = 1
    descriptor = None

    def __init__(self, pool: Any) -> None:
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        self.on_device, self.handle = pool.buffer, pool.descriptor
        self.device: FakeDevice | None = None
        self._pool = pool  # which owns the descriptor

    @property
    def buffer(self) -> memoryview:
        raise InternalError("the KV pool lies on a device: it has no host buffer")


class DeviceEngine:
    """An engine whose pool seems to be on a device, which may hold its steps."""

    def __init__(self, engine: Any) -> None:
        self._step, self.spec, self.close = engine.step, engine.spec, engine.close
        self.pool = HiddenPool(engine.pool)

    def step(self, *arguments: Any) -> Any:
        device = self.pool.device
        return self._step(*arguments) if device is None else device.run_step(lambda: self._step(*arguments))


class FakeBlocks(HostBlocks):
    """Blocks on the device: its pool, staging, or a part of them that shares the lifetime of the whole."""

    whole: FakeBlocks | None = None

    def check(self) -> None:
        """Raises TransferFailed if the memory is gone."""
        if self.whole is not None:
            self.whole.check()

    def _part(self, num_blocks: int, block_bytes: int, first: int, stride: int) -> FakeBlocks:
        part = FakeBlocks(self.memory, num_blocks, block_bytes, first, stride)
        part.whole = self
        return part


class OpenedBlocks(FakeBlocks):
    """Another process's pool."""

    def __init__(self, exported: bytes, loses_the_dead: bool) -> None:
        try:
            self._process, descriptor, num_blocks, block_bytes = _EXPORT.unpack(exported)
            file = os.open(f"/proc/{self._process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, struct.error) as error:
            raise TransferFailed(f"the sender's pool cannot be opened: {error}") from error
        try:
            memory = mmap.mmap(file, num_blocks * block_bytes, prot=mmap.PROT_READ)
            self._alive = os.pidfd_open(self._process) if loses_the_dead else None
        except (OSError, ValueError) as error:
            raise TransferFailed(f"the sender's pool cannot be opened: {error}") from error
        finally:
            os.close(file)
        super().__init__(memory, num_blocks, block_bytes)

    def check(self) -> None:
        if self._alive is not None and select.select([self._alive], [], [], 0)[0]:
            raise TransferFailed("the device failed: the sender's memory is gone")

    def close(self) -> None:
        super().close()
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None


class FakeCopying:
    def __init__(self, limit_s: float = COPY_S, stream: int | None = None) -> None:
        self.state: tuple[bool, str, bytes] = (False, "", b"")
        self.stream = stream  # the number of the device's that it is queued on
        self.block_sums: list[int] = []
        self._limit_s, self._ends_s = limit_s, time.monotonic() + limit_s

    @property
    def is_done(self) -> bool:
        is_done, error, _ = self.state
        if not is_done and not error and time.monotonic() > self._ends_s:
            error = f"work on the device has not ended in {self._limit_s:.0f} s"
        if error:
            raise TransferFailed(error)
        return is_done

    def digest(self) -> bytes:
        assert self.state[0]
        return self.state[2]

    def sums(self) -> Sequence[int]:
        assert self.state[0]
        return self.block_sums


class Stream:
    """One thread that runs its work in order. It ends with the object, or thousands would be left after the tests."""

    def __init__(self, name: str, trouble: Trouble = PLAIN) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        rng = random.Random(f"{trouble.seed} {name}")
        self._thread = threading.Thread(
            target=_run_all, args=(self._work, trouble, rng), name=f"fake-{name}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def queue(
        self, work: Callable[[], bytes], wake: Wake, limit_s: float | None = None, number: int | None = None
    ) -> FakeCopying:
        copying = FakeCopying(COPY_S if limit_s is None else limit_s, number)

        def run() -> None:
            try:
                copying.state = (True, "", work())
            except TransferFailed as failed:
                copying.state = (False, failed.message, b"")
            wake()

        self._work.put(run)
        return copying

    def drain(self) -> None:
        done = threading.Event()
        self._work.put(done.set)
        if not done.wait(DRAIN_S):
            raise InternalError("the stand-in for a device does not drain")

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(DRAIN_S)


def _run_all(queued: queue.SimpleQueue[Callable[[], None] | None], trouble: Trouble, rng: random.Random) -> None:
    while (work := queued.get()) is not None:
        time.sleep(rng.random() * (trouble.late_s if rng.random() < trouble.late else trouble.delay_s))
        work()


class FakeDevice:
    name = "fake"

    def __init__(self, pool: Any, trouble: Trouble = PLAIN, limits: CopyLimits | None = None) -> None:
        limits = limits or CopyLimits()
        self._pool, self.trouble = pool, trouble
        self._gathering = Stream("device gathers", trouble)
        if isinstance(pool, HiddenPool):
            pool.device = self
        self.streams = [Stream(f"device {number}", trouble) for number in range(limits.num_streams)]
        self.loads, self.budget = StreamLoads(limits.num_streams), StagingBudget(limits.staging_bytes)
        self._under_way: set[int] = set()  # numbers of copies that have not ended
        self._num_queued = 0
        self._lock = threading.Lock()  # guards these two and the count of overtakings
        self.num_overtakings = 0  # copies that ended before an earlier one, which was on another stream
        self._rng = random.Random(f"{trouble.seed} kills")
        self._steps: list[threading.Event] = []  # of the engine, that may not have ended
        self._held: list[FakeCopying] = []  # for which the engine waits
        # By the number of work in progress: its stream and uses, and its copy.
        self._uses: dict[int, tuple[int | None, Sequence[Use]]] = {}
        self._copyings: dict[int, FakeCopying] = {}
        self.num_copies = self.num_moved = self.num_unpinned = 0

    def pool(self) -> FakeBlocks:
        return FakeBlocks(self._pool.on_device, self._pool.num_blocks, self._pool.block_bytes)

    def staging(self, num_blocks: int) -> FakeBlocks:
        block_bytes = self._pool.block_bytes
        return FakeBlocks(zeroed(num_blocks * block_bytes), num_blocks, block_bytes)

    def export(self) -> bytes:
        return _EXPORT.pack(os.getpid(), self._pool.handle, self._pool.num_blocks, self._pool.block_bytes)

    def open(self, exported: bytes) -> FakeBlocks:
        return OpenedBlocks(exported, self.trouble.loses_the_dead)

    def begin_step(self) -> threading.Event:
        """Queues work of the engine; it ends when the event is set."""
        step = threading.Event()
        self._steps.append(step)
        return step

    def fence(self) -> tuple[Any, ...]:
        """What the engine has queued, and the copies for which it waits."""
        self._steps = [step for step in self._steps if not step.is_set()]
        return (*self._steps, *self._held)

    def hold_engine(self, copying: Copying) -> None:
        assert isinstance(copying, FakeCopying)
        self._held.append(copying)

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Work of an engine that computes at once."""
        wait_for(self.take_held())
        return step()

    def take_held(self) -> list[FakeCopying]:
        """The copies for which work that the engine queues now waits."""
        held, self._held = self._held, []
        return held

    def copy(
        self,
        source: Blocks,
        sources: Sequence[int],
        target: Blocks | None,
        targets: Sequence[int],
        wake: Wake,
        after: Any | None,
        behind: Copying | None = None,
        stream: Stream | None = None,
    ) -> FakeCopying:
        """`stream`: one that is none of the copy streams."""
        assert isinstance(source, FakeBlocks)
        assert target is None or (target.block_bytes == source.block_bytes and len(targets) == len(sources))
        self.num_copies += 1
        dies_at = self._rng.randrange(len(sources)) if self._rng.random() < self.trouble.killed else -1

        def work() -> bytes:
            wait_for(after)
            sums: list[int] = []
            for index, block in enumerate(sources):
                source.check()
                if index == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                data = source.read(block)
                sums.append(word_sum(memoryview(data)))
                if isinstance(target, FakeBlocks):
                    target.write(targets[index], data)
            block_sums.extend(sums)
            return digest_of(sums)

        block_sums: list[int] = []
        uses = [] if target is None else [Use(_address(target), number, True) for number in targets]
        uses += [Use(_address(source), number, False) for number in sources]
        copying = self._queue(work, wake, len(sources) * source.block_bytes, behind, uses, after, stream)
        copying.block_sums = block_sums
        return copying

    def gather(
        self, source: Blocks, sources: Sequence[int], target: Blocks, targets: Sequence[int], after: Any
    ) -> FakeCopying:
        return self.copy(source, sources, target, targets, lambda: None, after, stream=self._gathering)

    def pinned(self, num_bytes: int) -> PlainBytes:
        return PlainBytes(num_bytes)

    def unpin(self) -> None:
        self.num_unpinned += 1

    def move(
        self,
        staging: Blocks,
        host: Any,
        num_bytes: int,
        wake: Wake,
        *,
        is_to_host: bool,
        behind: Copying | None = None,
    ) -> FakeCopying:
        assert isinstance(staging, FakeBlocks)

        def work() -> bytes:
            move_bytes(staging, host, num_bytes, is_to_host=is_to_host)
            return b""

        return self._queue(work, wake, num_bytes, behind)

    def move_blocks(
        self,
        blocks: Blocks,
        numbers: Sequence[int],
        host: Any,
        slots: Sequence[int],
        wake: Wake,
        *,
        is_to_host: bool,
        after: Any | None = None,
        behind: Copying | None = None,
    ) -> FakeCopying:
        assert isinstance(blocks, FakeBlocks)
        assert isinstance(host, PlainBytes), "pinned memory of this device"
        assert len(numbers) == len(slots)
        size = blocks.block_bytes
        assert all(0 <= slot < len(host.view) // size for slot in slots)
        self.num_moved += len(slots)

        def work() -> bytes:
            wait_for(after)
            for number, slot in zip(numbers, slots, strict=True):
                there, here = blocks.view(number), host.view[slot * size : (slot + 1) * size]
                if is_to_host:
                    here[:] = there
                else:
                    there[:] = here
            return b""

        uses = [Use(_address(blocks), number, not is_to_host, True) for number in numbers]
        uses += [Use(_address(host.view), slot, is_to_host, True) for slot in slots]
        return self._queue(work, wake, len(slots) * size, behind, uses, after)

    def drain(self) -> None:
        for stream in (*self.streams, self._gathering):
            stream.drain()

    def end(self) -> None:
        for stream in (*self.streams, self._gathering):
            stream.end()

    def stream_for(self, num_bytes: int, behind: Copying | None) -> int:
        """Separate, so that a test can remove the ordering."""
        if behind is None:
            return self.loads.begin(num_bytes)
        assert isinstance(behind, FakeCopying)
        return self.loads.begin(num_bytes, behind.stream)

    def _check(self, uses: Sequence[Use], stream: int | None, after: Sequence[Any]) -> None:
        """Raises InternalError if work in progress on another stream has one of these uses, and one of both writes.
        Only if one is of `move_blocks`: transports also read blocks that others may be writing, and notice it."""
        for number, (other_stream, others) in list(self._uses.items()):
            copying = self._copyings.get(number)
            has_ended = copying is not None and (copying.state[0] or copying.state[1])
            if other_stream != stream and copying not in after and not has_ended:
                for one in uses:
                    for other in others:
                        is_same = (one.memory, one.number) == (other.memory, other.number)
                        if is_same and (one.writes or other.writes) and (one.is_strict or other.is_strict):
                            raise InternalError(f"{one} and {other} are not ordered")

    def _queue(
        self,
        work: Callable[[], bytes],
        wake: Wake,
        num_bytes: int,
        behind: Copying | None,
        uses: Sequence[Use] = (),
        after: Sequence[Any] | None = None,
        stream: Stream | None = None,
    ) -> FakeCopying:
        """On `stream`, which is none of the copy streams, or on the one with the fewest bytes."""
        index = None if stream is not None else self.stream_for(num_bytes, behind)
        gathering = behind if isinstance(behind, FakeCopying) and behind.stream is None else None
        self._check(uses, index, (*(after or ()), gathering))
        with self._lock:
            self._num_queued += 1
            number = self._num_queued
            self._under_way.add(number)

        def ended() -> None:
            with self._lock:
                self._under_way.remove(number)
                self.num_overtakings += min(self._under_way, default=number) < number
            if index is not None:
                self.loads.end(index, num_bytes)
            self._uses.pop(number, None)
            self._copyings.pop(number, None)
            wake()

        self._uses[number] = index, uses

        def ordered() -> bytes:
            wait_for(() if gathering is None else (gathering,))
            return work()

        on = stream if stream is not None else self.streams[index or 0]
        copying = on.queue(ordered, ended, number=index)
        if number in self._uses:
            self._copyings[number] = copying
        return copying


def wait_for(fence: Sequence[Any] | None) -> None:
    """Waits for steps of the engine and for copies."""
    ends_s = time.monotonic() + DRAIN_S
    for one in fence or ():
        if isinstance(one, threading.Event):
            one.wait(DRAIN_S)
        else:
            while not (one.state[0] or one.state[1]) and time.monotonic() < ends_s:
                time.sleep(0.0001)


@dataclass(frozen=True, slots=True)
class Use:
    """Of one block of memory."""

    memory: int  # its address
    number: int
    writes: bool
    is_strict: bool = False


def _address(memory: Any) -> int:
    whole = memory.memory if isinstance(memory, FakeBlocks) else memory
    return int(np.frombuffer(whole, np.uint8).ctypes.data)

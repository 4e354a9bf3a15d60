"""Stand-ins for CUDA and NCCL in plain memory: work is done by a thread, later, in the order of each stream.

What they keep of the real ones: calls return before the bytes have moved; a receive waits for its sender for ever
unless its lane is closed; the two ends must ask in the same order; a lane that is closed touches nothing any more.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.transfer_ends import HostPool
from kvtransfer.device import Blocks, Wake
from pdserve.core.errors import InternalError, TransferFailed

JOIN_S = 5.0
_exported: dict[bytes, Any] = {}
_numbers = itertools.count()


class DevicePool(HostPool):
    """An engine's pool on a device: whoever asks for its bytes on the host has taken a wrong path."""

    is_on_host = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_device = self.memory
        del self.buffer
        self.descriptor = None

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise InternalError("the KV pool lies on a device: it has no host buffer")
        raise AttributeError(name)


class FakeBlocks:
    def __init__(self, memory: Any, num_blocks: int, block_bytes: int) -> None:
        self.memory, self.num_blocks, self.block_bytes = memory, num_blocks, block_bytes

    def view(self, block: int, count: int = 1) -> memoryview:
        assert 0 <= block <= self.num_blocks - count
        assert self.memory is not None, "closed"
        return memoryview(self.memory)[block * self.block_bytes : (block + count) * self.block_bytes]

    def close(self) -> None:
        self.memory = None


class FakeCopying:
    def __init__(self) -> None:
        self.state: tuple[bool, str, bytes] = (False, "", b"")

    @property
    def is_done(self) -> bool:
        is_done, error, _ = self.state
        if error:
            raise TransferFailed(error)
        return is_done

    def digest(self) -> bytes:
        assert self.state[0]
        return self.state[2]


class Stream:
    """One thread that works through what it is given."""

    def __init__(self, name: str, delay_s: float) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._delay_s, self._rng = delay_s, random.Random(1)
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], bytes], wake: Wake) -> FakeCopying:
        copying = FakeCopying()

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
        if not done.wait(JOIN_S):
            raise TransferFailed("the device does not drain")

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._rng.random() * self._delay_s)
            work()


class FakeDevice:
    name = "fake"

    def __init__(self, pool: DevicePool, delay_s: float = 0.0005) -> None:
        self._pool, self._stream = pool, Stream("device", delay_s)
        self.num_copies = 0

    def pool(self) -> FakeBlocks:
        return FakeBlocks(self._pool.on_device, self._pool.num_blocks, self._pool.block_bytes)

    def staging(self, num_blocks: int) -> FakeBlocks:
        block_bytes = self._pool.block_bytes
        return FakeBlocks(bytearray(num_blocks * block_bytes), num_blocks, block_bytes)

    def export(self) -> bytes:
        name = b"pool-%d" % next(_numbers)
        _exported[name] = self._pool
        return name

    def open(self, exported: bytes) -> FakeBlocks:
        if exported not in _exported:
            raise TransferFailed("the sender's pool cannot be opened")
        pool = _exported[exported]
        return FakeBlocks(pool.on_device, pool.num_blocks, pool.block_bytes)

    def copy(
        self, source: Blocks, sources: Sequence[int], target: Blocks | None, targets: Sequence[int], wake: Wake
    ) -> FakeCopying:
        assert isinstance(source, FakeBlocks)
        self.num_copies += 1

        def work() -> bytes:
            digest = hashlib.blake2b(digest_size=8)
            for index, block in enumerate(sources):
                data = bytes(source.view(block))
                digest.update(data)
                if isinstance(target, FakeBlocks):
                    target.view(targets[index])[:] = data
            return digest.digest()

        return self._stream.queue(work, wake)

    def drain(self) -> None:
        self._stream.drain()

    def end(self) -> None:
        self._stream.end()


class FakeLane:
    def __init__(self, out: queue.SimpleQueue[bytes], into: queue.SimpleQueue[bytes], delay_s: float) -> None:
        self._out, self._into = out, into
        self._stream = Stream("lane", delay_s)
        self._is_closed = False

    def send(self, source: Blocks, block: int, num_bytes: int, wake: Wake) -> FakeCopying:
        assert isinstance(source, FakeBlocks)
        count = -(-num_bytes // source.block_bytes)

        def work() -> bytes:
            self._check()
            self._out.put(bytes(source.view(block, count)[:num_bytes]))
            return b""

        return self._stream.queue(work, wake)

    def receive(self, target: Blocks, block: int, num_bytes: int, wake: Wake) -> FakeCopying:
        assert isinstance(target, FakeBlocks)
        count = -(-num_bytes // target.block_bytes)

        def work() -> bytes:
            while True:
                self._check()
                try:
                    data = self._into.get(timeout=0.01)
                except queue.Empty:
                    continue
                assert len(data) == num_bytes, "the ends did not ask in the same order"
                target.view(block, count)[:num_bytes] = data
                return b""

        return self._stream.queue(work, wake)

    def close(self) -> None:
        self._is_closed = True
        self._stream.end()

    def _check(self) -> None:
        if self._is_closed:
            raise TransferFailed("the lane is closed")


class FakeLanes:
    def __init__(self, version: str = "2.30", delay_s: float = 0.0005) -> None:
        self.version, self._delay_s = version, delay_s
        self._meeting: dict[bytes, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def new_id(self) -> bytes:
        return b"lane-%d" % next(_numbers)

    def join(self, device: Any, lane_id: bytes, rank: int) -> FakeLane:
        with self._lock:
            ends = self._meeting.setdefault(lane_id, (queue.SimpleQueue(), queue.SimpleQueue()))
        return FakeLane(ends[rank], ends[1 - rank], self._delay_s)

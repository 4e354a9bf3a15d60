"""A CUDA device for the device transports: block copies on separate streams, and pools shared between processes.

Needs torch, Triton and the CUDA driver. The pool must be one allocation, because a driver handle names an allocation. A
copy waits for the fence that it is given, and for no other work of the engine. The engine reads a received block only
after the host has seen the copy end.

Staging is not allocated by torch. torch's allocator may return memory that a queued kernel of the engine's stream still
uses. This is safe only for later work on that stream, and staging is used on other streams. Memory that is allocated
inside `copy` belongs to the copy stream, and is used only there.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, final

import torch

from kvtransfer.devices.copy_limits import CopyLimits, StagingBudget, StreamLoads
from kvtransfer.devices.cuda_driver import driver, tensor_at
from kvtransfer.protocol.device import COPY_S, Blocks, Copying, Pinned, Wake
from pdserve.core.errors import TransferFailed
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool

# --- memory ---------------------------------------------------------------------------------------------------
# Blocks of device memory, pinned host memory, and the copy of blocks with their checksums.


@final
class CudaBlocks:
    """`raw` is uint8 [blocks, block_bytes] on the device, or [blocks, runs, bytes of a run]. Other bytes may be between
    two blocks or runs."""

    def __init__(self, raw: torch.Tensor, on_close: Callable[[], None] = lambda: None) -> None:
        self.raw: torch.Tensor | None = raw
        self.num_blocks, self.block_bytes = int(raw.shape[0]), math.prod(raw.shape[1:])
        self._on_close = on_close

    @property
    def tensor(self) -> torch.Tensor:
        assert self.raw is not None, "closed"
        return self.raw

    def narrowed(self, extent: StridedExtent) -> CudaBlocks:
        if extent.num_runs == 1:
            return CudaBlocks(self.tensor[:, extent.first : extent.first + extent.run_bytes])
        raw = self.tensor
        shape, strides = (len(raw), extent.num_runs, extent.run_bytes), (raw.stride(0), extent.stride_bytes, 1)
        return CudaBlocks(raw.as_strided(shape, strides, raw.storage_offset() + extent.first))

    def cut(self, first: int, count: int, num_bytes: int) -> CudaBlocks:
        flat = self.tensor[first : first + count].view(-1)
        num_blocks = flat.shape[0] // num_bytes
        return CudaBlocks(flat[: num_blocks * num_bytes].view(num_blocks, num_bytes))

    def close(self) -> None:
        if self.raw is not None:
            self.raw = None
            self._on_close()


@final
class PinnedBytes:
    def __init__(self, num_bytes: int) -> None:
        try:
            self.tensor: torch.Tensor | None = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise TransferFailed(f"the host cannot pin {num_bytes} bytes: {error}") from error
        self.view = memoryview(self.tensor.numpy().data)

    def close(self) -> None:
        """torch reuses the memory only when the queued copies have ended."""
        self.tensor, self.view = None, memoryview(b"")


def moved(
    source: torch.Tensor, source_B: torch.Tensor, target: torch.Tensor | None, target_B: torch.Tensor, relay: Any
) -> torch.Tensor:
    """Copies the source blocks to the target blocks and returns their checksums.

    `relay` does both in one pass if a block is one run of bytes on both sides. Otherwise torch packs the runs first, or
    unpacks them last, in another pass over the bytes.
    """
    if source.dim() == 3:
        packed = source.view(torch.int32).index_select(0, source_B).view(torch.uint8).flatten(1)
        source, source_B = packed, torch.arange(len(packed), dtype=torch.int32, device=packed.device)
    if target is None or target.dim() == 2:
        sums: torch.Tensor = relay(source, source_B, target, None if target is None else target_B)
        return sums
    sums = relay(source, source_B, None, None)
    blocks = source.index_select(0, source_B).view(-1, *target.shape[1:])
    target.view(torch.int32).index_copy_(0, target_B.long(), blocks.view(torch.int32))
    return sums


def neighbours(numbers: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first number, first slot, count) of each run in which both grow by one."""
    first = 0
    for at in range(1, len(numbers) + 1):
        before = at - 1
        if at == len(numbers) or (numbers[at], slots[at]) != (numbers[before] + 1, slots[before] + 1):
            yield numbers[first], slots[first], at - first
            first = at


# --- copies in progress ---------------------------------------------------------------------------------------
# They are watched by a thread that wakes their waiters.

log = logging.getLogger(__name__)

_SHORTEST_POLL_S: Final = 50e-6
_LONGEST_POLL_S: Final = 1e-3
_POLL_SHARE: Final = 0.1  # of the time for which the newest copy has waited


@final
class CudaCopying:
    def __init__(self, event: Any, sums: Any | None, limit_s: float, stream: int | None = None) -> None:
        """`stream`: the number of the device's copy stream that it is queued on; None: another stream."""
        self._event, self._sums, self.stream = event, sums, stream
        self.began_s = time.monotonic()
        self._limit_s, self._ends_s = limit_s, self.began_s + limit_s

    @property
    def is_done(self) -> bool:
        try:
            if self._event.query():
                return True
        except RuntimeError as error:
            raise TransferFailed(f"the device failed: {error}") from error
        if time.monotonic() > self._ends_s:
            raise TransferFailed(f"work on the device has not ended in {self._limit_s:.0f} s")
        return False

    def digest(self) -> bytes:
        assert self._sums is not None
        return hashlib.blake2b(self._sums.numpy().tobytes(), digest_size=8).digest()

    def sums(self) -> Sequence[int]:
        assert self._sums is not None
        found: list[int] = self._sums.numpy().view("uint64").tolist()
        return found

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        """Work that is queued on the stream from now on runs after the copy."""
        stream.wait_event(self._event)


def poll_s(waited_s: float) -> float:
    """The time until the events are polled again, if the newest one has waited for `waited_s`.

    Each poll takes the GIL from the engine's thread. A wait takes some 20 polls in its first 0.5 ms, 30 more up to 10
    ms, and 1,000 per second after that. Its end is detected late by at most a tenth of its length.
    """
    return min(max(_POLL_SHARE * waited_s, _SHORTEST_POLL_S), _LONGEST_POLL_S)


@final
class Watcher:
    """A thread that wakes the waiters of copies when these end. It sleeps while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[CudaCopying, Wake]] = []
        threading.Thread(target=self._run, name="cuda-watch", daemon=True).start()

    def add(self, copying: CudaCopying, wake: Wake) -> None:
        with self._changed:
            self._waiting.append((copying, wake))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                waiting = list(self._waiting)
            ended = [one for one in waiting if _has_ended(one[0])]
            with self._changed:
                self._waiting = [one for one in self._waiting if one not in ended]
            for _, wake in ended:
                wake()
            if not ended:
                self._pause(waiting)

    def _pause(self, waiting: Sequence[tuple[CudaCopying, Wake]]) -> None:
        """Waits until the next poll, or until another copy is added."""
        newest_s = max(one.began_s for one, _ in waiting)
        with self._changed:
            if len(self._waiting) == len(waiting):
                self._changed.wait(poll_s(time.monotonic() - newest_s))


def _has_ended(copying: CudaCopying) -> bool:
    try:
        return copying.is_done
    except TransferFailed:  # the woken waiter polls again, and gets the error
        return True


def has_passed(event: Any, limit_s: float) -> bool:
    """Waits until the event has passed. False: timed out."""
    ends_s = time.monotonic() + limit_s
    while True:
        try:
            if event.query():
                return True
        except RuntimeError as error:  # a failed device runs no more work
            log.error("the device failed", extra={"error": str(error)})
            return True
        if time.monotonic() > ends_s:
            return False
        time.sleep(_LONGEST_POLL_S)


# --- device ---------------------------------------------------------------------------------------------------

_WORDS: Final = 4  # int32 numbers in 16 bytes
_EXPORT: Final = struct.Struct("<QQQ16s")  # offset in the allocation, blocks, bytes per block, the device's UUID


def why_no_cuda(*packages: str) -> str:
    """Why CUDA cannot be used on this system; empty if it can."""
    for package in ("torch", "triton", *packages):
        if find_spec(package) is None:
            return f"the package {package} is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


@final
class CudaDevice:
    """One engine's pool and the streams for its transfers. Any thread may call it."""

    def __init__(self, raw: torch.Tensor, limits: CopyLimits | None = None) -> None:
        limits = limits or CopyLimits()
        self.device = raw.device
        self.name = str(torch.cuda.get_device_properties(raw.device).uuid)
        self.streams = [torch.cuda.Stream(raw.device) for _ in range(limits.num_streams)]
        self._gathering = torch.cuda.Stream(raw.device)  # on which no copy is queued that the engine need not wait for
        self.loads = StreamLoads(limits.num_streams)
        self.budget = StagingBudget(limits.staging_bytes)
        self.watcher = Watcher()
        self._pool = CudaBlocks(raw)
        self._index = raw.device.index or 0
        self._lock = threading.Lock()  # guards the spare memory
        self._spare: dict[int, list[int]] = {}  # addresses of staging that was closed, by size

    def pool(self) -> CudaBlocks:
        return CudaBlocks(self._pool.tensor)

    def staging(self, num_blocks: int) -> CudaBlocks:
        """Staging, which the caller closes when no work on the device uses it. Its memory is then reused. It is never
        returned to the driver, because cuMemFree waits for all work of the device. Raises TransferFailed if the device
        has no memory left.
        """
        block_bytes = self._pool.block_bytes
        size = num_blocks * block_bytes
        with self._lock:
            spare = self._spare.setdefault(size, [])
            pointer = spare.pop() if spare else None
        if pointer is None:
            with driver().current(self._index):
                pointer = driver().allocate(size)
        raw = tensor_at(pointer, self.device, num_blocks, block_bytes)
        return CudaBlocks(raw, partial(self._put_back, size, pointer))

    def export(self) -> bytes:
        raw = self._pool.tensor
        uuid = hashlib.blake2b(self.name.encode(), digest_size=16).digest()
        with driver().current(self._index):
            base = driver().base_of(raw.data_ptr())
            return _EXPORT.pack(raw.data_ptr() - base, raw.shape[0], raw.shape[1], uuid) + driver().export(base)

    def open(self, exported: bytes) -> CudaBlocks:
        try:
            offset, num_blocks, block_bytes, _ = _EXPORT.unpack(exported[: _EXPORT.size])
        except struct.error as error:
            raise TransferFailed(f"{len(exported)} bytes do not describe a pool on a device") from error
        with driver().current(self._index):
            base = driver().open(exported[_EXPORT.size :])
        return CudaBlocks(tensor_at(base + offset, self.device, num_blocks, block_bytes), partial(self._close, base))

    def fence(self) -> torch.cuda.Event:
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(torch.cuda.default_stream(self.device))  # the engine's stream
            return event

    def copy(
        self,
        source: Blocks,
        sources: Sequence[int],
        target: Blocks | None,
        targets: Sequence[int],
        wake: Wake,
        after: torch.cuda.Event | None,
        behind: Copying | None = None,
    ) -> CudaCopying:
        assert isinstance(source, CudaBlocks)
        with self._queued(len(sources) * source.block_bytes, behind) as (index, num_bytes):
            if after is not None:
                self.streams[index].wait_event(after)
            sums = self._relayed(source, sources, target, targets)
            return self._watched(index, num_bytes, sums, wake)

    def gather(
        self,
        source: Blocks,
        sources: Sequence[int],
        target: Blocks,
        targets: Sequence[int],
        after: torch.cuda.Event,
    ) -> CudaCopying:
        assert isinstance(source, CudaBlocks)
        with torch.cuda.device(self.device), torch.cuda.stream(self._gathering):
            self._gathering.wait_event(after)
            sums = self._relayed(source, sources, target, targets)
            return CudaCopying(self._recorded(self._gathering), sums, COPY_S)

    def _relayed(
        self, source: CudaBlocks, sources: Sequence[int], target: Blocks | None, targets: Sequence[int]
    ) -> torch.Tensor:
        """Queues a copy on the current stream. The checksums are on the host when it has ended."""
        from pdserve.engine.gpu.kernels.kv import relay

        # Both rows begin at multiples of 16 bytes; otherwise Triton would compile another kernel.
        count, padding = len(sources), [0] * (-len(sources) % _WORDS)
        rows = [[*sources, *padding], [*(targets or sources), *padding]]
        numbers = torch.tensor(rows, dtype=torch.int32).pin_memory()
        on_device = numbers.to(self.device, non_blocking=True)[:, :count]
        into = target.tensor if isinstance(target, CudaBlocks) else None
        sums_B = moved(source.tensor, on_device[0], into, on_device[1], relay)
        host_B = torch.empty(len(sources), dtype=torch.int64, pin_memory=True)
        host_B.copy_(sums_B, non_blocking=True)
        return host_B

    def pinned(self, num_bytes: int) -> PinnedBytes:
        return PinnedBytes(num_bytes)

    def unpin(self) -> None:
        if hasattr(torch.accelerator, "empty_host_cache"):  # not in every torch that pdserve accepts
            try:
                torch.accelerator.empty_host_cache()
            except RuntimeError as error:  # the device has failed; what else is open must be closed
                log.warning("pinned memory was not freed", extra={"error": str(error)})

    def move(
        self,
        staging: Blocks,
        host: Pinned,
        num_bytes: int,
        wake: Wake,
        *,
        is_to_host: bool,
        behind: Copying | None = None,
    ) -> CudaCopying:
        assert isinstance(staging, CudaBlocks)
        assert isinstance(host, PinnedBytes)
        assert host.tensor is not None, "closed"
        there, here = staging.tensor.view(-1)[:num_bytes], host.tensor[:num_bytes]
        with self._queued(num_bytes, behind) as (index, _):
            if is_to_host:
                here.copy_(there, non_blocking=True)
            else:
                there.copy_(here, non_blocking=True)
            return self._watched(index, num_bytes, None, wake)

    def move_blocks(
        self,
        blocks: Blocks,
        numbers: Sequence[int],
        host: Pinned,
        slots: Sequence[int],
        wake: Wake,
        *,
        is_to_host: bool,
        after: torch.cuda.Event | None = None,
        behind: Copying | None = None,
    ) -> CudaCopying:
        """One copy for each run of neighbours, by the copy engines, which leave the processors to the engine."""
        assert isinstance(blocks, CudaBlocks)
        assert isinstance(host, PinnedBytes)
        assert host.tensor is not None, "closed"
        there, size = blocks.tensor, blocks.block_bytes
        here = host.tensor[: len(host.tensor) // size * size].view(-1, size)
        with self._queued(len(numbers) * size, behind) as (index, num_bytes):
            if after is not None:
                self.streams[index].wait_event(after)
            for number, slot, count in neighbours(numbers, slots):
                if is_to_host:
                    here[slot : slot + count].copy_(there[number : number + count], non_blocking=True)
                else:
                    there[number : number + count].copy_(here[slot : slot + count], non_blocking=True)
            return self._watched(index, num_bytes, None, wake)

    def hold_engine(self, copying: Copying) -> None:
        assert isinstance(copying, CudaCopying)
        with torch.cuda.device(self.device):
            copying.let_wait(torch.cuda.default_stream(self.device))  # on which fences are, also of received blocks
            copying.let_wait(torch.cuda.current_stream(self.device))  # vLLM computes on one of its own

    def watched(self, wake: Wake, stream: Any, limit_s: float) -> CudaCopying:
        """Watches the work queued so far on a stream that is not one of the device's copy streams."""
        event = torch.cuda.Event()
        event.record(stream)
        copying = CudaCopying(event, None, limit_s)
        self.watcher.add(copying, wake)
        return copying

    def has_drained(self, stream: Any, limit_s: float) -> bool:
        """Waits until all work queued on the stream has ended. False: the time is up."""
        return has_passed(self._recorded(stream), limit_s)

    def drain(self) -> None:
        events, began_s = [self._recorded(stream) for stream in (*self.streams, self._gathering)], time.monotonic()
        for event in events:
            while not has_passed(event, COPY_S):
                log.error("the device does not drain", extra={"since_s": round(time.monotonic() - began_s)})

    @contextmanager
    def _queued(self, num_bytes: int, behind: Copying | None) -> Iterator[tuple[int, int]]:
        """Chooses a stream for `num_bytes` and makes it current. Yields its number, and the bytes."""
        index = self.loads.begin(num_bytes, None if behind is None else _stream_of(behind))
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.streams[index]):
                if isinstance(behind, CudaCopying) and behind.stream is None:
                    behind.let_wait(self.streams[index])
                yield index, num_bytes
        except BaseException:
            self.loads.end(index, num_bytes)
            raise

    def _watched(self, index: int, num_bytes: int, sums: Any | None, wake: Wake) -> CudaCopying:
        event = torch.cuda.Event()
        event.record(self.streams[index])
        copying = CudaCopying(event, sums, COPY_S, index)

        def ended() -> None:
            self.loads.end(index, num_bytes)
            wake()

        self.watcher.add(copying, ended)
        return copying

    def _recorded(self, stream: Any) -> torch.cuda.Event:
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(stream)
            return event

    def _close(self, base: int) -> None:
        """Closes another process's pool, which this process must no longer read."""
        try:
            with driver().current(self._index):
                driver().close(base)
        except TransferFailed as failed:  # the connection has ended in any case
            log.warning("another process's pool stays open", extra={"error": failed.message})

    def _put_back(self, size: int, pointer: int) -> None:
        with self._lock:
            self._spare[size].append(pointer)


def _stream_of(copying: Copying) -> int | None:
    assert isinstance(copying, CudaCopying)
    return copying.stream


_devices: dict[int, CudaDevice] = {}


_lock = threading.Lock()


def device_of(pool: KvPool, limits: CopyLimits | None = None) -> CudaDevice:
    """The device object of a pool, whose connections share its streams. The first call sets the limits."""
    raw: Any = getattr(pool, "raw", None)
    if raw is None or raw.device.type != "cuda":
        raise TransferFailed("the KV pool is not on a CUDA device")
    with _lock:
        if raw.data_ptr() not in _devices:
            _devices[raw.data_ptr()] = CudaDevice(raw, limits)
        return _devices[raw.data_ptr()]

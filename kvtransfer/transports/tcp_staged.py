"""tcp_staged: tcp for pools on GPUs. The sender gathers blocks into pinned memory; the receiver scatters them from it.

    sender                                              receiver
    gather blocks into slot k, on the device
    slot k to pinned memory, then CHUNK and its bytes -->  into a slot of pinned memory
    the slot is free once the socket has taken it          to the device, then scattered under the claim: settle

The two steps of a slot use one stream, and the slots use several streams, so that one slot is gathered while another is
copied to the host. Either pool may be in host memory, where a slot is filled and emptied immediately, so every pair can
use this transport. The devices compute checksums while they gather and scatter. Their comparison detects every error in
between, also in the driver's copies.
"""

from __future__ import annotations

import hashlib
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from kvtransfer.devices.copy_limits import DEFAULT_STAGING_BYTES, StagingBudget
from kvtransfer.protocol.device import Blocks, Copying, Device, Wake
from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.plan import host_view, spans_of
from kvtransfer.protocol.transfers import Claim, Job
from kvtransfer.transports.common.interface import ReceiveHalf, ReceiveLink, SendHalf, SendLink
from kvtransfer.transports.common.on_device import (
    DeviceOf,
    OnDevice,
    StagingSlots,
    announce_packed,
    extents_of_part,
    slot_size,
    wake_nobody,
)
from kvtransfer.transports.tcp import WAKE_BYTES, TcpListener, discard
from pdserve.core.errors import InternalError, TransferFailed
from pdserve.engine.gpu.kernels.extent import GOLDEN, MIX, WORD_BYTES, StridedExtent
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

# --- host device ----------------------------------------------------------------------------------------------
# A pool in host memory as a Device, for a pair whose other pool is on a GPU. All work is done immediately.
#
# Both sides of such a pair compare the checksum that pdserve.engine.gpu.kernels.extent defines. Here numpy computes it.

_AT_ONCE: Final = 1 << 16  # words at a time, so that intermediate values fit into the processor's cache
_OFFSETS: Final = np.arange(1, _AT_ONCE + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def zeroed(num_bytes: int) -> memoryview:
    """New memory. The kernel zeroes a page when it is first used; `bytearray` would zero all of it at once and hold the
    GIL meanwhile, so a connection's staging would stop every thread for tens of milliseconds."""
    return np.zeros(num_bytes, dtype=np.uint8).data


def word_sum(data: memoryview) -> int:
    """The checksum of engine/gpu/kernels/extent.py. The data is a multiple of 4 bytes long."""
    if len(data) % WORD_BYTES:
        raise InternalError(f"{len(data)} bytes, expected a multiple of {WORD_BYTES}")
    word_N = np.frombuffer(data, dtype=np.uint32)
    total, mix, half = 0, np.uint64(MIX), np.uint64(32)
    for first in range(0, len(word_N), _AT_ONCE):
        mixed_N = word_N[first : first + _AT_ONCE].astype(np.uint64)
        mixed_N += _OFFSETS[: len(mixed_N)]
        mixed_N += np.uint64(first * GOLDEN % 2**64)
        mixed_N *= mix
        mixed_N ^= mixed_N >> half
        total += int(mixed_N.sum(dtype=np.uint64))
    return total % 2**64


def digest_of(sums: Sequence[int]) -> bytes:
    """The checksum (8 bytes) of the blocks' checksums, in order, as sent in a chunk's frame."""
    return hashlib.blake2b(np.array(sums, dtype=np.uint64).tobytes(), digest_size=8).digest()


class HostBlocks:
    """Blocks in `memory`, `stride` bytes apart; there may be other bytes between them, and between a block's spans."""

    def __init__(
        self,
        memory: Any,
        num_blocks: int,
        block_bytes: int,
        first: int = 0,
        stride: int = 0,
        runs_per_block: int = 1,
    ) -> None:
        """`runs_per_block` > 1: a whole pool of such blocks, of which only parts are copied."""
        self.memory, self.num_blocks, self.block_bytes = memory, num_blocks, block_bytes
        self._run_bytes = block_bytes // runs_per_block
        self._first, self._stride = first, stride or self._run_bytes
        self._spans: tuple[tuple[int, int], ...] = ()  # of a block that is not contiguous

    def view(self, block: int, count: int = 1) -> memoryview:
        assert 0 <= block <= self.num_blocks - count
        assert self.memory is not None, "closed"
        assert not self._spans, "not one run of bytes"
        assert self._run_bytes == self.block_bytes, "not one run of bytes"
        assert count == 1 or self._stride == self.block_bytes, "not one run of bytes"
        begin = self._first + block * self._stride
        return memoryview(self.memory)[begin : begin + count * self.block_bytes]

    def read(self, block: int) -> bytearray:
        return bytearray(b"".join(self._views(block)))

    def write(self, block: int, data: bytes | bytearray) -> None:
        at = 0
        for view in self._views(block):
            view[:] = data[at : at + len(view)]
            at += len(view)

    def narrowed(self, extent: StridedExtent) -> HostBlocks:
        assert not self._spans, "a part of a part"
        last = extent.first + (extent.num_runs - 1) * extent.stride_bytes
        assert last + extent.run_bytes <= self.block_bytes
        if extent.num_runs == 1 and self._run_bytes == self.block_bytes:
            return self._part(self.num_blocks, extent.num_bytes, self._first + extent.first, self._stride)
        part = self._part(self.num_blocks, extent.num_bytes, self._first, self._stride)
        starts = range(extent.first, last + 1, extent.stride_bytes or 1)
        part._spans = spans_of(tuple((at, extent.run_bytes) for at in starts), self._run_bytes, self.num_blocks)
        return part

    def cut(self, first: int, count: int, num_bytes: int) -> HostBlocks:
        assert self._stride == self.block_bytes
        assert first + count <= self.num_blocks
        num_blocks = count * self.block_bytes // num_bytes
        return self._part(num_blocks, num_bytes, self._first + first * self.block_bytes, num_bytes)

    def close(self) -> None:
        self.memory = None

    def _views(self, block: int) -> list[memoryview]:
        if not self._spans:
            return [self.view(block)]
        assert 0 <= block < self.num_blocks
        assert self.memory is not None, "closed"
        begin, memory = self._first + block * self._stride, memoryview(self.memory)
        return [memory[begin + at : begin + at + size] for at, size in self._spans]

    def _part(self, num_blocks: int, block_bytes: int, first: int, stride: int) -> HostBlocks:
        return HostBlocks(self.memory, num_blocks, block_bytes, first, stride)


@final
class PlainBytes:
    """Host memory, which needs no pinning."""

    def __init__(self, num_bytes: int) -> None:
        self.view = zeroed(num_bytes)

    def close(self) -> None:
        self.view = memoryview(b"")


@final
class Done:
    """A copy that is done."""

    is_done = True

    def __init__(self, sums: Sequence[int] = ()) -> None:
        self._sums = sums

    def digest(self) -> bytes:
        return digest_of(self._sums) if self._sums else b""

    def sums(self) -> Sequence[int]:
        return self._sums


@final
class HostDevice:
    name = "host"

    def __init__(self, memory: memoryview, block_bytes: int, budget: StagingBudget, runs_per_block: int = 1) -> None:
        self._memory, self._block_bytes, self.budget = memory, block_bytes, budget
        self._runs_per_block = runs_per_block

    def pool(self) -> HostBlocks:
        num_blocks = len(self._memory) // self._block_bytes
        return HostBlocks(self._memory, num_blocks, self._block_bytes, runs_per_block=self._runs_per_block)

    def staging(self, num_blocks: int) -> HostBlocks:
        return HostBlocks(zeroed(num_blocks * self._block_bytes), num_blocks, self._block_bytes)

    def pinned(self, num_bytes: int) -> PlainBytes:
        return PlainBytes(num_bytes)

    def unpin(self) -> None:
        """It has been returned."""

    def export(self) -> bytes:
        raise InternalError("a pool in host memory is not opened by a device's driver")

    def open(self, exported: bytes) -> HostBlocks:
        raise InternalError("a pool in host memory is not opened by a device's driver")

    def fence(self) -> None:
        return None

    def copy(
        self,
        source: Blocks,
        sources: Sequence[int],
        target: Blocks | None,
        targets: Sequence[int],
        wake: Wake,
        after: Any,
        behind: Copying | None = None,
    ) -> Done:
        assert isinstance(source, HostBlocks)
        return self._done(copy_and_sum(source, sources, target, targets), wake)

    def gather(
        self, source: Blocks, sources: Sequence[int], target: Blocks, targets: Sequence[int], after: Any
    ) -> Done:
        return self.copy(source, sources, target, targets, lambda: None, after)

    def move(
        self,
        staging: Blocks,
        host: Any,
        num_bytes: int,
        wake: Wake,
        *,
        is_to_host: bool,
        behind: Copying | None = None,
    ) -> Done:
        assert isinstance(staging, HostBlocks)
        move_bytes(staging, host, num_bytes, is_to_host=is_to_host)
        return self._done((), wake)

    def move_blocks(self, *arguments: Any, **options: Any) -> Done:
        raise InternalError("a pool in host memory has no pinned copies")

    def hold_engine(self, copying: Copying) -> None:
        """Nothing is ever in progress."""

    def drain(self) -> None:
        """Nothing is ever in progress."""

    def _done(self, sums: Sequence[int], wake: Wake) -> Done:
        wake()
        return Done(sums)


def copy_and_sum(
    source: HostBlocks, sources: Sequence[int], target: Blocks | None, targets: Sequence[int]
) -> list[int]:
    """Device.copy in host memory; returns the checksums of the bytes read."""
    sums = []
    for index, block in enumerate(sources):
        data = source.read(block)
        if isinstance(target, HostBlocks):
            target.write(targets[index], data)
            data = target.read(targets[index])
        sums.append(word_sum(memoryview(data)))
    return sums


def move_bytes(staging: HostBlocks, host: Any, num_bytes: int, *, is_to_host: bool) -> None:
    """Device.move in host memory."""
    count = -(-num_bytes // staging.block_bytes)
    there, here = staging.view(0, count)[:num_bytes], host.view[:num_bytes]
    if is_to_host:
        here[:] = there
    else:
        there[:] = here


# --- transport ------------------------------------------------------------------------------------------------

TCP_STAGED: Final = transfer_pb2.TRANSPORT_KIND_TCP_STAGED
SLOT_BYTES: Final = 8 * 2**20  # a launch and a wake take as long as these bytes at 16 GB/s
_CHECK_S: Final = 0.1  # limit of a wait, because another event may have consumed the wake
MAX_SLOTS: Final = 8  # slots of a connection on each side: 55 GB/s of PCIe for a millisecond, from launch to wake


@final
class TcpStagedSend:
    def __init__(self, device: Device, block_bytes: int) -> None:
        self._device, self._pool, self._slots = device, device.pool(), _slots_of(device, block_bytes)
        self._free = deque(range(len(self._slots)))
        self._filling: dict[int, tuple[Job, Copying, Copying]] = {}  # by slot
        self._filled: deque[tuple[int, bytes, memoryview]] = deque()  # slot, head, bytes: waiting for the writer

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def chunk_bytes(self) -> int:
        return self._slots.num_bytes

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def post(self, job: Job) -> None:
        slots, link = self._slots, self._link
        slot, extent = self._free.popleft(), link.extent_of(job)
        num_bytes, dense = job.chunk.count * extent.num_bytes, slots.dense(slot, extent.num_bytes)
        source, targets = self._pool.narrowed(extent), range(job.chunk.count)
        gathering = self._device.copy(source, job.chunk.sources, dense, targets, wake_nobody, job.after)
        moving = self._device.move(
            slots[slot], slots.host(slot), num_bytes, link.wake, is_to_host=True, behind=gathering
        )
        self._filling[slot] = job, gathering, moving

    def abandon(self, job: Job) -> None:
        """Gathering is short, and gathered chunks no longer read source blocks."""

    def on_credit(self, frame: Frame) -> None:
        raise BadFrame("a CREDIT frame, which tcp_staged does not use")

    def poll(self) -> None:
        for slot, (job, gathering, moving) in list(self._filling.items()):
            if moving.is_done:
                del self._filling[slot]
                self._announce(slot, job, gathering.digest())
        if self._filled and not self._link.writer.is_streaming:
            slot, head, view = self._filled.popleft()
            self._link.writer.stream([memoryview(head), view], lambda: self._free.append(slot))

    def close(self) -> None:
        self._device.drain()
        self._slots.close()

    def _announce(self, slot: int, job: Job, digest: bytes) -> None:
        link, num_bytes = self._link, job.chunk.count * self._link.extent_of(job).num_bytes

        def say(head: bytes) -> None:
            self._filled.append((slot, head, self._slots.view(slot, num_bytes)))

        announce_packed(link, job, digest, self._free, slot, say, length=num_bytes)


@final
class TcpStagedReceive:
    def __init__(self, link: ReceiveLink, device: Device) -> None:
        self._link, self._device, self._pool = link, device, device.pool()
        self._slots = _slots_of(device, link.block_bytes)
        self._free = deque(range(len(self._slots)))
        self._scattering: dict[int, tuple[Frame, Claim, Copying]] = {}  # by slot

    def check(self, frame: Frame) -> None:
        extents_of_part(self._link, frame.part)
        size = self._link.size_of(frame)
        if frame.length != size or size > self._slots.num_bytes:
            raise BadFrame(f"a chunk of {frame.count} blocks with {frame.length} bytes, expected {size}")

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        if claim is None:
            discard(self._link.channel, frame.length)
            return
        link, slots, device = self._link, self._slots, self._device
        while not self._free:
            link.channel.waker.wait(_CHECK_S)  # it is set when a scatter ends
            self.poll()
        slot = self._free.popleft()
        link.channel.fill(slots.view(slot, frame.length), WAKE_BYTES)
        if not link.enter(claim):
            self._free.append(slot)
            return
        _, into = extents_of_part(link, frame.part)
        moving = device.move(slots[slot], slots.host(slot), frame.length, wake_nobody, is_to_host=False)
        dense, target = slots.dense(slot, into.num_bytes), self._pool.narrowed(into)
        wake, after = link.channel.waker.set, claim.transfer.after
        scattering = device.copy(dense, range(frame.count), target, claim.blocks, wake, after, behind=moving)
        self._scattering[slot] = frame, claim, scattering

    def poll(self) -> None:
        for slot, (frame, claim, scattering) in list(self._scattering.items()):
            if not scattering.is_done:
                continue
            del self._scattering[slot]
            digest = scattering.digest()
            self._link.leave(claim)
            self._free.append(slot)
            self._link.settle(claim, frame, digest)

    def close(self) -> None:
        """Waits for the last copy, because the transfer table frees memory once this connection reports its end."""
        self._device.drain()
        self._slots.close()


@final
class TcpStaged(OnDevice, TcpListener):
    kind: int = TCP_STAGED
    name = "tcp_staged"
    order = 60
    has_slots = False
    is_for_hosts = True  # if the peer's pool is on a device

    def __init__(self, device_of: DeviceOf | None = None) -> None:
        """`device_of` replaces CUDA in tests."""
        super().__init__(device_of)
        self._host_budget = StagingBudget(DEFAULT_STAGING_BYTES)

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        try:
            end = self._end(pool, host_view(pool).toreadonly(), pool.block_bytes)
            return sock, TcpStagedSend(end, pool.block_bytes)
        except TransferFailed as failed:  # another transport may work
            raise OSError(failed.message) from failed

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        return TcpStagedReceive(link, self._end(link.pool, link.memory, link.block_bytes))

    def _end(self, pool: KvPool, memory: memoryview, block_bytes: int) -> Device:
        if not pool.is_on_host:
            return self.device(pool)
        return HostDevice(memory, block_bytes, self._host_budget, pool.runs_per_block)


TRANSPORT: Final = TcpStaged()


def _slots_of(device: Device, block_bytes: int) -> StagingSlots:
    """The two sides may have different numbers of slots, because the socket decouples them."""
    share = device.budget.take(slot_size(block_bytes, SLOT_BYTES), MAX_SLOTS)
    return StagingSlots(device, block_bytes, share, is_pinned=True)

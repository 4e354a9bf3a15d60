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

import socket
from collections import deque
from typing import Final, final

from kvtransfer.devices.copy_streams import DEFAULT_STAGING_BYTES
from kvtransfer.devices.host_device import HostDevice
from kvtransfer.devices.staging_budget import StagingBudget
from kvtransfer.protocol.device import Copying, Device
from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.plan import host_view
from kvtransfer.protocol.receive_transfer import Claim
from kvtransfer.protocol.send_transfer import Job
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
from pdserve.core.errors import TransferFailed
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

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
        return HostDevice(memory, block_bytes, self._host_budget) if pool.is_on_host else self._device(pool)


TRANSPORT: Final = TcpStaged()


def _slots_of(device: Device, block_bytes: int) -> StagingSlots:
    """The two sides may have different numbers of slots, because the socket decouples them."""
    share = device.budget.take(slot_size(block_bytes, SLOT_BYTES), MAX_SLOTS)
    return StagingSlots(device, block_bytes, share, is_pinned=True)

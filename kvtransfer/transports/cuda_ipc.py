"""cuda_ipc: the receiver opens the sender's pool with a driver handle, and copies blocks out of it, once.

As with shm, only the receiver writes into its pool, so no write follows an abort. The sender computes checksums on the
device before it announces blocks; the receiver computes them while it copies. Both workers are on one host.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.protocol.device import Blocks, Copying, Device
from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.plan import DEVICE_CHUNK_BYTES
from kvtransfer.protocol.send_transfers import StaleSource
from kvtransfer.protocol.transfers import Claim, Job
from kvtransfer.transports.common.interface import ReceiveHalf, ReceiveLink, SendHalf, SendLink
from kvtransfer.transports.common.on_device import OnDevice, extents_of_part
from kvtransfer.transports.common.slots import (
    TAKEN,
    Slots,
    UnixListener,
    await_taken,
    check_numbers,
    give_back,
    read_numbers,
    receive_within,
)
from pdserve.core.errors import TransferFailed
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

if TYPE_CHECKING:
    import socket

CUDA_IPC: Final = transfer_pb2.TRANSPORT_KIND_CUDA_IPC
WINDOW: Final = 4  # chunks in flight, each on its own copy stream
HANDSHAKE_S: Final = 10.0
MAX_EXPORT_BYTES: Final = 4096
_HELLO: Final = struct.Struct("<4sIQI")  # magic, blocks, bytes per block, bytes of the export that follows
_MAGIC: Final = b"PDKC"


@final
class CudaIpcSend:
    def __init__(self, device: Device) -> None:
        self._device, self._pool = device, device.pool()
        self._slots = Slots(WINDOW)
        self._summing: dict[int, tuple[Job, Copying]] = {}  # by slot

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def chunk_bytes(self) -> int:
        return DEVICE_CHUNK_BYTES

    @property
    def is_free(self) -> bool:
        return self._slots.is_free

    def post(self, job: Job) -> None:
        slot = self._slots.take()
        source = self._pool.narrowed(self._link.extent_of(job))
        copying = self._device.copy(source, job.chunk.sources, None, (), self._link.wake, job.after)
        self._summing[slot] = job, copying

    def abandon(self, job: Job) -> None:
        """Checksums in progress are still completed."""
        self._slots.abandon(job, self._link)

    def on_credit(self, frame: Frame) -> None:
        self._slots.on_credit(frame, self._link)

    def poll(self) -> None:
        for slot, (job, copying) in list(self._summing.items()):
            if copying.is_done:
                del self._summing[slot]
                self._announce(slot, job, copying.digest())

    def close(self) -> None:
        self._device.drain()

    def _announce(self, slot: int, job: Job, digest: bytes) -> None:
        link = self._link
        if not job.transfer.session.is_open:
            self._slots.put_back(slot)
            link.finished(job)
            return
        try:
            self._slots.announce(slot, job, link, digest)
        except StaleSource as stale:
            link.stale(job, str(stale))


@final
class CudaIpcReceive:
    def __init__(self, link: ReceiveLink, device: Device, source: Blocks) -> None:
        self._link, self._device, self._source = link, device, source
        self._pool = device.pool()
        self._copying: dict[int, tuple[Frame, Claim, Copying]] = {}  # by number
        self._number = 0

    def check(self, frame: Frame) -> None:
        extents_of_part(self._link, frame.part)
        check_numbers(frame, WINDOW)

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        link = self._link
        sources = read_numbers(link, frame, self._source.num_blocks)
        if claim is None or not link.enter(claim):
            give_back(self._link, frame)
            return
        wake, after = link.channel.waker.set, claim.transfer.after
        out_of, into = extents_of_part(link, frame.part)
        source, target = self._source.narrowed(out_of), self._pool.narrowed(into)
        copying = self._device.copy(source, sources, target, claim.blocks, wake, after)
        self._number += 1
        self._copying[self._number] = frame, claim, copying

    def poll(self) -> None:
        for number, (frame, claim, copying) in list(self._copying.items()):
            if not copying.is_done:  # later copies may be done: each has its own stream
                continue
            del self._copying[number]
            digest = copying.digest()
            self._link.leave(claim)
            give_back(self._link, frame)
            self._link.settle(claim, frame, digest)

    def close(self) -> None:
        """Waits for the last copy, because the transfer table frees memory once this connection reports its end."""
        self._device.drain()
        self._source.close()


@final
class CudaIpc(OnDevice, UnixListener):
    kind: int = CUDA_IPC
    name = "cuda_ipc"
    order = 10
    has_slots = True

    def prepare(self, pool: KvPool, runs: Sequence[StridedExtent] = (), limits: CopyLimits | None = None) -> None:
        super().prepare(pool, runs, limits)
        with suppress(TransferFailed):  # the next connection raises this error again
            self.device(pool).export()

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        try:
            device = self.device(pool)
            exported = device.export()
        except TransferFailed as failed:  # another transport may work
            raise OSError(failed.message) from failed
        sock.sendall(_HELLO.pack(_MAGIC, pool.num_blocks, pool.block_bytes, len(exported)) + exported)
        await_taken(sock, "pool")
        return sock, CudaIpcSend(device)

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        hello = receive_within(link, _HELLO.size, HANDSHAKE_S)
        magic, num_blocks, block_bytes, size = _HELLO.unpack(hello)
        expected = link.source.block_bytes
        if magic != _MAGIC or block_bytes != expected or not num_blocks or not 0 < size <= MAX_EXPORT_BYTES:
            raise BadFrame(f"a pool of {num_blocks} blocks of {block_bytes} bytes, expected {expected}")
        device = self.device(link.pool)
        try:
            source = device.open(receive_within(link, size, HANDSHAKE_S))
        except TransferFailed as failed:
            raise BadFrame(failed.message) from failed
        if source.num_blocks < num_blocks:
            source.close()
            raise BadFrame(f"a pool of {num_blocks} blocks in memory of {source.num_blocks}")
        link.channel.post(TAKEN)
        return CudaIpcReceive(link, device, source)


TRANSPORT: Final = CudaIpc()

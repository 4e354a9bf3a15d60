"""cuda_ipc: the receiver opens the sender's pool by a handle of the driver, and copies blocks out of it, once.

As with shm, only the receiver writes into its pool, so fencing is exact. The sender sums its blocks on the device
before it announces them, the receiver while it copies. Both ends are on one host.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from kvtransfer.departure import Job
from kvtransfer.departures import StaleSource
from kvtransfer.device import Blocks, Copying, Device
from kvtransfer.frames import BadFrame, Frame, Kind
from kvtransfer.landing import Claim
from kvtransfer.paths import local
from kvtransfer.paths.path import ReceiveLink, ReceivePath, SendLink, SendPath
from pdserve.core.errors import TransferFailed
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

if TYPE_CHECKING:
    import socket

CUDA_IPC: Final = transfer_pb2.TRANSPORT_KIND_CUDA_IPC
CHUNK_BYTES: Final = 16 * 2**20  # enough that launching and waking cost little beside the copy
WINDOW: Final = 4
HANDSHAKE_S: Final = 10.0
TAKEN: Final = b"PDOK"
MAX_EXPORT_BYTES: Final = 4096
_HELLO: Final = struct.Struct("<4sIQI")  # magic, blocks, bytes per block, bytes of the export that follows
_MAGIC: Final = b"PDKC"
_NUMBER_BYTES: Final = 4

DeviceOf = Callable[[KvPool], Device]


@final
class CudaIpcSend:
    def __init__(self, device: Device) -> None:
        self._device, self._pool = device, device.pool()
        self._free = deque(range(WINDOW))
        self._summing: dict[int, tuple[Job, Copying]] = {}  # by slot
        self._out: dict[int, Job | None] = {}  # announced; None: given up meanwhile

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_BYTES

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def post(self, job: Job) -> None:
        slot = self._free.popleft()
        copying = self._device.copy(self._pool, job.chunk.sources, None, (), self._link.wake)
        self._summing[slot] = job, copying

    def forsake(self, job: Job) -> None:
        """At once where it is announced: what the receiver still reads is not committed. Else when it is summed."""
        for slot in [slot for slot, one in self._out.items() if one is job]:
            self._out[slot] = None
            self._link.finished(job)

    def hear(self, frame: Frame) -> None:
        if frame.slot not in self._out:
            raise BadFrame(f"credit for slot {frame.slot}, which is not in use")
        job = self._out.pop(frame.slot)
        self._free.append(frame.slot)
        if job is not None:
            self._link.finished(job)

    def poll(self) -> None:
        for slot, (job, copying) in list(self._summing.items()):
            if copying.is_done:
                del self._summing[slot]
                self._announce(slot, job, copying.digest())

    def close(self) -> None:
        self._device.drain()

    def _announce(self, slot: int, job: Job, digest: bytes) -> None:
        link = self._link
        if not job.departure.session.is_open:
            self._free.append(slot)
            link.finished(job)
            return
        numbers = array("I", job.chunk.sources).tobytes()
        try:
            head = link.head(job, digest, slot=slot, length=len(numbers))
        except StaleSource as stale:
            self._free.append(slot)
            link.stale(job, str(stale))
            return
        self._out[slot] = job
        link.writer.say(head + numbers)


@final
class CudaIpcReceive:
    def __init__(self, link: ReceiveLink, device: Device, source: Blocks) -> None:
        self._link, self._device, self._source = link, device, source
        self._pool = device.pool()
        self._copying: list[tuple[Frame, Claim, Copying]] = []

    def check(self, frame: Frame) -> None:
        if not self._link.source.is_all(frame.part):
            raise BadFrame(f"{frame.part}: between devices blocks travel whole")
        if frame.length != frame.count * _NUMBER_BYTES or frame.slot >= WINDOW:
            raise BadFrame(f"{frame.count} blocks in slot {frame.slot} with {frame.length} bytes behind the header")

    def land(self, frame: Frame, claim: Claim | None) -> None:
        link = self._link
        data = bytearray(frame.length)
        link.channel.fill(memoryview(data))
        sources = array("I", bytes(data))
        if max(sources) >= self._source.num_blocks:
            raise BadFrame(f"source block {max(sources)} of a pool of {self._source.num_blocks}")
        if claim is None or not link.enter(claim):
            self._give_back(frame)
            return
        copying = self._device.copy(self._source, sources, self._pool, claim.blocks, link.channel.waker.set)
        self._copying.append((frame, claim, copying))

    def poll(self) -> None:
        while self._copying and self._copying[0][2].is_done:
            frame, claim, copying = self._copying.pop(0)
            digest = copying.digest()
            self._link.leave(claim)
            self._give_back(frame)
            self._link.settle(claim, frame, digest)

    def close(self) -> None:
        """Only after the last copy the book may hear that nobody writes."""
        self._device.drain()
        self._source.close()

    def _give_back(self, frame: Frame) -> None:
        self._link.channel.post(Frame(Kind.CREDIT, frame.tag, slot=frame.slot).encode())


@final
class CudaIpc:
    kind: int = CUDA_IPC
    name = "cuda_ipc"
    is_same_host = True
    is_for_devices = True
    proves_quiescence = True  # the receiver's own copies are the only writes, and are waited for

    def __init__(self, device_of: DeviceOf | None = None) -> None:
        """`device_of` stands in for CUDA."""
        self._device_of = device_of

    def why_not(self) -> str:
        if self._device_of is not None:
            return ""
        from kvtransfer.cuda import why_no_cuda

        return why_no_cuda("cupy")

    def listen(self, host: str) -> socket.socket:
        return local.listen()

    def address(self, door: socket.socket) -> str:
        return local.address(door)

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        return local.dial(address, timeout_s)

    def admits(self, sock: socket.socket) -> bool:
        return local.is_own_user(sock)

    def sender(self, sock: socket.socket, pool: KvPool) -> SendPath:
        device = self._device(pool)
        exported = device.export()
        sock.sendall(_HELLO.pack(_MAGIC, pool.num_blocks, pool.block_bytes, len(exported)) + exported)
        if local.receive_exactly(sock, len(TAKEN)) != TAKEN:
            raise OSError("the receiver did not take the pool")
        return CudaIpcSend(device)

    def receiver(self, link: ReceiveLink) -> ReceivePath:
        hello = local.receive_patiently(link, _HELLO.size, HANDSHAKE_S)
        magic, num_blocks, block_bytes, size = _HELLO.unpack(hello)
        if magic != _MAGIC or block_bytes != link.block_bytes or not num_blocks or not 0 < size <= MAX_EXPORT_BYTES:
            raise BadFrame(f"a pool of {num_blocks} blocks of {block_bytes} bytes, expected {link.block_bytes}")
        device = self._device(link.pool)
        try:
            source = device.open(local.receive_patiently(link, size, HANDSHAKE_S))
        except TransferFailed as failed:
            raise BadFrame(failed.message) from failed
        if source.num_blocks < num_blocks:
            source.close()
            raise BadFrame(f"a pool of {num_blocks} blocks in memory of {source.num_blocks}")
        link.channel.post(TAKEN)
        return CudaIpcReceive(link, device, source)

    def _device(self, pool: KvPool) -> Device:
        if self._device_of is not None:
            return self._device_of(pool)
        from kvtransfer.cuda import device_of

        return device_of(pool)

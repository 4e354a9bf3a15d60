"""nccl: the sender packs chunks into staging and sends them over a communicator; the receiver unpacks them.

    sender                                        receiver
    pack into slot k, then CHUNK(slot k)  ----->  a receive into its own slot k is queued
    send slot k                           <-----  CREDIT(slot k): go
                                                  received: unpack under the claim, settle

- Neither side waits on the device for an absent peer. A late sender can write only into staging, never into the pool. A
  chunk without a claim stays in staging.
- Both sides have the same number of slots: the smaller one that the two budgets allow. A receive into a slot is queued
  only when the slot's previous chunk was unpacked.
- Slots are packed and unpacked in parallel, on several streams. Messages use one stream and one communicator, because
  NCCL executes the operations of a communicator in order on any streams, and both sides must issue them in one order.
- A communicator takes device memory, so their number per process is limited. The least recently used pair makes room
  for a new one: its sender is asked to close, by its own side or with a CREDIT for the slot LEAVE, and does so if it
  has no open transfer.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, final

from kvtransfer.devices.copy_limits import CopyLimits, StagingShare
from kvtransfer.protocol.device import Copying, Device, DeviceConnection, DeviceConnector
from kvtransfer.protocol.frames import BadFrame, Frame, Kind, Tag
from kvtransfer.protocol.transfers import Claim, Job
from kvtransfer.transports.common.interface import ReceiveHalf, ReceiveLink, SendHalf, SendLink
from kvtransfer.transports.common.on_device import (
    DeviceOf,
    OnDevice,
    StagingSlots,
    announce_packed,
    extents_of_part,
    slot_size,
)
from kvtransfer.transports.common.slots import TAKEN, await_taken, give_back, receive_within
from kvtransfer.transports.tcp import TcpListener
from pdserve.core.errors import TransferFailed
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

# --- pair slots -----------------------------------------------------------------------------------------------
# Limits the number of pairs. If the limit is reached, a new pair takes the slot of the least recently used one.
#
# A pair can be closed only while it has no open transfer, and only its sender knows this. So pairs are asked to close,
# in the order of their last use, and the new pair takes the first slot that becomes free.

WAIT_S: Final = 3.0  # wait for a slot, over all pairs that are asked to close
ANSWER_S: Final = 0.5  # wait for each of these pairs: its connection and its communicator must end


@final
class PairSlot:
    """The slot of one pair. Any thread may call it."""

    def __init__(self, pair_slots: PairSlots) -> None:
        self._pair_slots = pair_slots
        self.ask: Callable[[], None] | None = None  # asks the pair to close, and returns; None: it is being made

    def used(self) -> None:
        self._pair_slots.used(self)

    def leave(self) -> None:
        self._pair_slots.leave(self)


@final
class PairSlots:
    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: list[PairSlot] = []  # least recently used first
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._taken)

    def take(self) -> PairSlot:
        """Waits for a slot if none is free. Raises TransferFailed if no pair closes."""
        ends_s = time.monotonic() + WAIT_S
        with self._changed:
            for pair_slot in [None, *self._taken]:
                if pair_slot is not None and pair_slot.ask is not None:
                    pair_slot.ask()
                wait_s = ANSWER_S if pair_slot is not None and pair_slot.ask is not None else 0.0
                if self._changed.wait_for(self._has_room, min(wait_s, max(0.0, ends_s - time.monotonic()))):
                    self._taken.append(PairSlot(self))
                    return self._taken[-1]
                if time.monotonic() >= ends_s:
                    break
        raise TransferFailed(f"{self.most} pairs are open, and none could be closed")

    def used(self, pair_slot: PairSlot) -> None:
        with self._changed:
            if pair_slot in self._taken:
                self._taken.remove(pair_slot)
                self._taken.append(pair_slot)

    def leave(self, pair_slot: PairSlot) -> None:
        """Frees the slot. Idempotent."""
        with self._changed:
            if pair_slot in self._taken:
                self._taken.remove(pair_slot)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._taken) < self.most


# --- nccl -----------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

NCCL: Final = transfer_pb2.TRANSPORT_KIND_NCCL
SLOT_BYTES: Final = 16 * 2**20  # of staging; each message costs launches and frames, whatever its size
# slots of a pair at each end: 128 MiB keep a link of 200 GB/s busy for the 0.6 ms from packing to credit
MAX_SLOTS: Final = 8
LEAVE: Final = MAX_SLOTS  # a credit for it: the receiver has no room left for this pair
MAX_PAIRS: Final = 32  # pairs of a process; each takes some 50 to 100 MB of device memory besides its staging
HANDSHAKE_S: Final = 60.0  # the first communicator takes seconds, because kernels are loaded
MAX_VERSION_BYTES: Final = 32
MAX_ID_BYTES: Final = 1024
_HELLO: Final = struct.Struct("<4s32sQBI")  # magic, library version, bytes per block, slots, bytes of the id behind it
_SLOTS: Final = struct.Struct("<B")  # slots of the pair, in the receiver's answer
_MAGIC: Final = b"PDKN"


@final
class NcclSend:
    def __init__(self, device: Device, connection: DeviceConnection, pair_slot: PairSlot, slots: StagingSlots) -> None:
        self._device, self._connection, self._pair_slot, self._pool = device, connection, pair_slot, device.pool()
        self._is_asked = False  # asked to close
        self._slots, self._free = slots, deque(range(len(slots)))
        self._packing: dict[int, tuple[Job, Copying]] = {}  # by slot
        self._announced: dict[int, int] = {}  # bytes, by slot
        self._sending: dict[int, Copying] = {}

    def attach(self, link: SendLink) -> None:
        self._link = link
        self._pair_slot.ask = self._ask

    @property
    def chunk_bytes(self) -> int:
        return self._slots.num_bytes

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def post(self, job: Job) -> None:
        self._pair_slot.used()
        slot, link, sources = self._free.popleft(), self._link, job.chunk.sources
        extent = link.extent_of(job)
        packed = self._slots.dense(slot, extent.num_bytes)
        targets = range(job.chunk.count)
        copying = self._device.copy(self._pool.narrowed(extent), sources, packed, targets, link.wake, job.after)
        self._packing[slot] = job, copying

    def abandon(self, job: Job) -> None:
        """Nothing to do: packing is short, and packed chunks no longer read source blocks."""

    def on_credit(self, frame: Frame) -> None:
        if frame.slot == LEAVE:
            self._link.retire()
            return
        num_bytes = self._announced.pop(frame.slot, None)
        if num_bytes is None:
            raise BadFrame(f"credit for slot {frame.slot}, which is not announced")
        self._sending[frame.slot] = self._connection.send(self._slots[frame.slot], num_bytes, self._link.wake)

    def poll(self) -> None:
        if self._is_asked:
            self._is_asked = False
            self._link.retire()
        for slot, (job, copying) in list(self._packing.items()):
            if copying.is_done:
                del self._packing[slot]
                self._announce(slot, job, copying.digest())
        for slot, sending in list(self._sending.items()):
            if sending.is_done:
                del self._sending[slot]
                self._free.append(slot)

    def close(self) -> None:
        _close(self._device, self._connection, self._pair_slot, self._slots)

    def _ask(self) -> None:
        self._is_asked = True
        self._link.wake()

    def _announce(self, slot: int, job: Job, digest: bytes) -> None:
        def say(head: bytes) -> None:
            self._announced[slot] = job.chunk.count * self._link.extent_of(job).num_bytes
            self._link.writer.write(head)

        announce_packed(self._link, job, digest, self._free, slot, say, frame_slot=slot)


@dataclass(slots=True)
class _Slot:
    """The content of a staging slot of the receiver: nothing, a chunk in transfer, or a chunk that is being
    unpacked."""

    frame: Frame
    claim: Claim | None
    receiving: Copying | None
    unpacking: Copying | None = None


@final
class NcclReceive:
    def __init__(
        self,
        link: ReceiveLink,
        device: Device,
        connection: DeviceConnection,
        pair_slot: PairSlot,
        staging: StagingSlots,
    ) -> None:
        self._link, self._device, self._connection, self._pair_slot = link, device, connection, pair_slot
        self._pool, self._staging = device.pool(), staging
        self._slots: dict[int, _Slot] = {}
        self._next: dict[int, tuple[Frame, Claim | None]] = {}  # announced for a slot that is still being unpacked
        pair_slot.ask = self._ask

    def check(self, frame: Frame) -> None:
        extents_of_part(self._link, frame.part)
        is_too_long = self._link.size_of(frame) > self._staging.num_bytes
        if frame.length or frame.slot >= len(self._staging) or is_too_long or frame.slot in self._next:
            raise BadFrame(f"{frame.count} blocks in slot {frame.slot} with {frame.length} bytes behind the header")

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        self._pair_slot.used()
        if frame.slot in self._slots:
            self._next[frame.slot] = frame, claim
        else:
            self._begin(frame, claim)

    def poll(self) -> None:
        for number, slot in list(self._slots.items()):
            if slot.receiving is not None and slot.receiving.is_done:
                slot.receiving = None
                self._unpack(number, slot)
            if slot.unpacking is not None and slot.unpacking.is_done:
                assert slot.claim is not None
                digest = slot.unpacking.digest()
                self._link.leave(slot.claim)
                self._link.settle(slot.claim, slot.frame, digest)
                self._end(number)

    def close(self) -> None:
        _close(self._device, self._connection, self._pair_slot, self._staging)

    def _ask(self) -> None:
        self._link.channel.post(Frame(Kind.CREDIT, Tag(bytes(16), 0, 0), slot=LEAVE).encode())

    def _begin(self, frame: Frame, claim: Claim | None) -> None:
        link = self._link
        receiving = self._connection.receive(self._staging[frame.slot], link.size_of(frame), link.channel.waker.set)
        self._slots[frame.slot] = _Slot(frame, claim, receiving)
        give_back(link, frame)

    def _unpack(self, number: int, slot: _Slot) -> None:
        link, frame, claim = self._link, slot.frame, slot.claim
        if claim is None or not link.enter(claim):
            self._end(number)
            return
        _, into = extents_of_part(link, frame.part)
        packed = self._staging.dense(number, into.num_bytes)
        wake, after = link.channel.waker.set, claim.transfer.after
        sources, target = range(frame.count), self._pool.narrowed(into)
        slot.unpacking = self._device.copy(packed, sources, target, claim.blocks, wake, after)

    def _end(self, number: int) -> None:
        del self._slots[number]
        waiting = self._next.pop(number, None)
        if waiting is not None:
            self._begin(*waiting)


@final
class Nccl(OnDevice, TcpListener):
    kind: int = NCCL
    name = "nccl"
    order = 20
    has_slots = True
    packages = ("cupy",)

    def __init__(
        self, device_of: DeviceOf | None = None, connector: DeviceConnector | None = None, most_pairs: int = MAX_PAIRS
    ) -> None:
        """`device_of` and `connector` replace CUDA and NCCL in tests."""
        super().__init__(device_of)
        self._given_connector = connector
        self.pair_slots = PairSlots(most_pairs)

    def prepare(self, pool: KvPool, runs: Sequence[StridedExtent] = (), limits: CopyLimits | None = None) -> None:
        super().prepare(pool, runs, limits)
        with suppress(TransferFailed):  # the next connection raises this error again
            self._connector()  # imports CuPy, which takes seconds with the GIL held

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        pair_slot: PairSlot | None = None
        share: StagingShare | None = None
        try:
            device, connector, pair_slot = self.device(pool), self._connector(), self.pair_slots.take()
            share = device.budget.take(slot_size(pool.block_bytes, SLOT_BYTES), MAX_SLOTS)
            unique_id = connector.new_id()
            hello = _HELLO.pack(_MAGIC, _padded(connector.version), pool.block_bytes, share.num_slots, len(unique_id))
            sock.settimeout(HANDSHAKE_S)
            sock.sendall(hello + unique_id)
            # Only after the receiver has confirmed that it will join, because a waiting rank cannot be interrupted.
            await_taken(sock, "communicator")
            share.shrink(_slots_in(sock.recv(_SLOTS.size), share.num_slots))
            connection = connector.join(device, unique_id, 0)
            with _closed_on_error(connection):
                staging = StagingSlots(device, pool.block_bytes, share)
                return sock, NcclSend(device, connection, pair_slot, staging)
        except BaseException as error:
            if pair_slot is not None:
                pair_slot.leave()
            if share is not None:
                share.close()
            if isinstance(error, TransferFailed):  # another transport may work
                raise OSError(error.message) from error
            raise

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        connector = self._connector()
        magic, version, block_bytes, slots, size = _HELLO.unpack(receive_within(link, _HELLO.size, HANDSHAKE_S))
        theirs = version.rstrip(b"\0").decode("ascii", "replace")
        expected = link.source.block_bytes
        if magic != _MAGIC or block_bytes != expected or not 0 < size <= MAX_ID_BYTES:
            raise BadFrame(f"blocks of {block_bytes} bytes, expected {expected}")
        if not 1 <= slots <= MAX_SLOTS:
            raise BadFrame(f"{slots} slots of staging, expected 1 to {MAX_SLOTS}")
        if theirs != connector.version:
            raise BadFrame(f"NCCL {theirs}, expected {connector.version}: both ranks must have the same")
        unique_id = receive_within(link, size, HANDSHAKE_S)
        device, pair_slot = self.device(link.pool), self.pair_slots.take()
        share = device.budget.take(slot_size(link.block_bytes, SLOT_BYTES), slots)
        try:
            link.channel.post(TAKEN + _SLOTS.pack(share.num_slots))
            link.channel.flush()
            connection = connector.join(device, unique_id, 1)
            with _closed_on_error(connection):
                return NcclReceive(link, device, connection, pair_slot, StagingSlots(device, link.block_bytes, share))
        except BaseException:
            pair_slot.leave()
            share.close()
            raise

    def _connector(self) -> DeviceConnector:
        if self._given_connector is not None:
            return self._given_connector
        from kvtransfer.devices.nccl_connection import NcclConnector

        return NcclConnector()


TRANSPORT: Final = Nccl()


@contextmanager
def _closed_on_error(connection: DeviceConnection) -> Iterator[None]:
    """For errors after the connection was made, such as no memory for staging."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _close(device: Device, connection: DeviceConnection, pair_slot: PairSlot, staging: StagingSlots) -> None:
    try:
        connection.close()
    except TransferFailed as failed:  # it may still write into staging, so it keeps its staging and its slot
        log.warning("an NCCL pair does not end", extra={"error": failed.message})
        device.drain()
        return
    device.drain()
    staging.close()
    pair_slot.leave()


def _slots_in(answer: bytes, most: int) -> int:
    """Raises OSError if it is not a valid number of slots for this end."""
    if len(answer) != _SLOTS.size or not 1 <= answer[0] <= most:
        raise OSError(f"the receiver answered {answer!r}, expected 1 to {most} slots of staging")
    return answer[0]


def _padded(version: str) -> bytes:
    return version.encode()[:MAX_VERSION_BYTES]

"""shm: the sender copies a chunk into a slot of a shared ring, the receiver copies it out and gives the slot back."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections import deque
from typing import Final, final

from kvtransfer.departures import Job
from kvtransfer.frames import BadFrame, Frame, Kind
from kvtransfer.host import can_share_memory
from kvtransfer.landings import Claim
from kvtransfer.memory import copy, views_of
from kvtransfer.paths.path import ReceiveLink, ReceivePath, SendLink, SendPath
from kvtransfer.ring import Ring
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

SHM: Final = transfer_pb2.TRANSPORT_KIND_SHM

RING_BYTES: Final = 8 * 2**20  # small enough to stay in the last-level cache
MIN_SLOTS: Final = 4


@final
class ShmSend:
    """As many chunks as the ring has slots; a source block is read within `post` only."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.chunk_bytes = ring.slot_bytes
        self._free = deque(range(ring.slots))

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def post(self, job: Job) -> None:
        link, slot = self._link, self._free.popleft()
        views = views_of(link.memory, job.chunk.sources, link.block_bytes)
        digest = link.digest(views)  # of the source, so that it covers the copy too
        copy([self.ring.slot(slot, job.chunk.count * link.block_bytes)], views)
        link.writer.say(link.head(job, digest, slot=slot))
        link.finished(job)

    def forsake(self, job: Job) -> None:
        """There is none: a job ends within its `post`."""

    def hear(self, frame: Frame) -> None:
        if frame.slot >= self.ring.slots or frame.slot in self._free:
            raise BadFrame(f"credit for slot {frame.slot}, which is not in use")
        self._free.append(frame.slot)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.ring.close()


@final
class ShmReceive:
    def __init__(self, link: ReceiveLink, ring: Ring) -> None:
        self._link, self._ring = link, ring

    def check(self, frame: Frame) -> None:
        if frame.length != 0 or frame.slot >= self._ring.slots:
            raise BadFrame(f"a chunk in slot {frame.slot} with {frame.length} bytes behind its header")

    def land(self, frame: Frame, claim: Claim | None) -> None:
        link = self._link
        if claim is None or not link.enter(claim):
            self._give_back(frame)
            return
        views = views_of(link.memory, claim.blocks, link.block_bytes)
        try:
            copy(views, [self._ring.slot(frame.slot, frame.count * link.block_bytes)])
        finally:
            link.leave(claim)
        self._give_back(frame)
        # Of the granted blocks, not of the ring: it covers every copy on the way.
        link.settle(claim, frame, link.digest(views))

    def _give_back(self, frame: Frame) -> None:
        self._link.channel.post(Frame(Kind.CREDIT, frame.tag, slot=frame.slot).encode())

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self._ring.close()


@final
class Shm:
    kind: int = SHM
    name = "shm"
    is_same_host = True
    proves_quiescence = True  # the receiver's own thread is the only writer

    def why_not(self) -> str:
        return "" if can_share_memory() else "shm needs Linux"

    def listen(self, host: str) -> socket.socket:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.bind("\0pdserve-kv-" + secrets.token_hex(16))
        return door

    def address(self, door: socket.socket) -> str:
        return bytes(door.getsockname())[1:].decode()

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + address)
        except BaseException:
            sock.close()
            raise
        return sock

    def admits(self, sock: socket.socket) -> bool:
        """This user's processes only."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        return bool(user == os.geteuid())

    def sender(self, sock: socket.socket, pool: KvPool) -> SendPath:
        return ShmSend(Ring.accept(sock))

    def receiver(self, link: ReceiveLink) -> ReceivePath:
        slots = max(MIN_SLOTS, RING_BYTES // link.chunk_bytes)
        ring = Ring.create(slots, link.chunk_bytes)
        try:
            ring.offer(link.channel.socket)
        except BaseException:
            ring.close()
            raise
        return ShmReceive(link, ring)

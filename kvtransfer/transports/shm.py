"""shm: the receiver maps the sender's pool and copies blocks out of it, once.

Only the receiver writes into its pool, so no write follows an abort. A late, faulty or dead sender can at worst change
bytes before the receiver reads them. The checksum then differs from the announced one.
"""

from __future__ import annotations

import socket
import time
from array import array
from typing import Final, final

from kvtransfer.devices import fused
from kvtransfer.protocol.frames import BadFrame, Checksum, Frame
from kvtransfer.protocol.plan import copy
from kvtransfer.protocol.transfers import Claim, Job
from kvtransfer.transports.common.interface import OnHost, ReceiveHalf, ReceiveLink, SendHalf, SendLink
from kvtransfer.transports.common.slots import (
    HELLO_BYTES,
    TAKEN,
    SharedPool,
    Slots,
    UnixListener,
    await_taken,
    can_share_memory,
    check_numbers,
    give_back,
    offer,
    read_numbers,
    runs_offered,
)
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

SHM: Final = transfer_pb2.TRANSPORT_KIND_SHM

# The sender hashes a chunk while the receiver copies the previous one, which hashing has brought into the cache. So a
# few chunks must fit into the last-level cache, and the copy of each must take much longer than a system call.
CHUNK_BYTES: Final = 4 * 2**20
WINDOW: Final = 3  # chunks that are announced but not yet copied
_LEAST_CHUNK_BYTES: Final = CHUNK_BYTES // 2 ** (WINDOW - 1)
HANDSHAKE_S: Final = 5.0


@final
class ShmSend:
    """The numbers of the source blocks follow a chunk's frame. The receiver returns the slot when it has read them."""

    def __init__(self) -> None:
        self._slots = Slots(WINDOW)

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def chunk_bytes(self) -> int:
        """Smaller while the receiver has little to do, so that it can begin soon."""
        return _LEAST_CHUNK_BYTES << len(self._slots)

    @property
    def is_free(self) -> bool:
        return self._slots.is_free

    def post(self, job: Job) -> None:
        link, slots = self._link, self._slots
        slots.announce(slots.take(), job, link, link.digest(link.views(job)))

    def abandon(self, job: Job) -> None:
        self._slots.abandon(job, self._link)

    def on_credit(self, frame: Frame) -> None:
        self._slots.on_credit(frame, self._link)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class ShmReceive:
    def __init__(self, link: ReceiveLink, source: SharedPool) -> None:
        """Raises BadFrame."""
        self._link, self._source = link, source
        self._source_runs = runs_offered(link.source.form, is_in_layers=source.is_in_layers)
        self._copier: fused.Copier | None = None
        if link.source.block_bytes == link.block_bytes and link.checksum is Checksum.XXH3_64:
            runs = link.pool.runs_per_block, self._source_runs
            self._copier = fused.Copier.between(link.memory, source.memory, link.block_bytes, runs)

    def check(self, frame: Frame) -> None:
        check_numbers(frame, WINDOW)

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        link = self._link
        sources = read_numbers(link, frame, self._source.num_blocks)
        if claim is None or not link.enter(claim):
            give_back(link, frame)
            return
        try:
            digest = self._copy(claim, sources)
        finally:
            link.leave(claim)
        give_back(link, frame)
        link.settle(claim, frame, digest)

    def _copy(self, claim: Claim, sources: array[int]) -> bytes:
        """Returns the checksum of the written bytes."""
        link = self._link
        if self._copier is not None and link.source.is_all(claim.part):
            return self._copier.copy(claim.blocks, sources)
        views = link.views(claim)
        copy(views, link.source.views(self._source.memory, sources, claim.part, self._source_runs))
        return link.digest(views)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self._copier = None
        self._source.close()


@final
class Shm(OnHost, UnixListener):
    kind: int = SHM
    name = "shm"
    order = 30
    has_slots = True

    def why_not(self, *, is_on_host: bool = True) -> str:
        return "" if can_share_memory() else "shm needs Linux"

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        offer(sock, pool)
        await_taken(sock, "pool")
        return sock, ShmSend()

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        hello, descriptors = _receive_descriptors(link)
        source = SharedPool(hello, descriptors, link.source.block_bytes)
        try:
            half = ShmReceive(link, source)
        except BaseException:
            source.close()
            raise
        link.channel.post(TAKEN)
        return half


TRANSPORT: Final = Shm()


def _receive_descriptors(link: ReceiveLink) -> tuple[bytes, list[int]]:
    ends_s = time.monotonic() + HANDSHAKE_S
    while True:
        try:
            hello, descriptors, _, _ = socket.recv_fds(link.channel.socket, HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            return hello, descriptors
        except BlockingIOError:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not link.channel.wait(left_s):
                raise BadFrame("no pool was offered") from None

"""shm: the receiver maps the sender's pool and copies blocks out of it, once.

Only the receiver writes into its pool, so fencing is exact: a sender that is late, mad or dead can at worst change
what the receiver is about to read, and then the checksum differs from the one that was taken before.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from array import array
from collections import deque
from typing import Final, final

from kvtransfer import fused
from kvtransfer.checksum import Checksum
from kvtransfer.departure import Job
from kvtransfer.frames import BadFrame, Frame, Kind
from kvtransfer.host import can_share_memory
from kvtransfer.landing import Claim
from kvtransfer.memory import copy, views_of
from kvtransfer.paths.path import ReceiveLink, ReceivePath, SendLink, SendPath
from kvtransfer.shared import HELLO_BYTES, TAKEN, SharedPool, offer
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

SHM: Final = transfer_pb2.TRANSPORT_KIND_SHM

# The sender hashes a chunk while the receiver copies the one before it out of the cache that the hash has filled:
# so a few chunks must fit into the last-level cache, and each must be worth a system call on both sides.
CHUNK_BYTES: Final = 4 * 2**20
WINDOW: Final = 3  # chunks that are announced and not yet copied
_LEAST_CHUNK_BYTES: Final = CHUNK_BYTES // 2 ** (WINDOW - 1)
HANDSHAKE_S: Final = 5.0
_BLOCK_NUMBER_BYTES: Final = 4


@final
class ShmSend:
    """A chunk's frame is followed by its source blocks' numbers; the receiver gives the slot back once it has read."""

    def __init__(self) -> None:
        self._free = deque(range(WINDOW))
        self._out: dict[int, Job | None] = {}  # by slot; None: given up meanwhile

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def chunk_bytes(self) -> int:
        """The less the receiver has to do, the smaller, so that it begins soon."""
        return _LEAST_CHUNK_BYTES << len(self._out)

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def post(self, job: Job) -> None:
        link, slot = self._link, self._free[0]
        digest = link.digest(link.views(job))
        numbers = array("I", job.chunk.sources).tobytes()
        link.writer.say(link.head(job, digest, slot=slot, length=len(numbers)) + numbers)
        self._free.popleft()
        self._out[slot] = job

    def forsake(self, job: Job) -> None:
        """At once. Whatever the receiver still reads of it belongs to a transfer that it will not commit."""
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
        pass

    def close(self) -> None:
        pass


@final
class ShmReceive:
    def __init__(self, link: ReceiveLink, source: SharedPool) -> None:
        self._link, self._source = link, source
        is_whole = link.source.block_bytes == link.block_bytes
        self._copier = fused.Copier.between(link.memory, source.memory, link.block_bytes) if is_whole else None

    def check(self, frame: Frame) -> None:
        if frame.length != frame.count * _BLOCK_NUMBER_BYTES or frame.slot >= WINDOW:
            raise BadFrame(f"{frame.count} blocks in slot {frame.slot} with {frame.length} bytes behind the header")

    def land(self, frame: Frame, claim: Claim | None) -> None:
        link, sources = self._link, self._read_numbers(frame)
        if claim is None or not link.enter(claim):
            self._give_back(frame)
            return
        try:
            is_whole = link.source.is_all(claim.part)
            digest = self._copy(claim.blocks, sources) if is_whole else self._copy_part(claim, sources)
        finally:
            link.leave(claim)
        self._give_back(frame)
        link.settle(claim, frame, digest)

    def _read_numbers(self, frame: Frame) -> array[int]:
        data = bytearray(frame.length)
        self._link.channel.fill(memoryview(data))
        numbers = array("I", bytes(data))
        if max(numbers) >= self._source.num_blocks:
            raise BadFrame(f"source block {max(numbers)} of a pool of {self._source.num_blocks}")
        return numbers

    def _copy(self, blocks: tuple[int, ...], sources: array[int]) -> bytes:
        """Whole blocks. The checksum of what was written."""
        link = self._link
        if self._copier is not None and link.checksum is Checksum.XXH3_64:
            return self._copier.copy(blocks, sources)
        views = views_of(link.memory, blocks, link.block_bytes)
        copy(views, views_of(self._source.memory, sources, link.block_bytes))
        return link.digest(views)

    def _copy_part(self, claim: Claim, sources: array[int]) -> bytes:
        link = self._link
        views = link.views(claim)
        copy(views, link.source.views(self._source.memory, sources, claim.part))
        return link.digest(views)

    def _give_back(self, frame: Frame) -> None:
        self._link.channel.post(Frame(Kind.CREDIT, frame.tag, slot=frame.slot).encode())

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self._copier = None
        self._source.close()


@final
class Shm:
    kind: int = SHM
    name = "shm"
    is_same_host = True
    is_for_devices = False
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
        offer(sock, pool)
        answer = b""
        while len(answer) < len(TAKEN):
            received = sock.recv(len(TAKEN) - len(answer))
            if not received:
                raise OSError("the receiver did not take the pool")
            answer += received
        return ShmSend()

    def receiver(self, link: ReceiveLink) -> ReceivePath:
        hello, descriptors = _receive_descriptors(link)
        source = SharedPool(hello, descriptors, link.source.block_bytes)
        link.channel.post(TAKEN)
        return ShmReceive(link, source)


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

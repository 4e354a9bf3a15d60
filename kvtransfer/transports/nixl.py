"""nixl: the receiver reads the sender's blocks into staging with NIXL, and copies them from there into the pool.

    sender                                                  receiver
    sums a chunk, then CHUNK(slot, source numbers)  ----->  READ into staging slot
                                                            DONE: copies under the claim, sums the copy, settles
    may post to the slot again                      <-----  CREDIT(slot)

Only the connection's thread writes into the receiver's pool. If the sender wrote into the pool, or NIXL read directly
into it, an abort would have to wait for that, but the library can neither end a read nor prove that it has ended
(kvtransfer/devices/nixl_agent.py). A dead peer could then block memory indefinitely. Staging costs one more copy, of a
chunk that is in the cache. A late or dead sender can at worst change bytes before their checksum is computed.

Pools are in host memory, and NIXL uses UCX. NIXL has no read-only registration: a process with the metadata could also
write. So only receivers with a ticket get the metadata, which covers only the pool.
"""

from __future__ import annotations

import importlib.util
import socket
import struct
import threading
from array import array
from typing import Final, final

from kvtransfer.devices.nixl_agent import Agent, MakeLibrary, NixlRead, NixlReader, make_library
from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.plan import byte_ranges, copy
from kvtransfer.protocol.receive_transfer import Claim
from kvtransfer.protocol.send_transfer import Job
from kvtransfer.transports.common.interface import OnHost, ReceiveHalf, ReceiveLink, SendHalf, SendLink
from kvtransfer.transports.common.slots import (
    TAKEN,
    Slots,
    await_taken,
    check_numbers,
    give_back,
    read_numbers,
    receive_within,
)
from kvtransfer.transports.tcp import TcpListener
from pdserve.core.errors import TransferFailed
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

NIXL: Final = transfer_pb2.TRANSPORT_KIND_NIXL
WINDOW: Final = 3  # chunks: one is being hashed, one read, one copied
HANDSHAKE_S: Final = 30.0  # a new process first makes its agent and registers its pool
MAX_METADATA_BYTES: Final = 65_536  # some 450 with UCX on one host
_HELLO: Final = struct.Struct("<4sIQQI")  # magic, blocks, bytes per block, address, bytes of the metadata that follow
_MAGIC: Final = b"PDKX"


@final
class NixlSend:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._slots = Slots(WINDOW)

    def attach(self, link: SendLink) -> None:
        self._link = link

    @property
    def chunk_bytes(self) -> None:
        return None

    @property
    def is_free(self) -> bool:
        return self._slots.is_free

    def post(self, job: Job) -> None:
        link, slots = self._link, self._slots
        slots.announce(slots.take(), job, link, link.digest(link.views(job)))
        self._agent.serve(1)

    def abandon(self, job: Job) -> None:
        self._slots.abandon(job, self._link)

    def on_credit(self, frame: Frame) -> None:
        self._slots.on_credit(frame, self._link)
        self._agent.serve(-1)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        """Other processes may still be reading, but without the connection they cannot commit a chunk."""
        self._agent.serve(-len(self._slots))
        self._slots.clear()


@final
class NixlReceive:
    def __init__(self, link: ReceiveLink, reader: NixlReader, address: int, num_blocks: int) -> None:
        self._link, self._reader = link, reader
        self._address, self._num_blocks = address, num_blocks  # of the sender's pool
        self._reading: dict[int, tuple[Frame, Claim, NixlRead]] = {}  # by slot

    def check(self, frame: Frame) -> None:
        check_numbers(frame, WINDOW)
        if frame.slot in self._reading:
            raise BadFrame(f"{frame.count} blocks in slot {frame.slot}, which is still read into")

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        link = self._link
        sources = read_numbers(link, frame, self._num_blocks)
        if claim is None:
            give_back(link, frame)
            return
        read = self._reader.read(frame.slot * link.chunk_bytes, self._runs(frame, sources), link.channel.waker.set)
        self._reading[frame.slot] = frame, claim, read

    def poll(self) -> None:
        """Raises TransferFailed if a read failed, which ends the connection."""
        for slot, (frame, claim, read) in list(self._reading.items()):
            if read.is_done:
                del self._reading[slot]
                self._take(frame, claim)

    def close(self) -> None:
        """Reads in progress continue into staging."""
        self._reader.close()

    def _take(self, frame: Frame, claim: Claim) -> None:
        link, at = self._link, frame.slot * self._link.chunk_bytes
        if not link.enter(claim):
            give_back(link, frame)
            return
        try:
            views = link.views(claim)
            copy(views, [self._reader.memory[at : at + link.size_of(frame)]])
            digest = link.digest(views)
        finally:
            link.leave(claim)
        give_back(link, frame)
        link.settle(claim, frame, digest)

    def _runs(self, frame: Frame, sources: array[int]) -> list[tuple[int, int]]:
        """(address, bytes) of the chunk in the sender's process."""
        layout, base = self._link.source, self._address
        if layout.is_all(frame.part):
            return [(base + begin, end - begin) for begin, end in byte_ranges(sources, layout.block_bytes)]
        runs = layout.runs(frame.part)
        return [(base + block * layout.block_bytes + at, size) for block in sources for at, size in runs]


@final
class Nixl(OnHost, TcpListener):
    """A process has one agent for sending, for all its pools, and one for receiving."""

    kind: int = NIXL
    name = "nixl"
    order = 50
    has_slots = True

    def __init__(self, make: MakeLibrary | None = None) -> None:
        """`make` replaces the library in tests."""
        self._make = make
        self._lock = threading.Lock()  # guards the two
        self._exporter: Agent | None = None
        self._importer: Agent | None = None

    def why_not(self, *, is_on_host: bool = True) -> str:
        is_there = self._make is not None or importlib.util.find_spec("nixl") is not None
        return "" if is_there else "the package nixl is not installed"

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        try:
            with self._lock:
                self._exporter = self._exporter or Agent(self._make or make_library)
            address, metadata = self._exporter.export(pool)
        except TransferFailed as failed:
            raise OSError(failed.message) from failed
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(_HELLO.pack(_MAGIC, pool.num_blocks, pool.block_bytes, address, len(metadata)) + metadata)
        await_taken(sock, "pool")
        return sock, NixlSend(self._exporter)

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        hello = receive_within(link, _HELLO.size, HANDSHAKE_S)
        magic, num_blocks, block_bytes, address, size = _HELLO.unpack(hello)
        if magic != _MAGIC or block_bytes != link.source.block_bytes or not num_blocks:
            raise BadFrame(f"a pool of {num_blocks} blocks of {block_bytes} bytes, expected {link.source.block_bytes}")
        if not 0 < size <= MAX_METADATA_BYTES:
            raise BadFrame(f"{size} bytes of metadata, at most {MAX_METADATA_BYTES}")
        metadata = receive_within(link, size, HANDSHAKE_S)
        with self._lock:
            self._importer = self._importer or Agent(self._make or make_library)
        try:
            reader = self._importer.reader(metadata, WINDOW * link.chunk_bytes)
        except TransferFailed as failed:
            raise BadFrame(failed.message) from failed
        link.channel.post(TAKEN)
        return NixlReceive(link, reader, address, num_blocks)


TRANSPORT: Final = Nixl()

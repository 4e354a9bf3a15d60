"""nixl: the receiver reads the sender's blocks into staging with NIXL, and copies them from there into the pool.

    sender                                                  receiver
    sums a chunk, then CHUNK(slot, source numbers)  ----->  READ into staging slot
                                                            DONE: copies under the claim, sums the copy, settles
    may post to the slot again                      <-----  CREDIT(slot)

Only the connection's thread writes into the receiver's pool. If the sender wrote into the pool, or NIXL read directly
into it, an abort would have to wait for that, but the library can neither end a read nor prove that it has ended
(see the agent below). A dead peer could then block memory indefinitely. Staging costs one more copy, of a
chunk that is in the cache. A late or dead sender can at worst change bytes before their checksum is computed.

Pools are in host memory, and NIXL uses UCX. NIXL has no read-only registration: a process with the metadata could also
write. So only receivers with a ticket get the metadata, which covers only the pool.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.plan import copy, flat, ranges_of
from kvtransfer.protocol.transfers import Claim, Job
from kvtransfer.transports.common.interface import OnHost, ReceiveHalf, ReceiveLink, SendHalf, SendLink
from kvtransfer.transports.common.slots import (
    TAKEN,
    Slots,
    await_taken,
    check_numbers,
    give_back,
    read_numbers,
    receive_within,
    runs_offered,
)
from kvtransfer.transports.tcp import TcpListener
from pdserve.core.errors import TransferFailed
from pdserve.engine.interface import KvPool
from pdserve.v1 import transfer_pb2

# --- agent ----------------------------------------------------------------------------------------------------
# NIXL agents, each called by its own thread. The only module that imports nixl.
#
# The library makes progress only when it is polled. The agent's thread polls it while a read is in progress. The
# library's progress thread is not used, because it polls continuously, and two of them would occupy the cores of a
# small machine.
#
# A read cannot be ended. Releasing its handle returns while bytes still arrive (ai-dynamo/nixl#2044; there is no
# cancellation, #2067), and an error status does not mean that the backend has stopped. So reads go only into staging,
# where late bytes can at most cause a wrong checksum. The process that is read from cannot stop a reader either: over
# sockets, UCX lets the other process read any address at any time, and crashes if the address is not mapped any more.
#
# So registered memory, both staging and pools, stays mapped and registered until the process ends. Later connections
# reuse staging. A handle is released when the library reports that its read has ended. A remote agent is removed when
# none of its reads is in progress.

log = logging.getLogger(__name__)

CALL_S: Final = 20.0  # making an agent takes half a second, registering large pools longer
READ_S: Final = 10.0  # time limit for one chunk
PACE_S: Final = 0.0002  # between two polls
MAX_READERS: Final = 64  # each has the staging of a connection

MakeLibrary = Callable[[str], Any]  # by the agent's name
Runs = Sequence[tuple[int, int]]  # (address, bytes)


def make_library(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    # By default it logs each step to standard output, which only the program may use.
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
    library = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    if "UCX" not in library.backends:
        raise TransferFailed("this build of NIXL has no UCX")
    return library


class Export(NamedTuple):
    """A registered pool, which other processes may read."""

    address: int
    metadata: bytes


@final
class NixlRead:
    """One read into staging. The agent's thread reports its end."""

    def __init__(self) -> None:
        self._overdue_at_s = time.monotonic() + READ_S
        self._end: str | None = None

    @property
    def is_done(self) -> bool:
        """Raises TransferFailed if the read failed or takes too long. Its bytes may then still arrive."""
        if self._end is None and time.monotonic() > self._overdue_at_s:
            raise TransferFailed(f"a NIXL read has not ended in {READ_S:g} s")
        if self._end:
            raise TransferFailed(f"a NIXL read failed: {self._end}")
        return self._end is not None

    def ended(self, error: str) -> None:
        self._end = error


@dataclass(slots=True, eq=False)
class NixlReader:
    """The remote agent and the staging of one connection. Only the agent's thread changes it."""

    agent: Agent
    remote: Any  # the library's name of the other agent
    memory: memoryview
    address: int
    num_in_progress: int = 0
    is_closed: bool = False

    def read(self, at: int, runs: Runs, wake: Callable[[], None]) -> NixlRead:
        """Begins to read these runs of the other process into staging, at offset `at`."""
        read = NixlRead()
        self.agent.post(lambda: self.agent.begin(self, read, at, runs, wake))
        return read

    def close(self) -> None:
        self.agent.post(lambda: self.agent.retire(self))


@dataclass(slots=True, eq=False)
class _InProgress:
    reader: NixlReader
    read: NixlRead
    handle: Any
    wake: Callable[[], None]


@final
class Agent:
    def __init__(self, make: MakeLibrary) -> None:
        """Raises TransferFailed."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the thread ends
        self._exports: weakref.WeakKeyDictionary[KvPool, Export] = weakref.WeakKeyDictionary()
        self._mapped: list[memoryview] = []  # of the pools that were exported
        self._in_progress: list[_InProgress] = []
        self._spare: defaultdict[int, list[memoryview]] = defaultdict(list)  # staging, by size
        self._users: defaultdict[Any, int] = defaultdict(int)  # readers, by remote agent
        self._num_served = 0  # number of chunks that other processes may be reading
        threading.Thread(target=self._run, name="nixl-agent", daemon=True).start()
        name = "pdserve-" + secrets.token_hex(16)  # names are addresses: a reused one would belong to another agent
        try:
            self._library = self.call(lambda: make(name))
        except TransferFailed:
            self._calls.put(None)
            raise

    # From any thread.

    def post(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the agent's thread, and returns its result. Raises TransferFailed if it raises or takes
        too long."""
        done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((function(), None))
            except Exception as error:  # raised in the calling thread
                done.put((None, error))

        self.post(run)
        try:
            value, error = done.get(timeout=CALL_S)
        except queue.Empty:
            raise TransferFailed(f"NIXL has not answered in {CALL_S:g} s") from None
        if error is not None:
            raise TransferFailed(f"NIXL failed: {error}") from error
        return value

    def export(self, pool: KvPool) -> Export:
        """Registers the pool, once. Its memory stays mapped after the pool is gone."""
        export: Export = self.call(lambda: self._exports.get(pool) or self._register(pool))
        return export

    def serve(self, change: int) -> None:
        """Changes the number of chunks that other processes may read. Their reads progress while this side polls."""
        self.post(lambda: self._serve(change))

    def reader(self, metadata: bytes, num_bytes: int) -> NixlReader:
        """A reader with `num_bytes` of staging. Raises TransferFailed on invalid metadata."""
        reader: NixlReader = self.call(lambda: self._join(metadata, num_bytes))
        return reader

    # On the agent's thread.

    def begin(self, reader: NixlReader, read: NixlRead, at: int, runs: Runs, wake: Callable[[], None]) -> None:
        here = []
        for _, size in runs:
            here.append((reader.address + at, size, 0))
            at += size
        try:
            library = self._library
            local = library.get_xfer_descs(here, "DRAM")
            remote = library.get_xfer_descs([(address, size, 0) for address, size in runs], "DRAM")
            handle = library.initialize_xfer("READ", local, remote, reader.remote)
        except Exception as error:  # the library's own, of many kinds
            read.ended(str(error) or type(error).__name__)
            wake()
            return
        in_progress = _InProgress(reader, read, handle, wake)
        reader.num_in_progress += 1
        self._in_progress.append(in_progress)
        self._look(in_progress, self._library.transfer)

    def retire(self, reader: NixlReader) -> None:
        """Frees the reader's staging and removes its remote agent, once the library has reported the end of all its
        reads."""
        reader.is_closed = True
        if reader.num_in_progress:
            return
        self._spare[len(reader.memory)].append(reader.memory)
        self._users[reader.remote] -= 1
        if not self._users[reader.remote]:
            del self._users[reader.remote]
            self._try(lambda: self._library.remove_remote_agent(reader.remote))

    def _join(self, metadata: bytes, num_bytes: int) -> NixlReader:
        if sum(self._users.values()) >= MAX_READERS:
            raise TransferFailed(f"{MAX_READERS} connections are reading, the maximum")
        remote = self._library.add_remote_agent(metadata)
        memory = self._spare[num_bytes].pop() if self._spare[num_bytes] else self._new_staging(num_bytes)
        self._users[remote] += 1
        return NixlReader(self, remote, memory, _address_of(memory))

    def _new_staging(self, num_bytes: int) -> memoryview:
        memory = memoryview(mmap.mmap(-1, num_bytes))
        self._library.register_memory([(_address_of(memory), num_bytes, 0, "")], "DRAM", ["UCX"])
        return memory

    def _register(self, pool: KvPool) -> Export:
        memory, library = flat(pool.buffer), self._library
        address = _address_of(memory)
        registered = library.register_memory([(address, len(memory), 0, "")], "DRAM", ["UCX"])
        # Of this pool only, not of the agent's other memory.
        export = Export(address, bytes(library.get_partial_agent_metadata(registered, True, ["UCX"])))
        self._exports[pool] = export
        self._mapped.append(memory)
        return export

    def _serve(self, change: int) -> None:
        self._num_served += change

    def _run(self) -> None:
        while True:
            is_idle = not self._in_progress and self._num_served <= 0
            try:
                call = self._calls.get(timeout=None if is_idle else PACE_S)
            except queue.Empty:
                self._progress()
                continue
            if call is None:
                return
            call()
            del call  # it may reference a pool

    def _progress(self) -> None:
        if self._num_served > 0:
            self._try(self._library.get_new_notifs)
        for in_progress in list(self._in_progress):
            self._look(in_progress, self._library.check_xfer_state)

    def _look(self, in_progress: _InProgress, ask: Callable[[Any], str]) -> None:
        try:
            state = ask(in_progress.handle)
            error = "" if state == "DONE" else "its state is ERR"
        except Exception as raised:  # the library reports a lost peer by raising
            state, error = "ERR", str(raised) or type(raised).__name__
        if state == "PROC":
            return
        self._in_progress.remove(in_progress)
        self._try(lambda: self._library.release_xfer_handle(in_progress.handle))
        reader = in_progress.reader
        reader.num_in_progress -= 1
        in_progress.read.ended(error)
        in_progress.wake()
        if reader.is_closed:
            self.retire(reader)

    def _try(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:  # an error of cleaning up after a lost peer must not end the thread
            log.warning("NIXL failed", extra={"error": str(error) or type(error).__name__})


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- transport ------------------------------------------------------------------------------------------------

NIXL: Final = transfer_pb2.TRANSPORT_KIND_NIXL
WINDOW: Final = 3  # chunks: one is being hashed, one read, one copied
HANDSHAKE_S: Final = 30.0  # a new process first makes its agent and registers its pool
MAX_METADATA_BYTES: Final = 65_536  # some 450 with UCX on one host
_HELLO: Final = struct.Struct("<4sIQQI")  # magic, blocks, bytes per block, address, bytes of the metadata that follow
_MAGIC: Final = b"PDKX"  # each block is one run of bytes
_MAGIC_OF_LAYERS: Final = b"PDKY"  # each block is one run of bytes for each layer


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
    def __init__(
        self, link: ReceiveLink, reader: NixlReader, address: int, num_blocks: int, runs_per_block: int
    ) -> None:
        self._link, self._reader = link, reader
        # of the sender's pool
        self._address, self._num_blocks, self._source_runs = address, num_blocks, runs_per_block
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
        parts = layout.runs(frame.part)
        ranges = ranges_of(sources, layout.block_bytes, parts, self._num_blocks, self._source_runs)
        return [(base + begin, end - begin) for begin, end in ranges]


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
        magic = _MAGIC if pool.runs_per_block == 1 else _MAGIC_OF_LAYERS
        sock.sendall(_HELLO.pack(magic, pool.num_blocks, pool.block_bytes, address, len(metadata)) + metadata)
        await_taken(sock, "pool")
        return sock, NixlSend(self._exporter)

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        hello = receive_within(link, _HELLO.size, HANDSHAKE_S)
        magic, num_blocks, block_bytes, address, size = _HELLO.unpack(hello)
        is_known = magic in (_MAGIC, _MAGIC_OF_LAYERS)
        if not is_known or block_bytes != link.source.block_bytes or not num_blocks:
            raise BadFrame(f"a pool of {num_blocks} blocks of {block_bytes} bytes, expected {link.source.block_bytes}")
        runs_per_block = runs_offered(link.source.form, is_in_layers=magic == _MAGIC_OF_LAYERS)
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
        return NixlReceive(link, reader, address, num_blocks, runs_per_block)


TRANSPORT: Final = Nixl()

"""What a transport fills in.

The connection is the same for every transport: a stream socket for frames, one thread and one book on each side. A
path is how the bytes of an announced chunk travel: behind their frame (tcp), copied by the receiver from the sender's
pool (shm), or by a library of their own. Each side has a half, which only the connection's
thread calls.

    sender                                          receiver
    post(job): the frame, through the link  ------> land(frame, claim), where the book allowed a claim
    hear(frame)  <--------------------------------- CREDIT, as often as the path needs
    link.finished(job): nobody reads it any more    link.settle(claim, ...): all is in place, this is its checksum

`post` and `land` may return before the bytes have moved: `poll` is called whenever the thread wakes, and any thread
may wake it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Protocol

from kvtransfer.channel import Channel
from kvtransfer.checksum import Checksum
from kvtransfer.departure import Job
from kvtransfer.frames import Frame
from kvtransfer.landing import Claim
from kvtransfer.parts import Lanes
from kvtransfer.writer import Writer
from pdserve.engine.gpu.extent import Extent
from pdserve.engine.interface import KvPool


class SendLink(Protocol):
    """What a path asks of its connection on the prefill side."""

    pool: KvPool
    memory: memoryview  # the pool's, read-only
    block_bytes: int
    writer: Writer  # of the connection's socket

    def digest(self, views: Iterable[memoryview]) -> bytes:
        """The checksum of these bytes, in order."""
        ...

    def head(self, job: Job, checksum: bytes, *, slot: int = 0, length: int = 0) -> bytes:
        """The chunk's frame with its stamps; `length` bytes of the path's own follow it on the socket.

        To be asked for once the bytes have been copied or their checksum taken. Raises StaleSource, which `post`
        lets through: nothing of the job was posted, and nobody reads its source blocks any more.
        """
        ...

    def views(self, job: Job) -> list[memoryview]:
        """The job's bytes in the pool: of its source blocks, its part."""
        ...

    def extent_of(self, job: Job) -> Extent:
        """The same, of each block, for a pool on a device, where a part is equal runs of bytes."""
        ...

    def finished(self, job: Job) -> None:
        """Nobody reads the job's source blocks any more, whether all of it went out or not."""
        ...

    def stale(self, job: Job, error: str) -> None:
        """For a path that asks for the head after `post` has returned: StaleSource was raised, with this text."""
        ...

    def wake(self) -> None:
        """From any thread: `poll` has something to find."""
        ...

    def retire(self) -> None:
        """Ends the connection (raises Gone) where no transfer of it is open; who starts the next makes a new one."""
        ...


class SendPath(Protocol):
    """The sender's half."""

    def attach(self, link: SendLink) -> None:
        """The connection is up. Called once, before anything else."""
        ...

    @property
    def chunk_bytes(self) -> int | None:
        """The most that the next chunk may have; None: as much as the receiver agreed to."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether a chunk can be posted now."""
        ...

    def post(self, job: Job) -> None:
        """Begins to send a chunk. Its source blocks are read until `link.finished`."""
        ...

    def forsake(self, job: Job) -> None:
        """The job's transfer has failed: `link.finished` is to come as soon as can be. May be called again."""
        ...

    def hear(self, frame: Frame) -> None:
        """A CREDIT of the receiver's half. Raises BadFrame on what that half would not say."""
        ...

    def poll(self) -> None: ...

    def close(self) -> None:
        """Afterwards nothing of this path reads the pool."""
        ...


class ReceiveLink(Protocol):
    """What a path asks of its connection on the decode side."""

    pool: KvPool
    memory: memoryview  # the pool's
    block_bytes: int
    chunk_bytes: int  # the most that one chunk may have
    source: Lanes  # of the sender's blocks, for who reads them in the sender's pool
    target: Lanes  # of this pool's blocks
    channel: Channel
    checksum: Checksum  # that the pair has agreed on

    def digest(self, views: Iterable[memoryview]) -> bytes: ...

    def views(self, claim: Claim) -> list[memoryview]:
        """Where the claim's bytes belong in the pool, in the order in which they come."""
        ...

    def size_of(self, frame: Frame) -> int:
        """The bytes that a chunk brings."""
        ...

    def enter(self, claim: Claim) -> bool:
        """Opens one write into the claim's blocks. False: the transfer is over, and not a byte may be written."""
        ...

    def leave(self, claim: Claim) -> None:
        """Closes the write. Any thread may call it."""
        ...

    def settle(self, claim: Claim, frame: Frame, checksum: bytes) -> None:
        """All of the chunk is in place, and this is the checksum of what lies there. Any thread may call it."""
        ...


class ReceivePath(Protocol):
    """The receiver's half."""

    def check(self, frame: Frame) -> None:
        """Raises BadFrame on a chunk that no sender's half announces; the number of blocks has been checked."""
        ...

    def land(self, frame: Frame, claim: Claim | None) -> None:
        """Takes a chunk in; without a claim its bytes go nowhere. Settles it, now or from `poll`."""
        ...

    def poll(self) -> None: ...

    def close(self) -> None:
        """Afterwards nobody, here or on the other side, can write into the pool by this path."""
        ...


class Transport(Protocol):
    """How the two halves of one kind find each other."""

    kind: int  # of TransportKind
    name: str
    is_same_host: bool  # both ends must be able to share memory
    is_for_hosts: bool  # a pool in host memory may be at an end of it
    is_for_devices: bool  # a pool on a GPU may be
    divides_blocks: bool  # it sends blocks in groups of layers, too

    def why_not(self, *, is_on_host: bool = True) -> str:
        """What this system lacks for it with a pool there; empty where it can be had."""
        ...

    def listen(self, host: str) -> socket.socket: ...

    def address(self, door: socket.socket) -> str:
        """What a sender is told of the listening socket."""
        ...

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        """A blocking socket with that timeout. Raises OSError."""
        ...

    def admits(self, sock: socket.socket) -> bool:
        """Whether a socket that came in may speak at all, before its ticket is read."""
        ...

    def sender(self, sock: socket.socket, pool: KvPool) -> SendPath:
        """After the ticket: what the halves tell each other before the first frame. Blocking. Raises OSError."""
        ...

    def receiver(self, link: ReceiveLink) -> ReceivePath:
        """The other end of `sender`. Raises OSError."""
        ...

"""The protocols that a transport implements.

The connection is the same for all transports: a stream socket for frames, with one thread and one transfer table on
each side. A transport transfers the bytes of a chunk: they follow their frame (tcp), the receiver copies them from the
sender's pool (shm), or a library transfers them. Each side has one half of it, which only the connection's thread
calls.

    sender                                          receiver
    post(job): the frame, through the link  ------> receive(frame, claim), if the table allowed a claim
    on_credit(frame) <--------------------------------- CREDIT, as often as it needs
    link.finished(job): it is no longer read        link.settle(claim, ...): it is in place, with this checksum

`post` and `receive` may return before the bytes are transferred. The thread calls `poll` whenever it wakes, and any
thread may wake it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.link.channel import Channel, Writer
from kvtransfer.protocol.device import Fence
from kvtransfer.protocol.frames import Checksum, Frame
from kvtransfer.protocol.plan import PartLayout
from kvtransfer.protocol.transfers import Claim, Job
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool


class SendLink(Protocol):
    """The interface of a connection on the prefill side, for its half of the transport."""

    pool: KvPool
    memory: memoryview  # the pool's, read-only
    block_bytes: int
    writer: Writer  # of the connection's socket

    def digest(self, views: Iterable[memoryview]) -> bytes:
        """The checksum of these bytes, in order."""
        ...

    def head(self, job: Job, checksum: bytes, *, slot: int = 0, length: int = 0) -> bytes:
        """The chunk's frame with its stamps. The half then writes `length` bytes to the socket.

        Call it after the bytes were copied or their checksum was computed. Raises StaleSource, which `post` passes on:
        nothing of the job was sent, and its source blocks are no longer read.
        """
        ...

    def views(self, job: Job) -> list[memoryview]:
        """The job's bytes in the pool: its part of its source blocks."""
        ...

    def extent_of(self, job: Job) -> StridedExtent:
        """The part's bytes in each block, for a pool on a device."""
        ...

    def finished(self, job: Job) -> None:
        """The job's source blocks are no longer read. It may be sent only in part."""
        ...

    def stale(self, job: Job, error: str) -> None:
        """For a half that calls `head` after `post` has returned: `head` raised StaleSource with this text."""
        ...

    def wake(self) -> None:
        """From any thread: `poll` has something to do."""
        ...

    def retire(self) -> None:
        """Ends the connection (raises Gone) if it has no open transfer. The next transfer makes a new connection."""
        ...


class SendHalf(Protocol):
    """The sender's half."""

    def attach(self, link: SendLink) -> None:
        """The connection is up. Called once, before anything else."""
        ...

    @property
    def chunk_bytes(self) -> int | None:
        """The maximum number of bytes of the next chunk; None: the limit agreed with the receiver."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether a chunk can be posted now."""
        ...

    def post(self, job: Job) -> None:
        """Begins to send a chunk. Its source blocks are read until `link.finished`."""
        ...

    def abandon(self, job: Job) -> None:
        """The job's transfer has failed, so call `link.finished` as soon as possible. May be called again."""
        ...

    def on_credit(self, frame: Frame) -> None:
        """A CREDIT of the receiver's half. Raises BadFrame on an invalid one."""
        ...

    def poll(self) -> None: ...

    def close(self) -> None:
        """After this call, it does not read the pool."""
        ...


class ReceiveLink(Protocol):
    """The interface of a connection on the decode side, for its half of the transport."""

    pool: KvPool
    memory: memoryview  # the pool's
    block_bytes: int
    chunk_bytes: int  # the maximum size of one chunk
    source: PartLayout  # layout of the sender's blocks, for transports that read them in the sender's pool
    target: PartLayout  # of this pool's blocks
    channel: Channel
    checksum: Checksum  # the one on which both sides agreed

    def digest(self, views: Iterable[memoryview]) -> bytes: ...

    def views(self, claim: Claim) -> list[memoryview]:
        """The places of the claim's bytes in the pool, in the order in which they are sent."""
        ...

    def size_of(self, frame: Frame) -> int:
        """The size of a chunk."""
        ...

    def enter(self, claim: Claim) -> bool:
        """Opens one write into the claim's blocks. False: the transfer has ended, and no byte may be written."""
        ...

    def leave(self, claim: Claim) -> None:
        """Closes the write. Any thread may call it."""
        ...

    def settle(self, claim: Claim, frame: Frame, checksum: bytes) -> None:
        """The whole chunk is in place; `checksum` is that of the received bytes. Any thread may call it."""
        ...


class ReceiveHalf(Protocol):
    """The receiver's half."""

    def check(self, frame: Frame) -> None:
        """Raises BadFrame on an invalid chunk; the number of blocks was checked before."""
        ...

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        """Receives a chunk; without a claim its bytes are discarded. Settles it, now or from `poll`."""
        ...

    def poll(self) -> None: ...

    def close(self) -> None:
        """After this call, neither side can write into the pool through this transport."""
        ...


class Transport(Protocol):
    """How the two halves of one transport connect."""

    kind: int  # its number on the wire, which no other transport has: of TransportKind, or the next one
    name: str  # that of its file
    order: int  # its place among those of `auto`, which prefers the lowest
    is_same_host: bool  # requires that both processes can share memory
    is_for_hosts: bool  # supports pools in host memory
    is_for_devices: bool  # supports pools on a GPU
    divides_blocks: bool  # can send blocks in groups of layers
    has_slots: bool  # the receiver returns a slot for each chunk, so a chunk that is lost on the way costs a slot

    def why_not(self, *, is_on_host: bool = True) -> str:
        """What this system lacks for the transport, for a pool on such a device; empty if it can be used."""
        ...

    def listen(self, host: str) -> socket.socket: ...

    def address(self, listener: socket.socket) -> str:
        """The address of the listening socket, for senders."""
        ...

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        """A blocking socket with that timeout. Raises OSError."""
        ...

    def admits(self, sock: socket.socket) -> bool:
        """Whether an accepted socket may continue, before its ticket is read."""
        ...

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        """Exchanges the transport's messages after the ticket and before the first frame. Blocking. Raises OSError.

        Returns the socket for frames, and the sender's half.
        """
        ...

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        """The receiver's side of `sender`. Raises OSError."""
        ...

    def prepare(self, pool: KvPool, runs: Sequence[StridedExtent], limits: CopyLimits | None) -> None:
        """Does what would take seconds in the first transfer of a pool on a GPU. `runs`: all byte runs in which its
        blocks may be sent. May raise TransferFailed."""
        ...

    def fence(self, pool: KvPool) -> Fence | None:
        """The work that the device of a pool on a GPU has queued so far."""
        ...


class OnHost:
    """A transport between pools in host memory."""

    is_for_hosts, is_for_devices = True, False
    divides_blocks = True

    def why_not(self, *, is_on_host: bool = True) -> str:
        return ""

    def prepare(self, pool: KvPool, runs: Sequence[StridedExtent], limits: CopyLimits | None) -> None:
        pass

    def fence(self, pool: KvPool) -> Fence | None:
        return None

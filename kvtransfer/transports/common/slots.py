"""What transports share that read the sender's pool: slots of chunks, local sockets, the handshake before the first
frame, and the pool of another process of this host.

A chunk is announced with its source blocks' numbers. The sender may announce one chunk per slot. The receiver returns a
slot when it no longer reads the source blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Final, final

from kvtransfer.protocol.frames import BadFrame, Frame, Kind
from kvtransfer.protocol.send_transfers import StaleSource
from kvtransfer.protocol.transfers import Job
from kvtransfer.transports.common.interface import ReceiveLink, SendLink
from pdserve.core.kv.kv_shape import BlockForm
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import is_sealed

_NUMBER_BYTES: Final = 4


@final
class Slots:
    """The slots of a sender."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._out: dict[int, Job | None] = {}  # announced; None: abandoned in the meantime

    def __len__(self) -> int:
        """The number of announced chunks."""
        return len(self._out)

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        """A slot for a chunk that will be announced or returned."""
        return self._free.popleft()

    def put_back(self, slot: int) -> None:
        self._free.append(slot)

    def announce(self, slot: int, job: Job, link: SendLink, digest: bytes) -> None:
        """Raises what `link.head` raises; the slot is then free again."""
        numbers = array("I", job.chunk.sources).tobytes()
        try:
            head = link.head(job, digest, slot=slot, length=len(numbers))
        except StaleSource:
            self.put_back(slot)
            raise
        self._out[slot] = job
        link.writer.write(head + numbers)

    def abandon(self, job: Job, link: SendLink) -> None:
        """Finishes the job immediately: the receiver may still read the blocks, but will not commit the transfer."""
        for slot in [slot for slot, one in self._out.items() if one is job]:
            self._out[slot] = None
            link.finished(job)

    def on_credit(self, frame: Frame, link: SendLink) -> None:
        """The receiver returns a slot. Raises BadFrame if it has none."""
        if frame.slot not in self._out:
            raise BadFrame(f"credit for slot {frame.slot}, which is not in use")
        job = self._out.pop(frame.slot)
        self._free.append(frame.slot)
        if job is not None:
            link.finished(job)

    def clear(self) -> None:
        """The connection has ended, so no chunk is announced any more."""
        self._out.clear()


def check_numbers(frame: Frame, num_slots: int) -> None:
    """Raises BadFrame unless the frame announces the numbers of its blocks, in a slot that exists."""
    if frame.length != frame.count * _NUMBER_BYTES or frame.slot >= num_slots:
        raise BadFrame(f"{frame.count} blocks in slot {frame.slot} with {frame.length} bytes behind the header")


def read_numbers(link: ReceiveLink, frame: Frame, num_blocks: int) -> array[int]:
    """The source blocks of a chunk. Raises BadFrame on a block outside the sender's pool."""
    data = bytearray(frame.length)
    link.channel.fill(memoryview(data))
    numbers = array("I", bytes(data))
    if max(numbers) >= num_blocks:
        raise BadFrame(f"source block {max(numbers)} of a pool of {num_blocks}")
    return numbers


def give_back(link: ReceiveLink, frame: Frame) -> None:
    link.channel.post(Frame(Kind.CREDIT, frame.tag, slot=frame.slot).encode())


# --- local sockets and the handshake --------------------------------------------------------------------------

TAKEN: Final = b"PDOK"  # the receiver has accepted the offer


class UnixListener:
    """The listening socket of transports between processes of one host."""

    is_same_host = True

    def listen(self, host: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0pdserve-kv-" + secrets.token_hex(16))
        return listener

    def address(self, listener: socket.socket) -> str:
        return bytes(listener.getsockname())[1:].decode()

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + address)
            if not self.admits(sock):  # abstract names have no owner, and anyone can take that of an ended receiver
                raise PermissionError("the receiver's socket belongs to another user")
        except BaseException:
            sock.close()
            raise
        return sock

    def admits(self, sock: socket.socket) -> bool:
        """Accepts only this user's processes."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        return bool(user == os.geteuid())


def await_taken(sock: socket.socket, what: str) -> None:
    """The sender's side, blocking: waits until the receiver sends TAKEN. Raises OSError if it does anything else."""
    answer = b""
    while len(answer) < len(TAKEN):
        received = sock.recv(len(TAKEN) - len(answer))
        if not received:
            break
        answer += received
    if answer != TAKEN:
        raise OSError(f"the receiver did not take the {what}")


def receive_within(link: ReceiveLink, num_bytes: int, timeout_s: float) -> bytes:
    """Reads from a connection's non-blocking socket. Raises BadFrame if the bytes do not come."""
    data = bytearray(num_bytes)
    view, ends_s = memoryview(data), time.monotonic() + timeout_s
    while view:
        received = link.channel.receive([view])
        left_s = ends_s - time.monotonic()
        if received == 0 and (left_s <= 0 or not link.channel.wait(left_s)):
            raise BadFrame(f"{num_bytes} bytes of the handshake did not come in {timeout_s:.0f} s")
        view = view[received:]
    return bytes(data)


# --- pool of another process ----------------------------------------------------------------------------------
# It is mapped read-only.
#
# The owner sends the descriptor of its memory file over the control socket, after the ticket. Unlike a name, a
# descriptor cannot be used by any other program.

_HELLO: Final = struct.Struct("<4sIQ")  # magic, blocks, bytes per block
_MAGIC: Final = b"PDKP"  # each block is one run of bytes
_MAGIC_OF_LAYERS: Final = b"PDKL"  # each block is one run of bytes for each layer
HELLO_BYTES: Final = _HELLO.size


def offer(sock: socket.socket, pool: KvPool) -> None:
    """Raises OSError if the pool cannot be shared or the socket is closed."""
    if pool.descriptor is None:
        raise OSError("the sender's pool is not in memory that can be shared")
    magic = _MAGIC if pool.runs_per_block == 1 else _MAGIC_OF_LAYERS
    hello = _HELLO.pack(magic, pool.num_blocks, pool.block_bytes)
    socket.send_fds(sock, [hello], [pool.descriptor])


def runs_offered(form: BlockForm, *, is_in_layers: bool) -> int:
    """The runs of a block in the sender's pool. Raises BadFrame if blocks of this format cannot be in layers."""
    if is_in_layers and form.is_scaled:
        raise BadFrame(f"a pool with a run for each layer, whose {form.dtype} blocks end with the scales of all layers")
    return form.num_layers if is_in_layers else 1


@final
class SharedPool:
    """Another process's pool. Takes over the descriptor."""

    def __init__(self, hello: bytes, descriptors: list[int], block_bytes: int) -> None:
        """Raises BadFrame on an invalid offer, and OSError if it cannot be mapped."""
        try:
            if len(descriptors) != 1 or len(hello) != HELLO_BYTES:
                raise BadFrame(f"{len(hello)} bytes and {len(descriptors)} descriptors where a pool was to be offered")
            magic, self.num_blocks, theirs = _HELLO.unpack(hello)
            num_bytes = self.num_blocks * block_bytes
            self.is_in_layers = magic == _MAGIC_OF_LAYERS
            if magic not in (_MAGIC, _MAGIC_OF_LAYERS) or self.num_blocks == 0 or theirs != block_bytes:
                raise BadFrame(
                    f"a pool of {self.num_blocks} blocks of {theirs} bytes, expected blocks of {block_bytes}"
                )
            if not is_sealed(descriptors[0]) or os.fstat(descriptors[0]).st_size < num_bytes:
                raise BadFrame(f"a pool of {num_bytes} bytes in a file that is shorter, or can be made so")
            self._map = mmap.mmap(descriptors[0], num_bytes, prot=mmap.PROT_READ)
            self.memory = memoryview(self._map)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view of a block still exists; the mapping ends with it
            self.memory.release()
            self._map.close()


# --- identity of the host -------------------------------------------------------------------------------------
# Two processes get the same id if one can pass a file descriptor to the other over an abstract Unix socket: the same
# boot of the same kernel, the same network namespace (it contains the abstract names), and the same user in the same
# user namespace (each side checks the other's credentials). Mount and process namespaces do not matter, because a pool
# is an anonymous memory file, which is passed as a descriptor.


def can_share_memory() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")


def host_id() -> str:
    """Empty if this process cannot share memory."""
    if not can_share_memory():
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    except OSError:
        return ""
    return "/".join([boot, *names, str(os.geteuid())])

"""Slots in memory that two processes share: the sender copies blocks in, the receiver copies them out.

The memory is an anonymous file (memfd): nothing to unlink, nothing left behind by a SIGKILL, no /dev/shm limit.
Its size is sealed, so that a peer cannot shrink it under our feet. The receiver makes it and passes the
descriptor over the control socket, after the ticket.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from typing import Final

from kvtransfer.plan import MAX_CHUNK_BYTES

HELLO: Final = struct.Struct("<4sII")  # magic, slots, slot bytes
HELLO_MAGIC: Final = b"PDRG"
MAX_SLOTS: Final = 1024
_SEALS: Final = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class Ring:
    """Takes over the descriptor."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes, self._fd = slots, slot_bytes, fd
        self._map = mmap.mmap(fd, slots * slot_bytes)
        self._memory = memoryview(self._map)

    @staticmethod
    def create(slots: int, slot_bytes: int) -> Ring:
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slots * slot_bytes)
            seals = 0
            for name in _SEALS:
                seals |= getattr(fcntl, name)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return Ring(fd, slots, slot_bytes)
        except BaseException:
            os.close(fd)
            raise

    def slot(self, number: int, num_bytes: int) -> memoryview:
        """The first num_bytes of a slot. Raises IndexError outside the ring."""
        if not (0 <= number < self.slots and 0 <= num_bytes <= self.slot_bytes):
            raise IndexError(f"{num_bytes} bytes of slot {number}; the ring has {self.slots} of {self.slot_bytes}")
        begin = number * self.slot_bytes
        return self._memory[begin : begin + num_bytes]

    def offer(self, sock: socket.socket) -> None:
        socket.send_fds(sock, [HELLO.pack(HELLO_MAGIC, self.slots, self.slot_bytes)], [self._fd])

    @staticmethod
    def accept(sock: socket.socket) -> Ring:
        """Raises OSError where the peer offers no ring of an acceptable size."""
        hello, fds, _, _ = socket.recv_fds(sock, HELLO.size, 1)
        try:
            if len(fds) != 1 or len(hello) != HELLO.size:
                raise OSError("the receiver closed the connection before it offered a ring")
            magic, slots, slot_bytes = HELLO.unpack(hello)
            is_sane = magic == HELLO_MAGIC and 1 <= slots <= MAX_SLOTS and 1 <= slot_bytes <= MAX_CHUNK_BYTES
            if not is_sane or os.fstat(fds[0]).st_size < slots * slot_bytes:
                raise OSError(f"the receiver offered a ring of {slots} slots of {slot_bytes} bytes")
            return Ring(fds[0], slots, slot_bytes)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a slot's view is still alive; the mapping goes with it
            self._memory.release()
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

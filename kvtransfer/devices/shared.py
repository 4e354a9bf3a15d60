"""A pool of another process on this machine, mapped read-only, and the identity of a host, which tells whether two
processes can share memory.

The owner sends the descriptor of its memory file over the control socket, after the ticket. Unlike a name, a descriptor
cannot be used by any other program.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Final, final

from kvtransfer.protocol.frames import BadFrame
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import is_sealed

_HELLO: Final = struct.Struct("<4sIQ")  # magic, blocks, bytes per block
_MAGIC: Final = b"PDKP"
HELLO_BYTES: Final = _HELLO.size


def offer(sock: socket.socket, pool: KvPool) -> None:
    """Raises OSError if the pool cannot be shared or the socket is closed."""
    if pool.descriptor is None:
        raise OSError("the sender's pool is not in memory that can be shared")
    hello = _HELLO.pack(_MAGIC, pool.num_blocks, pool.block_bytes)
    socket.send_fds(sock, [hello], [pool.descriptor])


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
            if magic != _MAGIC or self.num_blocks == 0 or theirs != block_bytes:
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

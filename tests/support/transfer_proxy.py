"""A proxy in the middle of a data connection. It forwards frames, and may change, delay or drop them.

tcp uses two sockets. shm uses two Unix sockets and a pool of the proxy: it copies what the sender announces into that
pool, and offers it to the receiver instead of the sender's. It can so change what the receiver reads.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from array import array
from collections.abc import Callable
from typing import Any

from kvtransfer.protocol.frames import ANSWER_BYTES, GREETING_BYTES, HEADER_BYTES, Frame, Kind, decode
from kvtransfer.transports.common.slots import HELLO_BYTES, SharedPool, offer
from kvtransfer.transports.shm import CHUNK_BYTES, SHM, WINDOW
from tests.support.transfer_ends import HostPool, runs_in

# (frame, header and inline payload, the chunk's bytes) -> what to forward; None closes the connection
Hook = Callable[[Frame, bytearray, memoryview], bytes | bytearray | None]


def read_exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view)
        if received == 0:
            raise ConnectionError("closed")
        view = view[received:]
    return data


class Proxy:
    """Stands before one receiver; use as the `wrap` of make_pair."""

    def __init__(self, receiver: Any, hook: Hook, block_bytes: int, runs_per_block: int = 1) -> None:
        """Blocks are those of the sender's pool."""
        self._receiver, self._hook = receiver, hook
        self._block_bytes, self._runs_per_block = block_bytes, runs_per_block
        self._lock = threading.Lock()  # guards the two below
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    async def Open(self, request: Any, context: Any) -> Any:
        """The receiver's answer with the address of this proxy."""
        answer = await self._receiver.servicer.Open(request, context)
        is_shm = answer.transport == SHM
        door = socket.socket(socket.AF_UNIX if is_shm else socket.AF_INET, socket.SOCK_STREAM)
        upstream = ("\0" + answer.address) if is_shm else ("127.0.0.1", int(answer.address.rpartition(":")[2]))
        if is_shm:
            name = f"kv-proxy-{secrets.token_hex(8)}"
            door.bind("\0" + name)
            answer.address = name
        else:
            door.bind(("127.0.0.1", 0))
            answer.address = f"127.0.0.1:{door.getsockname()[1]}"
        door.listen(1)
        door.settimeout(60)
        self._keep(door)
        self._spawn(self._serve, door, upstream, is_shm)
        return answer

    async def Pull(self, request: Any, context: Any) -> Any:
        return await self._receiver.servicer.Pull(request, context)

    def close(self) -> None:
        self._shut(*self._sockets)
        for thread in self._threads:
            thread.join(60)

    def _shut(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            sock.close()
        with self._lock:
            self._sockets.difference_update(sockets)

    def _keep(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets.update(sockets)

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _serve(self, door: socket.socket, upstream: Any, is_shm: bool) -> None:
        pools: Pools | None = None
        ends = [door]
        with contextlib.suppress(OSError):
            try:
                ends.append(door.accept()[0])
                ends.append(socket.socket(door.family, socket.SOCK_STREAM))
                self._keep(*ends)
                _, down, up = ends
                up.connect(upstream)
                up.sendall(read_exactly(down, GREETING_BYTES))
                down.sendall(read_exactly(up, ANSWER_BYTES))
                if is_shm:
                    pools = Pools(down, self._block_bytes, self._runs_per_block)
                    offer(up, pools.mine)
                self._spawn(self._back, up, down)
                self._forward(down, up, pools)
            finally:
                self._shut(*ends)
                if pools is not None:
                    pools.close()

    def _forward(self, down: socket.socket, up: socket.socket, pools: Pools | None) -> None:
        while True:
            message = read_exactly(down, HEADER_BYTES)
            frame = decode(message, 2**30)
            message += read_exactly(down, frame.num_behind)
            body = memoryview(message)[HEADER_BYTES + frame.num_behind - frame.length :]
            if pools is not None and frame.kind is Kind.CHUNK:
                body.release()
                body = pools.take(frame, message)
            forwarded = self._hook(frame, message, body)
            if pools is not None and frame.kind is Kind.CHUNK:
                pools.put(frame, body)
            body.release()
            if forwarded is None:
                return
            up.sendall(forwarded)

    def _back(self, up: socket.socket, down: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := up.recv(4096):
                down.sendall(data)


class Pools:
    """The sender's pool, and the one that the receiver reads instead. Each slot has a run of blocks."""

    def __init__(self, down: socket.socket, block_bytes: int, runs_per_block: int) -> None:
        hello, descriptors, _, _ = socket.recv_fds(down, HELLO_BYTES, 1)
        self._theirs = SharedPool(hello, descriptors, block_bytes)
        self._run_blocks = max(1, CHUNK_BYTES // block_bytes)
        self.mine = HostPool(WINDOW * self._run_blocks, block_bytes, runs_per_block=runs_per_block)

    def take(self, frame: Frame, message: bytearray) -> memoryview:
        """A copy of the chunk's blocks. Puts the blocks of the slot's run into the message."""
        first, theirs, mine = frame.slot * self._run_blocks, self._theirs, self.mine
        numbers = array("I", bytes(message[-frame.length :]))
        message[-frame.length :] = array("I", range(first, first + frame.count)).tobytes()
        sizes = theirs.num_blocks, mine.block_bytes, mine.runs_per_block
        return memoryview(bytearray(b"".join(b"".join(runs_in(theirs.memory, one, *sizes)) for one in numbers)))

    def put(self, frame: Frame, body: memoryview) -> None:
        """Copies the chunk's blocks, which may have been changed, into the slot's run of blocks."""
        at = 0
        for block in range(frame.count):
            for run in self.mine.runs(frame.slot * self._run_blocks + block):
                run[:] = body[at : at + len(run)]
                at += len(run)

    def close(self) -> None:
        self._theirs.close()

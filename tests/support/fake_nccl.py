"""A stand-in for NCCL over sockets of this host, between processes or inside one.

Like NCCL, a receive waits for its sender until its connection is closed, and a send for its receive: NCCL may buffer a
message, but does not promise to. The loss of a killed peer may be reported, or
may leave a hang. Both ends must issue their calls in the same order; otherwise messages are mixed up or never end. A
closed connection does not access memory any more. `Trouble` adds other faults.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import threading
import time
from typing import Any

from kvtransfer.protocol.device import MESSAGE_S, Blocks, Wake
from pdserve.core.errors import TransferFailed
from tests.support.fake_device import PLAIN, FakeBlocks, FakeCopying, Stream, Trouble

JOIN_S = 60.0
_LOOK_S = 0.01  # between two looks at whether the connection was closed
_SIZE = struct.Struct("<Q")


class FakeConnector:
    def __init__(self, version: str = "2.30", trouble: Trouble = PLAIN) -> None:
        self.version, self._trouble = version, trouble
        self._doors: dict[
            bytes, tuple[socket.socket, float]
        ] = {}  # address -> since when rank 0 waits there for rank 1
        self._lock = threading.Lock()

    def new_id(self) -> bytes:
        unique_id, now_s = secrets.token_bytes(16), time.monotonic()
        door = socket.socket(socket.AF_UNIX)
        door.bind(_address(unique_id))
        door.listen(1)
        with self._lock:
            for old in [one for one, (_, since_s) in self._doors.items() if since_s < now_s - JOIN_S]:
                self._doors.pop(old)[0].close()  # the process that made it never joined
            self._doors[unique_id] = door, now_s
        return unique_id

    def join(self, device: Any, unique_id: bytes, rank: int) -> FakeConnection:
        try:
            sock = self._accept(unique_id) if rank == 0 else _connect(unique_id)
        except (OSError, KeyError) as error:
            raise TransferFailed(f"the other NCCL rank has not come: {error}") from error
        return FakeConnection(sock, self._trouble)

    def _accept(self, unique_id: bytes) -> socket.socket:
        with self._lock:
            door, _ = self._doors.pop(unique_id)
        with door:
            door.settimeout(JOIN_S)
            return door.accept()[0]


class FakeConnection:
    def __init__(self, sock: socket.socket, trouble: Trouble) -> None:
        sock.settimeout(_LOOK_S)
        self._sock, self._trouble = sock, trouble
        self._rng = random.Random(f"{trouble.seed} {os.getpid()} {id(sock)}")
        self._stream = Stream("connection", trouble)
        self._is_closed = False

    def send(self, source: Blocks, num_bytes: int, wake: Wake) -> FakeCopying:
        assert isinstance(source, FakeBlocks)
        view = source.view(0, -(-num_bytes // source.block_bytes))[:num_bytes]
        flip = self._rng.randrange(num_bytes) if self._rng.random() < self._trouble.flipped else None

        def work() -> None:
            self._write(memoryview(_SIZE.pack(num_bytes)))
            if flip is None:
                self._write(view)
            else:
                self._write(memoryview(bytes(view[:flip]) + bytes([view[flip] ^ 1]) + bytes(view[flip + 1 :])))
            self._read(memoryview(bytearray(1)))

        return self._queue(work, wake)

    def receive(self, target: Blocks, num_bytes: int, wake: Wake) -> FakeCopying:
        assert isinstance(target, FakeBlocks)
        view = target.view(0, -(-num_bytes // target.block_bytes))[:num_bytes]

        def work() -> None:
            size = bytearray(_SIZE.size)
            self._read(memoryview(size))
            (size_sent,) = _SIZE.unpack(size)
            self._read(view[:size_sent])
            if size_sent != num_bytes:  # the two ends did not issue messages in the same order
                self._hang()
            self._write(memoryview(b"\1"))

        return self._queue(work, wake)

    def close(self) -> None:
        self._is_closed = True
        self._stream.end()
        self._sock.close()

    def _queue(self, work: Any, wake: Wake) -> FakeCopying:
        if self._is_closed:
            raise TransferFailed("the NCCL pair is closed")
        luck, trouble = self._rng.random(), self._trouble
        if luck < trouble.failed / 2:
            raise TransferFailed("NCCL failed: an error of the stand-in's, when asked")

        def run() -> bytes:
            if luck < trouble.failed:
                raise TransferFailed("NCCL failed: an error of the stand-in's")
            if luck < trouble.failed + trouble.hung:
                self._hang()
            work()
            return b""

        return self._stream.queue(run, wake, MESSAGE_S)

    def _write(self, view: memoryview) -> None:
        while view:
            self._check()
            try:
                view = view[self._sock.send(view) :]
            except TimeoutError:
                continue
            except OSError:
                self._lost()

    def _read(self, view: memoryview) -> None:
        while view:
            self._check()
            try:
                received = self._sock.recv_into(view)
            except TimeoutError:
                continue
            except OSError:
                received = 0
            if not received:
                self._lost()
            view = view[received:]

    def _lost(self) -> None:
        """The peer has closed its connection, or was killed."""
        if self._trouble.loses_the_dead:
            raise TransferFailed("NCCL failed: the other rank is gone")
        self._hang()

    def _hang(self) -> None:
        while True:
            self._check()
            time.sleep(_LOOK_S)

    def _check(self) -> None:
        if self._is_closed:
            raise TransferFailed("the NCCL pair is closed")


def _connect(unique_id: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(JOIN_S)
    try:
        sock.connect(_address(unique_id))
    except OSError:
        sock.close()
        raise
    return sock


def _address(unique_id: bytes) -> bytes:
    return b"\0pdserve-fake-connection-" + unique_id.hex().encode()

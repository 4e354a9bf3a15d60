"""Two real ends of a transfer in one process, joined by a real gRPC server, sockets and shared memory."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from kvtransfer.dial import open_request
from kvtransfer.receiver import StreamReceiver
from kvtransfer.sender import StreamSender
from kvtransfer.transport import Fingerprint, Grant, Received, Sent, TransferKey
from pdserve.v1 import transfer_pb2_grpc

WAIT_S = 20.0
BLOCK_BYTES = 4096


class HostPool:
    """Plain memory in blocks."""

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES, seed: int | None = None) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        size = num_blocks * block_bytes
        self.memory = bytearray(size) if seed is None else bytearray(random.Random(seed).randbytes(size))

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.memory)

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * self.block_bytes : (number + 1) * self.block_bytes])

    def fill(self, blocks: range | tuple[int, ...], byte: int) -> None:
        for number in blocks:
            self.memory[number * self.block_bytes : (number + 1) * self.block_bytes] = bytes([byte]) * self.block_bytes


def fingerprint(block_bytes: int = BLOCK_BYTES, **changes: Any) -> Fingerprint:
    plain = Fingerprint(
        protocol=1, model="m", dtype="float32", layout="l", block_size=16, block_bytes=block_bytes, engine="e"
    )
    return replace(plain, **changes)


def wait_for(holds: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > ends_s:
            raise AssertionError(f"waited {WAIT_S} s for {what}")
        time.sleep(0.001)


class Heard:
    """What a callback was told, in order; wait() returns the last word."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, end: Received | Sent) -> None:
        with self._changed:
            self.all.append(end)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, WAIT_S), f"heard only {self.all}"
            return self.all[count - 1]

    @property
    def outcomes(self) -> list[str]:
        return [end.outcome.value for end in self.all]


class GrpcHost:
    """A grpc.aio server in a thread of its own, as in a worker."""

    def __init__(self, servicer: Any, port: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(servicer, port), self._loop).result(WAIT_S)
        self.endpoint = f"127.0.0.1:{self.port}"

    async def _start(self, servicer: Any, port: int) -> int:
        self._server = grpc.aio.server()
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, self._server)
        bound: int = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    def open(self, sender: StreamSender, **changes: Any) -> Any:
        """A real Open call with this sender's words; raises grpc.RpcError."""
        caller = replace(sender.caller, **changes)
        request = open_request(caller, caller.transports)
        with grpc.insecure_channel(self.endpoint) as channel:
            return transfer_pb2_grpc.TransferServiceStub(channel).Open(request, timeout=WAIT_S)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@dataclass
class Pair:
    """A sender and a receiver with their pools."""

    transport: str
    source: HostPool
    landing: HostPool
    receiver: StreamReceiver
    sender: StreamSender
    host: GrpcHost
    _attempts: int = 0
    _generation: int = field(default=0)

    def grant(self, blocks: tuple[int, ...], transfer_id: str | None = None, **changes: Any) -> Grant:
        self._generation += 1
        plain = Grant(
            key=TransferKey(transfer_id=transfer_id or f"t{self._generation}", attempt=1, generation=self._generation),
            endpoint=self.host.endpoint,
            worker_id="d0",
            incarnation="d0-1",
            fingerprint=fingerprint(self.landing.block_bytes),
            blocks=blocks,
            held_blocks=0,
        )
        return replace(plain, **changes)

    def begin(self, grant: Grant, deadline_s: float | None = None) -> tuple[Heard, Heard]:
        """Opens both sides."""
        received, sent = Heard(), Heard()
        self.receiver.expect(grant, received, deadline_s)
        self.sender.start(grant, sent, deadline_s)
        return received, sent

    def move(self, grant: Grant, sources: tuple[int, ...]) -> tuple[Received, Sent]:
        received, sent = self.begin(grant)
        self.sender.push(grant.key, list(enumerate(sources)), True)
        return received.wait(), sent.wait()

    def assert_equal(self, grant: Grant, sources: tuple[int, ...]) -> None:
        for index, source in enumerate(sources):
            assert self.landing.block(grant.blocks[index]) == self.source.block(source), f"block {index} differs"

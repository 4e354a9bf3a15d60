"""Pools of plain bytes, and a gRPC server in a thread, for transfer tests and benchmarks."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from dataclasses import replace
from typing import Any

import grpc

from kvtransfer.faults.injector import FaultInjector, with_faults
from kvtransfer.link.dial import open_request
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.grants import PROTOCOL
from kvtransfer.transports.common.registry import choose
from pdserve.core.errors import PdserveError
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import HostMemory
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.v1 import transfer_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import peer_channel, peer_port
from tests.support.cluster_secret import SECRET, proofs, protect

WAIT_S = 60.0
BLOCK_BYTES = 4096


def runs_in(
    memory: memoryview, number: int, num_blocks: int, block_bytes: int, runs_per_block: int
) -> list[memoryview]:
    """The runs of a block in a pool's memory, as KvPool defines them."""
    size = block_bytes // runs_per_block
    starts = [(layer * num_blocks + number) * size for layer in range(runs_per_block)]
    return [memory[start : start + size] for start in starts]


class HostPool:
    """A pool of blocks in host memory, without an engine."""

    is_on_host = True

    def __init__(
        self, num_blocks: int, block_bytes: int = BLOCK_BYTES, seed: int | None = None, runs_per_block: int = 1
    ) -> None:
        self.num_blocks, self.block_bytes, self.runs_per_block = num_blocks, block_bytes, runs_per_block
        size = num_blocks * block_bytes
        self._memory = HostMemory(size)
        self.memory = self.buffer = self._memory.buffer
        self.descriptor = self._memory.descriptor
        if seed is not None:
            self.memory[:] = random.Random(seed).randbytes(size)

    def runs(self, number: int) -> list[memoryview]:
        """Of one block."""
        return runs_in(self.memory, number, self.num_blocks, self.block_bytes, self.runs_per_block)

    def block(self, number: int) -> bytes:
        return b"".join(self.runs(number))

    @property
    def blocks(self) -> bytearray:
        """All blocks, as in a pool with one run of bytes per block."""
        return bytearray(b"".join(map(self.block, range(self.num_blocks))))

    def fill(self, blocks: range | tuple[int, ...], byte: int) -> None:
        for number in blocks:
            for run in self.runs(number):
                run[:] = bytes([byte]) * len(run)


def fingerprint(block_bytes: int = BLOCK_BYTES, num_layers: int = 1, **changes: Any) -> Fingerprint:
    """The fingerprint of a pool of plain bytes: a block has up to eight tokens, each one row of 64-bit cells."""
    size = math.gcd(block_bytes // 8, 8)
    shape = KvShape(
        layout="toy.v1",
        dtype="uint64",
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=block_bytes // 8 // size // num_layers,
        block_size=size,
    )
    plain = Fingerprint(protocol=PROTOCOL, model="m", engine="e", shape=shape)
    return replace(plain, **changes)


def endpoint_config(
    pool: KvPool,
    facts: Fingerprint,
    *,
    transport: str,
    stamps: BlockStamps | None = None,
    fault_injector: FaultInjector | None = None,
    **rest: Any,
) -> EndpointConfig:
    """With the tests' cluster secret. Raises ConfigError."""
    return EndpointConfig(
        pool=pool,
        fingerprint=facts,
        secret=SECRET,
        transports=with_faults(choose(transport, is_on_host=pool.is_on_host), fault_injector),
        stamps=stamps or BlockStamps(pool.num_blocks),
        **rest,
    )


def kinds(name: str, *, is_on_host: bool = True) -> tuple[int, ...]:
    """Numbers of TransportKind of a setting."""
    return tuple(one.kind for one in choose(name, is_on_host=is_on_host))


class GrpcHost:
    """A grpc.aio server in its own thread, as in a worker."""

    def __init__(
        self, servicer: Any, port: int = 0, host: str = "127.0.0.1", tls: ReloadingCertificates | None = None
    ) -> None:
        self._host, self._tls = host, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(servicer, port), self._loop).result(WAIT_S)
        self.endpoint = f"{host}:{self.port}"

    async def _start(self, servicer: Any, port: int) -> int:
        self.rejected: list[PdserveError] = []
        interceptor = proofs(self.rejected.append)
        self._server = grpc.aio.server(interceptors=(interceptor,))
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, self._server)
        bound: int = peer_port(self._server, f"{self._host}:{port}", self._tls)
        protect(self._server, interceptor, f"{self._host}:{bound}")
        await self._server.start()
        return bound

    def open(self, sender: PlainSender, **changes: Any) -> Any:
        """A real Open call with this sender's fields; raises grpc.RpcError."""
        config = replace(sender.config, **changes)
        request = open_request(config, config.transports)
        with peer_channel(self.endpoint, config.tls) as channel:
            proof = peers.prove_blocking(channel, peers.introduce(config.identity, peers.OPEN, self.endpoint), WAIT_S)
            return transfer_pb2_grpc.TransferServiceStub(channel).Open(request, timeout=WAIT_S, metadata=proof)

    async def _stop(self) -> None:
        await self._server.stop(None)
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(calls, timeout=1.0)  # else they would be destroyed while they end

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

"""The two ends of a device transfer: the sender in a process of its own, which receives commands over a pipe.

A rehearsal uses memory files instead of devices (tests/support/fake_device.py). If no process is killed, the sender may
be a thread of this process; it gets the same messages over the same pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, final

import torch

from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.transport import Received, Sent
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.cuda_ipc import CUDA_IPC
from pdserve.core.errors import InternalError
from pdserve.core.kv.kv_shape import Fingerprint, Grant, TransferKey
from tests.support.fake_device import DevicePool
from tests.support.fake_ends import stand_in
from tests.support.transfer_ends import GrpcHost, HostPool, endpoint_config

#: Where blocks lie; stand-in: memory files behind the words of a device.
Memory = Literal["cuda", "stand-in", "host"]
ANSWER_S = 120.0  # a first communicator and compiled kernels take their time
PUSH_PAUSE_S = 0.005  # between two blocks of a transfer that is to be met on its way
RECEIVER_ID, SENDER_ID = "d0", "p0"


@final
class CudaPool:
    """Blocks on the GPU, such as an engine's, filled with noise."""

    is_on_host = False
    runs_per_block = 1
    descriptor = None

    def __init__(self, num_blocks: int, block_bytes: int, seed: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.raw = torch.empty((num_blocks, block_bytes), dtype=torch.uint8, device="cuda")
        self.raw.random_(0, 256, generator=torch.Generator("cuda").manual_seed(seed))
        torch.cuda.synchronize()

    @property
    def buffer(self) -> memoryview:
        raise InternalError("the pool lies on a device")

    def block(self, number: int) -> bytes:
        return self.raw[number].cpu().numpy().tobytes()


def make_pool(memory: Memory, num_blocks: int, block_bytes: int, seed: int) -> Any:
    if memory == "cuda":
        return CudaPool(num_blocks, block_bytes, seed)
    if memory == "host":
        return HostPool(num_blocks, block_bytes, seed)
    return DevicePool(num_blocks, block_bytes, seed=seed)


def device_of(memory: Memory, pool: Any) -> Any:
    if memory == "stand-in":
        return TRANSPORTS[CUDA_IPC].device(pool)  # type: ignore[attr-defined]
    from kvtransfer.devices.cuda import device_of

    return device_of(pool)


def nccl_environment(role: str) -> dict[str, str]:
    """Settings with which two ranks can share a GPU: before NCCL 2.30 they must appear as two hosts, which communicate
    over sockets."""
    from cupy.cuda import nccl

    debug = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}  # why a pair could not be made
    if nccl.get_version() >= 23000:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **debug}
    return {"NCCL_HOSTID": f"pdserve-{role}", **debug}


@dataclass(frozen=True, kw_only=True)
class SenderSetup:
    memory: Memory
    transport: str
    fingerprint: Fingerprint
    num_blocks: int
    seed: int = 7
    environment: dict[str, str] = field(default_factory=dict)
    is_thread: bool = False  # a thread instead of a process, for a rehearsal without kills
    limits: CopyLimits | None = None  # None: a worker's


def run_sender(setup: SenderSetup, orders: Connection) -> None:
    """Obeys until `quit`; every order has one answer, an exception among them."""
    os.environ.update(setup.environment)
    pool = make_pool(setup.memory, setup.num_blocks, setup.fingerprint.block_bytes, setup.seed)
    if setup.memory == "stand-in" and not setup.is_thread:
        stand_in(pool)
    sender = make_sender(
        endpoint_config(
            pool,
            setup.fingerprint,
            worker_id=SENDER_ID,
            incarnation=f"{SENDER_ID}-{os.getpid()}",
            transport=setup.transport,
            limits=setup.limits,
        )
    )

    def send(grant: Grant, deadline_s: float) -> tuple[str, str, float]:
        """Its outcome, error and seconds from the push to the receiver's word."""
        ended: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        sender.start(grant, ended.put, deadline_s)
        began_s = time.perf_counter()
        sender.push(grant.key, [(index, index) for index in range(len(grant.blocks))], True)
        sent = ended.get(timeout=ANSWER_S)
        return sent.outcome.value, sent.error, time.perf_counter() - began_s

    def begin(grant: Grant) -> None:
        """Goes on by itself, a block at a time, and leaves the last one out, so that the transfer stays open."""
        sender.start(grant, lambda sent: None)

        def push() -> None:
            for index in range(len(grant.blocks) - 1):
                sender.push(grant.key, [(index, index)], False)
                time.sleep(PUSH_PAUSE_S)

        threading.Thread(target=push, daemon=True).start()

    words: dict[str, Callable[..., Any]] = {
        "send": send,
        "begin": begin,
        "block": pool.block,
        "export": lambda: device_of(setup.memory, pool).export(),
    }
    orders.send(("ready", os.getpid()))
    while True:
        word, *arguments = orders.recv()
        if word == "quit":
            sender.close()
            return
        try:
            orders.send(("ok", words[word](*arguments)))
        except Exception as error:
            orders.send(("error", f"{type(error).__name__}: {error}"))


@final
class ProcessSender:
    def __init__(self, setup: SenderSetup) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        kind: Any = threading.Thread if setup.is_thread else multiprocessing.get_context("spawn").Process
        self._runs = kind(target=run_sender, args=(setup, theirs), daemon=True)
        self._is_process = not setup.is_thread
        self._runs.start()
        if self._is_process:
            theirs.close()  # so that its end shows as the pipe's
        _, self.pid = self._hear()

    def ask(self, *order: Any) -> Any:
        self._orders.send(order)
        return self._hear()[1]

    def kill(self) -> None:
        """SIGKILL, in whatever it is doing."""
        assert self._is_process
        os.kill(self.pid, signal.SIGKILL)
        self._runs.join(ANSWER_S)

    def close(self) -> None:
        if self._runs.is_alive():
            self._orders.send(("quit",))
            self._runs.join(30.0)
        if self._is_process and self._runs.is_alive():
            self._runs.kill()

    def _hear(self) -> tuple[str, Any]:
        if not self._orders.poll(ANSWER_S):
            raise TimeoutError("the sender does not answer")
        try:
            kind, value = self._orders.recv()
        except EOFError:
            raise RuntimeError("the sender's process has ended") from None
        if kind == "error":
            raise RuntimeError(f"the sender: {value}")
        return kind, value


@final
class Landing:
    """The receiving end, in this process."""

    def __init__(self, pool: Any, fingerprint: Fingerprint, transport: str, limits: CopyLimits | None = None) -> None:
        self.pool, self._fingerprint, self._number = pool, fingerprint, 0
        self._receiver = make_receiver(
            endpoint_config(
                pool, fingerprint, worker_id=RECEIVER_ID, incarnation="d0-1", transport=transport, limits=limits
            ),
            host="127.0.0.1",
        )
        self._host = GrpcHost(self._receiver.servicer)

    @property
    def is_healthy(self) -> bool:
        return self._receiver.is_healthy

    @property
    def num_chunks(self) -> int:
        """That have come since it was made."""
        return self._receiver.stats.chunks

    def expect(
        self,
        blocks: Sequence[int],
        on_end: Callable[[Received], None] = lambda received: None,
        deadline_s: float = 60.0,
    ) -> Grant:
        self._number += 1
        grant = Grant(
            key=TransferKey(transfer_id=f"t{self._number}", attempt=1, generation=self._number),
            endpoint=self._host.endpoint,
            worker_id=RECEIVER_ID,
            incarnation="d0-1",
            fingerprint=self._fingerprint,
            blocks=tuple(blocks),
            num_cached_blocks=0,
        )
        self._receiver.expect(grant, on_end, deadline_s)
        return grant

    def close(self) -> None:
        self._host.stop()
        self._receiver.close()

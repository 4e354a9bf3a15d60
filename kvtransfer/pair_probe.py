"""Measures KV transfer between two processes of this host: each transport, and the one that `auto` chooses.

    python -m kvtransfer.pair_probe DEVICE      the receiving process; started by `probe`

Sender and receiver are those of workers, with proofs and checksums. A probe takes at most PROBE_S. For each transport
it transfers at most TRIES * POOL_BYTES and some single blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.protocol.grants import PROTOCOL
from kvtransfer.protocol.transport import SendOutcome, Sent
from kvtransfer.transports.common.registry import TRANSPORTS, choose
from pdserve.config import SECRET_ENV, forget_secrets, from_env
from pdserve.core.access.proof import NONCE_BYTES, CallChecker, ClusterSecret
from pdserve.core.errors import PdserveError, TransferFailed
from pdserve.core.kv.kv_shape import Fingerprint, Grant, KvShape, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import HostMemory
from pdserve.isolated.tied_program import tied_command
from pdserve.v1.transfer_pb2_grpc import add_TransferServiceServicer_to_server
from pdserve.wire.peer_server import listen, make_peer_server, server_options

AUTO: Final = "auto"
HOST: Final = "127.0.0.1"
NUM_BLOCKS: Final = 128
POOL_BYTES: Final = 32 * 2**20
TRIES: Final = 3  # transfers of all blocks; the fastest counts
SINGLE_TRIES: Final = 9  # transfers of one block; the median counts
TRANSFER_S: Final = 5.0
PROBE_S: Final = 60.0  # kernels are compiled on a machine's first start
_SHAPE: Final = KvShape(
    layout="block-major.v1", dtype="float32", num_layers=4, num_kv_heads=8, head_dim=64, block_size=16
)
_FINGERPRINT: Final = Fingerprint(protocol=PROTOCOL, model="probe", engine="probe", shape=_SHAPE)
_WORKER: Final = "probe"
_INCARNATION: Final = "1"

assert _SHAPE.block_bytes * NUM_BLOCKS == POOL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result for one transport, or in `error` why it does not work."""

    asked: str  # its name, or auto
    transport: str = ""  # that was used
    reason: str = ""  # for this transport
    block_s: float = 0.0  # from the push of one block to its confirmation
    bytes_per_s: float = 0.0  # of all blocks in one transfer
    error: str = ""


@final
class ProbePool:
    """Plain memory."""

    is_on_host = True
    runs_per_block = 1

    def __init__(self) -> None:
        self.num_blocks, self.block_bytes = NUM_BLOCKS, _SHAPE.block_bytes
        self._memory = HostMemory(POOL_BYTES)
        self.buffer, self.descriptor = self._memory.buffer, self._memory.descriptor


def names(*, is_on_host: bool) -> Iterator[tuple[str, str]]:
    """Each transport between two such pools, and why this system lacks it; the preferred one first."""
    for one in TRANSPORTS.values():
        is_fitting = one.is_for_hosts and not one.is_for_devices if is_on_host else one.is_for_devices
        if is_fitting:
            yield one.name, one.why_not(is_on_host=is_on_host)


def probe(device: str = "cpu", other: str = "cpu") -> Iterator[ProbeResult]:
    """Probes each transport, and last `auto`, from a pool on `device` in this process to one on `other` in another
    process."""
    child = _Child(other)
    try:
        pool = _pool(device)
        for name, why_not in (*names(is_on_host=pool.is_on_host), (AUTO, "")):
            if why_not:
                yield ProbeResult(asked=name, error=why_not)
                continue
            try:
                yield _measure(pool, name, child)
            except PdserveError as error:
                yield ProbeResult(asked=name, error=error.message)
    finally:
        child.close()


def _measure(pool: KvPool, name: str, child: _Child) -> ProbeResult:
    """Raises PdserveError."""
    endpoint = child.ask(open=name)
    sender = make_sender(_config(pool, name, child.secret))
    try:
        singles = [_move(sender, child, name, endpoint, 1) for _ in range(SINGLE_TRIES)]
        link = sender.links[0]
        took_s = min(_move(sender, child, name, endpoint, NUM_BLOCKS) for _ in range(TRIES))
    finally:
        sender.close()
    return ProbeResult(
        asked=name,
        transport=link.transport,
        reason=link.reason,
        block_s=statistics.median(singles[1:]),  # the first one connects
        bytes_per_s=POOL_BYTES / took_s,
    )


def _config(pool: KvPool, name: str, secret: ClusterSecret) -> EndpointConfig:
    """Raises ConfigError."""
    return EndpointConfig(
        pool=pool,
        fingerprint=_FINGERPRINT,
        secret=secret,
        worker_id=f"{_WORKER}-{name}",
        incarnation=_INCARNATION,
        transports=choose(name, is_on_host=pool.is_on_host),
        stamps=BlockStamps(pool.num_blocks),
    )


def _move(sender: Any, child: _Child, name: str, endpoint: str, count: int) -> float:
    """Seconds from the push to the receiver's confirmation. Raises TransferFailed."""
    number = child.next_number()
    child.ask(expect=name, number=number, count=count)
    ended: list[Sent] = []
    has_ended = threading.Event()

    def on_end(sent: Sent) -> None:
        ended.append(sent)
        has_ended.set()

    grant = _grant(name, number, count, endpoint)
    sender.start(grant, on_end, TRANSFER_S)
    began_s = time.perf_counter()
    sender.push(grant.key, [(index, index) for index in range(count)], True)
    if not has_ended.wait(2 * TRANSFER_S):
        raise TransferFailed(f"no end after {2 * TRANSFER_S:.0f} s")
    took_s = time.perf_counter() - began_s
    if ended[0].outcome is not SendOutcome.SENT:
        raise TransferFailed(ended[0].error or ended[0].outcome.value)
    return took_s


def _grant(name: str, number: int, count: int, endpoint: str) -> Grant:
    """The same in both processes."""
    return Grant(
        key=TransferKey(transfer_id="probe", attempt=1, generation=number),
        endpoint=endpoint,
        worker_id=f"{_WORKER}-{name}",
        incarnation=_INCARNATION,
        fingerprint=_FINGERPRINT,
        blocks=tuple(range(count)),
        num_cached_blocks=0,
    )


def _pool(device: str) -> KvPool:
    if device == "cpu":
        return ProbePool()
    import torch

    from pdserve.engine.load.device import use_device
    from pdserve.engine.memory.pool import BlockShape, TorchPool

    use_device(torch.device(device))
    shape = BlockShape(
        num_layers=_SHAPE.num_layers,
        block_size=_SHAPE.block_size,
        num_kv_heads=_SHAPE.num_kv_heads,
        head_dim=_SHAPE.head_dim,
        dtype=torch.float32,
    )
    return TorchPool(num_blocks=NUM_BLOCKS, shape=shape, device=torch.device(device))


@final
class _Child:
    """The receiving process, which answers each JSON line with one. It is killed after PROBE_S."""

    def __init__(self, device: str) -> None:
        text = secrets.token_hex(32)
        self.secret = ClusterSecret(text)
        self._process = subprocess.Popen(
            tied_command("kvtransfer.pair_probe", device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, SECRET_ENV: text},
        )
        self._number = 0
        self._late = threading.Timer(PROBE_S, self._process.kill)
        self._late.daemon = True
        self._late.start()

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def ask(self, **order: Any) -> str:
        """Raises TransferFailed with the error of the process, or if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # its end is seen below
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise TransferFailed(f"the receiving process has ended, or was too slow ({PROBE_S:.0f} s)")
        answer: dict[str, str] = json.loads(line)
        if error := answer.get("error"):
            raise TransferFailed(error)
        return answer["said"]

    def close(self) -> None:
        self._late.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # input that it did not read
                    pipe.close()


@final
class _Receiving:
    """The other process: a receiver for each requested transport."""

    def __init__(self, device: str, secret: ClusterSecret) -> None:
        self._pool, self._secret = _pool(device), secret
        self._receivers: dict[str, Any] = {}
        self._servers: list[Any] = []  # referenced here, because a server without references ends
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def execute(self, order: dict[str, Any]) -> str:
        """Raises PdserveError."""
        if "open" in order:
            return self._open(order["open"])
        grant = _grant(order["expect"], order["number"], order["count"], "")
        self._receivers[order["expect"]].expect(grant, lambda received: None, TRANSFER_S)
        return ""

    def _open(self, name: str) -> str:
        receiver = make_receiver(_config(self._pool, name, self._secret), HOST)
        self._receivers[name] = receiver
        return str(asyncio.run_coroutine_threadsafe(self._serve(receiver.servicer), self._loop).result())

    async def _serve(self, servicer: Any) -> str:
        options = server_options(max_message_bytes=2**20, max_connections=16, idle_s=PROBE_S)
        server, proofs = make_peer_server(options, lambda error: None)
        address = f"{HOST}:{listen(server, HOST, 0, 'host')}"
        proofs.serve(CallChecker(self._secret, address, partial(secrets.token_bytes, NONCE_BYTES)), server)
        add_TransferServiceServicer_to_server(servicer, server)
        await server.start()
        self._servers.append(server)
        return address


def main() -> int:
    secret = ClusterSecret(from_env(SECRET_ENV))
    forget_secrets()
    receiving = _Receiving(sys.argv[1], secret)
    for line in sys.stdin:
        try:
            answer = {"said": receiving.execute(json.loads(line))}
        except PdserveError as error:
            answer = {"error": error.message}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

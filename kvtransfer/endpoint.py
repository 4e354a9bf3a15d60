"""Makes the two ends of a transfer for a transport by name: the only thing that worker programs call to get one."""

from __future__ import annotations

from typing import Final

from kvtransfer.gate import SHM, TCP
from kvtransfer.host import can_share_memory
from kvtransfer.receiver import StreamReceiver
from kvtransfer.sender import StreamSender
from kvtransfer.transport import Fingerprint
from pdserve.core.errors import ConfigError
from pdserve.engine.interface import KvPool

TRANSPORTS: Final = ("auto", "shm", "tcp")


def make_receiver(
    pool: KvPool, fingerprint: Fingerprint, *, worker_id: str, incarnation: str, host: str, transport: str
) -> StreamReceiver:
    """Listens at once, on `host` and free ports. Add `.servicer` to the worker's gRPC server. Raises ConfigError."""
    return StreamReceiver(
        pool, fingerprint, worker_id=worker_id, incarnation=incarnation, host=host, transports=_kinds(transport)
    )


def make_sender(
    pool: KvPool, fingerprint: Fingerprint, *, worker_id: str, incarnation: str, transport: str
) -> StreamSender:
    """Connects to each decode worker when the first transfer to it starts. Raises ConfigError."""
    return StreamSender(pool, fingerprint, worker_id=worker_id, incarnation=incarnation, transports=_kinds(transport))


def _kinds(transport: str) -> tuple[int, ...]:
    """auto: shm where both are on one host (the receiver compares host ids), else tcp."""
    if transport not in TRANSPORTS:
        raise ConfigError("transport", transport, "one of " + ", ".join(TRANSPORTS))
    if transport == "shm" and not can_share_memory():
        raise ConfigError("transport", transport, "tcp on this system: shm needs Linux")
    by_name = {"shm": (SHM,), "tcp": (TCP,), "auto": (SHM, TCP) if can_share_memory() else (TCP,)}
    return by_name[transport]

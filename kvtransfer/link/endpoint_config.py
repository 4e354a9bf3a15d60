"""What a sender and a receiver are made with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.protocol import frames
from kvtransfer.protocol.lease import DEFAULT_LEASE, Lease
from kvtransfer.transports.common.interface import Transport
from pdserve.core.access.proof import ClusterSecret, Identity
from pdserve.core.kv.kv_shape import Fingerprint
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.interface import KvPool
from pdserve.tls.certificates import ReloadingCertificates


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """The identity of a worker, or of one of its ranks, its pool, and how it transfers KV.

    The pool's blocks have the format of the fingerprint's shape. A sender's may have another one (`wire_dtype`, and the
    shape of its receivers), if it sends converted blocks.
    """

    pool: KvPool
    fingerprint: Fingerprint
    secret: ClusterSecret
    worker_id: str
    incarnation: str
    transports: tuple[Transport, ...]  # the preferred one first
    stamps: BlockStamps
    tls: ReloadingCertificates | None = None  # of connections between hosts, which are plain without it
    limits: CopyLimits | None = None  # of copies on a device; the first sender or receiver of a pool sets them
    lease: Lease = DEFAULT_LEASE
    checksums: tuple[frames.Checksum, ...] = field(default_factory=lambda: frames.available_checksums())
    wire_dtype: str = ""  # dtype of the blocks that a sender sends; empty: as they are stored
    clock: Callable[[], float] = time.monotonic

    @property
    def identity(self) -> Identity:
        return Identity.of(self.secret, "worker", self.worker_id, self.incarnation)

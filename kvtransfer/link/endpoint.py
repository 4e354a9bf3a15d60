"""Makes the sender or receiver for a transport by name. Worker programs use only these two functions."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtransfer.devices import fused
from kvtransfer.devices.copy_streams import CopyLimits
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.link.receiver import StreamReceiver
from kvtransfer.link.sender import StreamSender
from kvtransfer.protocol.commands import OnRead
from kvtransfer.protocol.lease import DEFAULT_LEASE, Lease
from kvtransfer.protocol.plan import DEFAULT_CHUNK_BYTES, DEVICE_CHUNK_BYTES, MAX_GROUPS, Part, PartLayout
from kvtransfer.reshape.sender import ShapedSender
from kvtransfer.transports.registry import kinds, prepare
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool
from pdserve.tls.certificates import ReloadingCertificates


def make_receiver(
    pool: KvPool,
    fingerprint: Fingerprint,
    *,
    secret: ClusterSecret,
    worker_id: str,
    incarnation: str,
    host: str,
    transport: str,
    tls: ReloadingCertificates | None = None,
    fault_injector: FaultInjector | None = None,
    stamps: BlockStamps | None = None,
    limits: CopyLimits | None = None,
    lease: Lease = DEFAULT_LEASE,
    clock: Callable[[], float] = time.monotonic,
) -> StreamReceiver:
    """Listens at once, on `host` and free ports. Add `.servicer` to the worker's gRPC server. Raises ConfigError.

    Connections between hosts are plain without `tls`. `limits`: of copies on a device. The first sender or receiver of
    a pool sets them.
    """
    if pool.is_on_host:
        fused.prepare(pool.block_bytes)
    numbers = kinds(transport, is_on_host=pool.is_on_host)
    prepare(pool, numbers, _runs_of(fingerprint.shape), limits)
    return StreamReceiver(
        pool,
        fingerprint,
        secret=secret,
        worker_id=worker_id,
        incarnation=incarnation,
        host=host,
        transports=numbers,
        tls=tls,
        chunk_bytes=DEFAULT_CHUNK_BYTES if pool.is_on_host else DEVICE_CHUNK_BYTES,
        fault_injector=fault_injector,
        stamps=stamps,
        lease=lease,
        clock=clock,
    )


def make_sender(
    pool: KvPool,
    fingerprint: Fingerprint,
    *,
    secret: ClusterSecret,
    worker_id: str,
    incarnation: str,
    transport: str,
    tls: ReloadingCertificates | None = None,
    fault_injector: FaultInjector | None = None,
    stamps: BlockStamps | None = None,
    kv_wire: str = "exact",
    limits: CopyLimits | None = None,
    lease: Lease = DEFAULT_LEASE,
    clock: Callable[[], float] = time.monotonic,
) -> ShapedSender:
    """Connects to each decode worker when the first transfer to it starts. Raises ConfigError.

    `kv_wire`: exact, int8 (between floats too) or auto (int8 where the link is slow).
    """
    numbers = kinds(transport, is_on_host=pool.is_on_host)
    prepare(pool, numbers, _runs_of(fingerprint.shape), limits)

    def make_stream(pool: KvPool, stamps: BlockStamps, on_read: OnRead | None, wire_dtype: str) -> StreamSender:
        return StreamSender(
            pool,
            fingerprint,
            secret=secret,
            worker_id=worker_id,
            incarnation=incarnation,
            transports=numbers,
            tls=tls,
            fault_injector=fault_injector,
            stamps=stamps,
            on_read=on_read,
            wire_dtype=wire_dtype,
            lease=lease,
            clock=clock,
        )

    return ShapedSender(pool, fingerprint, stamps or BlockStamps(pool.num_blocks), make_stream, kv_wire)


def _runs_of(shape: KvShape) -> list[StridedExtent]:
    """The byte runs of all layer groups in which a block may be sent."""
    layout = PartLayout.to_send(shape, shape)
    possible = [groups for groups in range(2, MAX_GROUPS + 1) if shape.num_layers % groups == 0]
    found = (layout.extent(Part(0, group, groups)) for groups in possible for group in range(groups))
    return [one for one in found if one is not None]

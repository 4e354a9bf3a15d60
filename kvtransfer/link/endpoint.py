"""Makes the sender or the receiver of a worker, or of one of its ranks, and prepares its device for copies."""

from __future__ import annotations

from kvtransfer.devices import fused
from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.faults.injector import FaultInjector, make_fault_injector, with_faults
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.protocol.grants import fingerprint_of
from kvtransfer.protocol.plan import DEFAULT_CHUNK_BYTES, DEVICE_CHUNK_BYTES, MAX_GROUPS, Part, PartLayout
from kvtransfer.reshape.sender import ShapedSender
from kvtransfer.transports.common.registry import choose, prepare
from pdserve.config import WorkerConfig
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.kv.kv_shape import KvShape
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import EngineSpec, KvPool
from pdserve.tls.certificates import ReloadingCertificates


def config_of(
    worker: WorkerConfig,
    spec: EngineSpec,
    pool: KvPool,
    incarnation: str,
    stamps: BlockStamps,
    tls: ReloadingCertificates | None,
    fault_injector: FaultInjector | None = None,
) -> EndpointConfig:
    """The endpoint of a worker, or of one of its ranks. `fault_injector` replaces that of the settings. Raises
    ConfigError."""
    faults = fault_injector or make_fault_injector(worker.inject_faults)
    return EndpointConfig(
        pool=pool,
        fingerprint=fingerprint_of(spec),
        secret=ClusterSecret(worker.cluster_secret),
        worker_id=worker.worker_id,
        incarnation=incarnation,
        transports=with_faults(choose(worker.transport, is_on_host=pool.is_on_host), faults),
        stamps=stamps,
        tls=tls,
        limits=CopyLimits(staging_bytes=worker.kv_staging_bytes),
    )


def make_receiver(config: EndpointConfig, host: str) -> PlainReceiver:
    """Listens at once, on `host` and free ports. Add `.servicer` to the worker's gRPC server. Raises ConfigError."""
    pool = config.pool
    if pool.is_on_host:
        fused.prepare(pool.block_bytes // pool.runs_per_block)
    prepare(pool, config.transports, _runs_of(config.fingerprint.shape), config.limits)
    return PlainReceiver(config, host, DEFAULT_CHUNK_BYTES if pool.is_on_host else DEVICE_CHUNK_BYTES)


def make_sender(config: EndpointConfig, kv_wire: str = "exact") -> ShapedSender:
    """Connects to each decode worker when the first transfer to it starts. Raises ConfigError.

    `kv_wire`: exact, int8 (between floats too) or auto (int8 where the link is slow).
    """
    prepare(config.pool, config.transports, _runs_of(config.fingerprint.shape), config.limits)
    return ShapedSender(config, kv_wire)


def _runs_of(shape: KvShape) -> list[StridedExtent]:
    """The byte runs of all layer groups in which a block may be sent."""
    layout = PartLayout.to_send(shape, shape)
    possible = [groups for groups in range(2, MAX_GROUPS + 1) if shape.num_layers % groups == 0]
    found = (layout.extent(Part(0, group, groups)) for groups in possible for group in range(groups))
    return [one for one in found if one is not None]

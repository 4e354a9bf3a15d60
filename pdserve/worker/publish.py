"""Publishes to Redis that this worker is alive and what it has cached. Does nothing without a Redis URL.

Failures of Redis never affect a request: the publisher keeps what it could not send and retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.config import WorkerConfig
from pdserve.core.types import Role

if TYPE_CHECKING:
    from pdserve.prefix.publisher import WorkerPublisher


def make_publisher(
    config: WorkerConfig, role: Role, incarnation: str, endpoint: str, hash_seed: bytes
) -> WorkerPublisher | None:
    """The publisher, not started yet; it keeps changes that are offered before. None without a Redis URL. Raises
    ConfigError."""
    if not config.redis:
        return None
    # imported here, because a worker without a registry needs no Redis client
    from pdserve.prefix.publisher import WorkerPublisher
    from pdserve.prefix.registry import Registration

    registration = Registration(worker_id=config.worker_id, incarnation=incarnation, role=role, endpoint=endpoint)
    return WorkerPublisher(config.redis, config.cluster, registration, hash_seed=hash_seed, lease_s=config.lease_s)

"""Tells Redis that this worker lives and what it has cached; without a Redis URL nobody is told.

Redis trouble never reaches a request: the publisher keeps what it could not say and tries again.
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
    """Not started yet; what is offered before is kept. None without a Redis URL. Raises ConfigError."""
    if not config.redis:
        return None
    from pdserve.prefix.publisher import WorkerPublisher  # here: a worker without a registry needs no client of Redis
    from pdserve.prefix.registry import Registration

    registration = Registration(worker_id=config.worker_id, incarnation=incarnation, role=role, endpoint=endpoint)
    return WorkerPublisher(config.redis, config.cluster, registration, hash_seed=hash_seed, lease_s=config.lease_s)

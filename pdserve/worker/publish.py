"""Tells Redis that this worker lives and what it has cached; without a Redis URL nobody is told.

Redis trouble never reaches a request: the publisher keeps what it could not say and tries again.
"""

from __future__ import annotations

from typing import final

from pdserve.config import WorkerConfig
from pdserve.core.blocks import CacheChange
from pdserve.core.types import Role
from pdserve.prefix.publisher import WorkerPublisher
from pdserve.prefix.registry import Registration
from pdserve.worker.program import RoleProgram


@final
class Publishing:
    def __init__(self, publisher: WorkerPublisher) -> None:
        self._publisher = publisher

    def offer(self, change: CacheChange) -> None:
        """From any thread; never blocks."""
        self._publisher.offer(stored=change.stored, removed=change.removed)

    async def stop(self) -> None:
        await self._publisher.stop()


async def open_publishing(
    config: WorkerConfig, role: Role, incarnation: str, endpoint: str, program: RoleProgram
) -> Publishing | None:
    """None without a Redis URL. The cache is empty when this is called, so no snapshot is needed."""
    if not config.redis:
        return None
    registration = Registration(worker_id=config.worker_id, incarnation=incarnation, role=role, endpoint=endpoint)
    publisher = WorkerPublisher(
        config.redis, config.cluster, registration, hash_seed=program.limits.hash_seed, lease_s=config.lease_s
    )
    await publisher.start()
    return Publishing(publisher)

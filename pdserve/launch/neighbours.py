"""Looks into a Redis that was given for a living cluster of the same name.

Its workers and ours would have the same ids: each registration replaces the other's, and routers of both would take
every worker for a new incarnation of its namesake, several times a second.
"""

from __future__ import annotations

from pdserve.core.errors import ConfigError
from pdserve.launch.degraded import endpoint_answers, redis_answers
from pdserve.launch.spec import ClusterSpec
from pdserve.prefix.connection import TROUBLE
from pdserve.prefix.registry import Registry


async def check_alone(spec: ClusterSpec) -> None:
    """Raises ConfigError where a worker answers that is registered under an id of ours.

    Only who answers counts: of a cluster that was killed the registrations stay until their lease ends. A Redis that
    cannot be asked is no reason not to start; one that rejects our password is.
    """
    if not await redis_answers(spec.redis):
        return
    registry = Registry(spec.redis, spec.cluster)
    try:
        registered = await registry.read()
    except TROUBLE:
        return
    finally:
        await registry.close()
    for worker in registered:
        if worker.worker_id in spec.worker_ids and await endpoint_answers(worker.endpoint):
            expected = (
                f"a name that no other cluster has in this Redis: a {worker.worker_id} lives at {worker.endpoint}"
            )
            raise ConfigError("cluster", spec.cluster, f"{expected} (--set cluster=NAME)")

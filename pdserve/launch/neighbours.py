"""Checks a given Redis for a running cluster of the same name.

Its workers and ours would have the same ids. Their registrations would replace each other several times a second, and
the routers of both clusters would treat each as a new incarnation.
"""

from __future__ import annotations

from pdserve.core.errors import ConfigError
from pdserve.launch.degraded import endpoint_answers, redis_answers
from pdserve.launch.spec import ClusterSpec
from pdserve.prefix.connection import TROUBLE
from pdserve.prefix.registry import Registry


async def check_alone(spec: ClusterSpec) -> None:
    """Raises ConfigError if a worker answers that is registered under one of our ids.

    Only workers that answer count, because the registrations of a killed cluster stay until their lease ends. An
    unreachable Redis does not prevent the start; a rejected password does.
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

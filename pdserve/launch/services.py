"""Checks the services that a cluster uses: whether they answer, and whether another cluster of its name is in its
Redis.

The client of Redis is imported only by a launcher whose Redis is not its own, because its import takes as long as that
of all else.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdserve.core.access.hosts import endpoint_of
from pdserve.core.errors import ConfigError
from pdserve.core.urls import hide_password
from pdserve.launch.spec import ClusterSpec, router_config

ANSWER_S: Final = 2.0
_NO_DATABASE: Final = "DB index"  # in the words of Redis, which redis-py repeats in an error of its own


async def degradations(spec: ClusterSpec, *, has_own_redis: bool) -> list[str]:
    """One phrase for each missing service. Raises ConfigError if Redis rejects the password."""
    found = []
    if not has_own_redis and not await redis_answers(spec.redis):
        found.append("redis does not answer, so prompts are placed without the prefix index")
    otlp = router_config(spec, ()).otlp
    if otlp and not await endpoint_answers(otlp):
        found.append(f"no collector answers at {otlp}, so traces are lost")
    return found


async def redis_answers(url: str) -> bool:
    """Raises ConfigError if Redis rejects the password or the database."""
    return not await redis_trouble(url)


async def redis_trouble(url: str) -> str:
    """Why Redis does not answer; empty if it does. Raises ConfigError if it rejects the password or the database."""
    from redis.exceptions import AuthenticationError

    from pdserve.prefix.connection import TROUBLE, connect

    client = connect(url, timeout_s=ANSWER_S, max_connections=1)
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.ping()
    except AuthenticationError as error:
        raise ConfigError("redis", url, f"a URL with the password of that Redis ({error})") from None
    except TROUBLE as error:
        if _NO_DATABASE in str(error):
            raise ConfigError("redis", url, f"a URL with a database that this Redis has ({error})") from None
        return hide_password(str(error)) or f"no answer within {ANSWER_S:g} s"
    finally:
        await client.aclose()
    return ""


async def endpoint_answers(endpoint: str) -> bool:
    """Whether something listens at HOST:PORT, which may be in a URL."""
    found = endpoint_of(endpoint.rpartition("://")[2].removesuffix("/"))
    if found is None:
        return False
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(*found)
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    return True


# --- another cluster in the same Redis ------------------------------------------------------------------------
# Checks a given Redis for a running cluster of the same name. Its workers and ours would have the same ids. Their
# registrations would replace each other several times a second, and the routers of both clusters would treat each as a
# new incarnation.


async def check_alone(spec: ClusterSpec) -> None:
    """Raises ConfigError if a worker answers that is registered under one of our ids.

    Only workers that answer count, because the registrations of a killed cluster stay until their lease ends. An
    unreachable Redis does not prevent the start; a rejected password does.
    """
    from pdserve.prefix.connection import TROUBLE
    from pdserve.prefix.registry import Registry

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

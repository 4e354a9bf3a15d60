"""The registry of workers, stored in Redis with leases: workers write, routers read.

If Redis cannot be reached, the last known workers stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.access.hosts import endpoint_of
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.core.urls import hide_password
from pdserve.outage_log import OutageLog, PeerLog
from pdserve.prefix.connection import TROUBLE, Backoff, connect, heed_cancellation
from pdserve.prefix.schema import MAX_FACTS_BYTES, MAX_WORKERS, checked_name, registry_tag

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The data with which a router attaches to a worker. Raises ConfigError on values that cannot be stored."""

    worker_id: str
    incarnation: str  # new for each start of the process
    role: Role
    endpoint: str  # HOST:PORT at which routers reach the worker

    def __post_init__(self) -> None:
        checked_name("worker_id", self.worker_id)
        checked_name("incarnation", self.incarnation)
        if endpoint_of(self.endpoint) is None or len(self.endpoint) > 512:
            raise ConfigError("endpoint", repr(self.endpoint[:64]), "HOST:PORT of at most 512 characters")

    def to_json(self) -> str:
        return json.dumps({"role": self.role.value, "endpoint": self.endpoint})


def read_registration(worker_id: bytes, incarnation: bytes, facts: bytes, lines: PeerLog) -> Registration | None:
    """Parses what a worker wrote; None, with a warning in `lines`, if it is not a registration."""
    try:
        if len(facts) > MAX_FACTS_BYTES:
            raise ValueError(f"{len(facts)} bytes of facts")
        fields = json.loads(facts)
        return Registration(
            worker_id=worker_id.decode(),
            incarnation=incarnation.decode(),
            role=Role(fields["role"]),
            endpoint=str(fields["endpoint"]),
        )
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        name = repr(worker_id[:64])
        lines.warning("a registration cannot be read", name, worker_id=name, why=repr(error)[:200])
        return None


async def living_holder(url: str, cluster: str, worker_id: str, endpoint: str, lease_s: float) -> str:
    """The endpoint of another worker that has this id and renews its lease; empty if there is none, or if Redis does
    not answer.

    A worker at the same `endpoint` is an earlier incarnation that has ended. It takes up to half a lease to see that a
    holder is silent.
    """
    client = connect(url, timeout_s=REDIS_TIMEOUT_S, max_connections=1)
    key = f"{registry_tag(cluster)}:worker:{worker_id}"
    deadline_s = time.monotonic() + lease_s / 2
    lines = PeerLog(log)
    try:
        first_ms: int | None = None
        while True:
            async with client.pipeline(transaction=True) as pipeline:
                (incarnation, facts), left_ms = await pipeline.hmget(key, "incarnation", "facts").pttl(key).execute()
            is_held = None not in (incarnation, facts)
            held = read_registration(worker_id.encode(), incarnation, facts, lines) if is_held else None
            if held is None or held.endpoint == endpoint:
                return ""
            if first_ms is not None and left_ms > first_ms:
                return held.endpoint
            if time.monotonic() >= deadline_s:
                return ""
            first_ms = left_ms
            await asyncio.sleep(lease_s / 16)
    except TROUBLE:  # without Redis nobody can tell, and the router rejects a second worker of one id
        return ""
    finally:
        await client.aclose()


@final
class Registry:
    """The router's side: follows which workers are registered."""

    def __init__(self, url: str, cluster: str, *, poll_s: float = 0.5, forget_s: float = 5.0) -> None:
        """`forget_s`: how long a worker must be missing from an answering Redis before it counts as gone.

        This covers a Redis that restarts empty, where each worker registers again within a heartbeat.
        """
        self._redis = connect(url, timeout_s=REDIS_TIMEOUT_S, max_connections=2)
        self._where = hide_password(url)
        self._tag = registry_tag(cluster)
        self._poll_s, self._forget_s = poll_s, forget_s
        self._known: dict[str, Registration] = {}
        self._missing_since_s: dict[str, float] = {}
        self._is_available = True
        self._outages = OutageLog(log, "the registry cannot be reached", "the registry can be reached again")
        self._lines = PeerLog(log)

    @property
    def workers(self) -> tuple[Registration, ...]:
        """The last known workers, by id."""
        return tuple(self._known[name] for name in sorted(self._known))

    async def watch(self, on_change: Callable[[tuple[Registration, ...]], None]) -> None:
        """Calls `on_change` with all workers whenever they have changed. Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(0.05, max(1.0, self._poll_s))
        try:
            while True:
                wait_s = self._poll_s
                try:
                    found = await self._read()
                except TROUBLE as error:
                    wait_s = backoff.next_s()
                    self._note(False, error)
                else:
                    backoff.reset()
                    self._note(True, None)
                    if self._take(found, loop.time()):
                        on_change(self.workers)
                heed_cancellation()
                await asyncio.sleep(wait_s)
        finally:
            await self.close()

    async def read(self) -> tuple[Registration, ...]:
        """The registered workers. Raises redis-py's errors if it cannot be reached."""
        found = await self._read()
        return tuple(found[name] for name in sorted(found))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read(self) -> dict[str, Registration]:
        ids = sorted(await self._redis.smembers(f"{self._tag}:workers"))[:MAX_WORKERS]
        if not ids:
            return {}
        async with self._redis.pipeline(transaction=False) as pipeline:
            for one in ids:
                pipeline.hmget(self._tag.encode() + b":worker:" + one, "incarnation", "facts")
            rows: list[list[Any]] = await pipeline.execute()
        found: dict[str, Registration] = {}
        for worker_id, (incarnation, facts) in zip(ids, rows, strict=True):
            if incarnation is None or facts is None:  # the lease has ended; the id stays for a worker that comes back
                continue
            registration = read_registration(worker_id, incarnation, facts, self._lines)
            if registration is not None:
                found[registration.worker_id] = registration
        return found

    def _take(self, found: dict[str, Registration], now_s: float) -> bool:
        """Returns True if anything changed."""
        has_changed = False
        for name in list(self._known):
            if name in found:
                self._missing_since_s.pop(name, None)
            elif now_s - self._missing_since_s.setdefault(name, now_s) >= self._forget_s:
                del self._known[name], self._missing_since_s[name]
                has_changed = True
        for name, registration in found.items():
            if self._known.get(name) != registration:
                self._known[name] = registration
                has_changed = True
        return has_changed

    def _note(self, is_available: bool, error: Exception | None) -> None:
        if not is_available:
            self._outages.failed(redis=self._where, why=repr(error))
        elif not self._is_available:
            self._outages.recovered(redis=self._where)
        self._is_available = is_available

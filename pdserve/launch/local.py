"""A cluster of plain processes on this host: Redis (unless a URL was given), the workers, the router."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial
from typing import final

from pdserve.launch.crew import Crew, start_side_by_side
from pdserve.launch.ports import check_free, free_ports
from pdserve.launch.readiness import FIRST_ANSWER_S, first_answer
from pdserve.launch.report import Report
from pdserve.launch.spec import ClusterSpec, processes, router_config


@final
class LocalCluster:
    """`start`, then `run`, then `stop`; `stop` is safe at any point."""

    def __init__(self, spec: ClusterSpec, report: Report) -> None:
        self._report = report
        self._crew = Crew(report)
        self._redis_port = 0
        if not spec.redis:
            [self._redis_port] = free_ports(1)
            spec = dataclasses.replace(spec, redis=f"redis://127.0.0.1:{self._redis_port}/0")
        self.spec = with_ports(spec)

    async def start(self) -> str:
        """Returns the router's address once a real token has come through it. Raises what stood in the way."""
        if self._redis_port:
            await self._crew.start_redis(self._redis_port)
        *workers, router = processes(self.spec)
        await start_side_by_side(partial(self._crew.start, process, process.start_s) for process in workers)
        await self._crew.start(router, router.start_s)
        address = self._crew.address(router.name)
        await self._crew.unless_ended(ask_first(self.spec, address, self._report))
        self._crew.keep()
        return address

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set; restarts what dies until then."""
        stopping, watching = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._crew.watch())
        done, _ = await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        watching.cancel()
        if watching in done:
            watching.result()

    async def stop(self, *, is_graceful: bool) -> None:
        """The router first, so that no new work comes; then the workers together; Redis last."""
        await self._crew.release()
        await self._crew.stop(["router"], is_graceful=is_graceful)
        await self._crew.stop(self.spec.worker_ids, is_graceful=is_graceful)
        await self._crew.stop_redis()


def with_ports(spec: ClusterSpec) -> ClusterSpec:
    """Every open port filled in; raises ConfigError where the asked one is taken."""
    if spec.port and not spec.worker_ports:
        check_free("port", spec.host, spec.port)
    *workers, router = free_ports(spec.prefill + spec.decode + 1)
    return dataclasses.replace(spec, worker_ports=tuple(workers), port=spec.port or router)


async def ask_first(spec: ClusterSpec, address: str, report: Report) -> None:
    """Proves the cluster with a real answer."""
    config = router_config(spec, ())
    if config.host not in ("127.0.0.1", "localhost", "::1"):
        address = f"127.0.0.1:{address.rpartition(':')[2]}"  # a token does not leave this host in the clear
    began_s = time.monotonic()
    workers = spec.prefill + spec.decode
    await first_answer(address, token=config.token or None, workers=workers, timeout_s=FIRST_ANSWER_S)
    report.phase("first token", time.monotonic() - began_s)

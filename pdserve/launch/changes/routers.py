"""The launcher's calls of its routers, while it changes the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar, final

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Worker
from pdserve.client.retries import Retries
from pdserve.core.errors import InvalidRequest, NotFound, PdserveError, Unauthenticated, Unavailable
from pdserve.core.live import LiveFrame
from pdserve.launch.local import targets_of_routers
from pdserve.launch.spec import ClusterSpec, router_config

POLL_S: Final = 0.05
CALL_S: Final = 5.0  # of one call to a router
ATTACH_S: Final = 60.0  # until each router has connected to a worker that listens


Answer = TypeVar("Answer")


@final
class Routers:
    """A connection to each router, for one change. Calls are repeated while a router is being started again."""

    def __init__(self, spec: ClusterSpec, address: str) -> None:
        config = router_config(spec, ())
        self._clients = [
            AsyncClient(
                target,
                token=config.token or None,
                tls=tls,
                insecure=config.insecure,
                timeout_s=CALL_S,
                retries=Retries(limit=0),
            )
            for target, tls in targets_of_routers(spec, address)
        ]

    async def __aenter__(self) -> Routers:
        return self

    async def __aexit__(self, *error: object) -> None:
        for client in self._clients:
            await client.close()

    async def frames(self) -> list[LiveFrame]:
        """Of each router, its own one: such calls have places of their own, beside those of open live pages."""

        async def first(client: AsyncClient) -> LiveFrame:
            watching = client.watch(only_this_router=True)
            async with asyncio.timeout(CALL_S), contextlib.aclosing(watching) as frames:
                async for frame in frames:
                    return frame
            raise Unavailable("a router sent no frame")

        return [await self._of_any(first, [one]) for one in self._clients]

    async def worker(self, worker_id: str) -> Worker | None:
        """As a router sees it."""
        topology = await self._of_any(lambda client: client.topology())
        return next((one for one in topology.workers if one.worker_id == worker_id), None)

    async def drain(self, worker_id: str) -> None:
        """Raises NotFound if the worker is not connected."""
        await self._of_any(lambda client: client.drain(worker_id))

    async def undrain(self, worker_id: str) -> None:
        await self._of_any(lambda client: client.undrain(worker_id))

    async def wait_for_all(self, worker_id: str, holds: Callable[[Worker | None], bool], limit_s: float) -> bool:
        """Whether `holds` became true of the worker in time, as each router sees it."""
        deadline_s = time.monotonic() + limit_s
        for client in self._clients:
            while True:
                try:
                    topology = await client.topology()
                    if holds(next((one for one in topology.workers if one.worker_id == worker_id), None)):
                        break
                except Unauthenticated:
                    raise
                except (PdserveError, TimeoutError):  # an overloaded router may take longer than a call's limit
                    pass
                if time.monotonic() >= deadline_s:
                    return False
                await asyncio.sleep(POLL_S)
        return True

    async def _of_any(
        self, call: Callable[[AsyncClient], Coroutine[Any, Any, Answer]], clients: Sequence[AsyncClient] = ()
    ) -> Answer:
        """The answer of the first router that has one, or of `clients`. Raises the last error after ATTACH_S, and
        NotFound at once."""
        deadline_s = time.monotonic() + ATTACH_S
        while True:
            for client in clients or self._clients:
                try:
                    return await call(client)
                except (NotFound, InvalidRequest, Unauthenticated):
                    raise
                except (PdserveError, TimeoutError) as error:
                    if time.monotonic() >= deadline_s:
                        raise Unavailable(f"no router answers the launcher: {error}") from None
            await asyncio.sleep(POLL_S)

"""Where frames come from: a router, or a recording that is played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Protocol, final

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Explanation
from pdserve.core.errors import InvalidRequest, NotFound
from pdserve.core.live import LiveFrame, LogLine

PERIOD_S: Final = 0.5


class FrameSource(Protocol):
    name: str
    is_live: bool

    def frames(self) -> AsyncIterator[LiveFrame]:
        """Raises PdserveError if the router cannot be watched."""
        ...

    async def explain(self, request_id: str) -> Explanation:
        """Raises NotFound."""
        ...

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        """Raises PdserveError if it cannot be read."""
        ...

    async def drain(self, worker_id: str, *, is_drained: bool) -> None: ...


@final
class RouterSource:
    is_live = True

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.name = name
        self._client = client

    async def frames(self) -> AsyncIterator[LiveFrame]:
        async with aclosing(self._client.watch(PERIOD_S)) as frames:
            async for one in frames:
                yield one

    async def explain(self, request_id: str) -> Explanation:
        return await self._client.explain(request_id)

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        return await self._client.worker_log(worker_id)

    async def drain(self, worker_id: str, *, is_drained: bool) -> None:
        await (self._client.drain(worker_id) if is_drained else self._client.undrain(worker_id))


@final
class RecordingSource:
    is_live = False

    def __init__(
        self, name: str, frames: Sequence[LiveFrame], explanations: Mapping[str, Explanation], speed: float = 1.0
    ) -> None:
        self.name = name
        self._frames, self._explanations, self._speed = frames, explanations, speed

    async def frames(self) -> AsyncIterator[LiveFrame]:
        before_s: float | None = None
        for one in self._frames:
            if before_s is not None:
                await asyncio.sleep(max(one.at_s - before_s, 0.0) / self._speed)
            before_s = one.at_s
            yield one

    async def explain(self, request_id: str) -> Explanation:
        found = self._explanations.get(request_id)
        if found is None:
            raise NotFound("recorded request", request_id)
        return found

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        raise NotFound("recorded log of worker", worker_id)

    async def drain(self, worker_id: str, *, is_drained: bool) -> None:
        raise InvalidRequest("worker", worker_id, "a running cluster: this is a recording")

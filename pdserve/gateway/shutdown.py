"""The end of the gateway: it drains, and then ends each running request with an error that says why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import final

from pdserve.core.errors import ShuttingDown


@final
class Shutdown:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_draining = False  # new requests are rejected
        self._limits: dict[asyncio.Timeout, bool] = {}  # of the running requests; whether the drain waits for it
        self._answering = 0  # requests whose answer has not ended
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Runs a request up to the end of its answer, so also the sending of the error that `interrupt` caused."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._changed.set()

    @contextlib.asynccontextmanager
    async def interruptible(self, *, is_endless: bool) -> AsyncIterator[None]:
        """Runs a request, inside `answering`. Raises ShuttingDown if `interrupt` ends it. `is_endless`: the drain does
        not wait for it."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits[limit] = not is_endless
                try:
                    yield
                finally:
                    del self._limits[limit]
                    self._changed.set()
        except TimeoutError:
            if limit.expired():
                raise ShuttingDown from None
            raise

    async def drain(self, limit_s: float) -> None:
        """Rejects new requests, and returns when the running ones have ended, or after `limit_s`."""
        self.is_draining = True
        await self._wait(lambda: not any(self._limits.values()), limit_s)

    async def interrupt(self, limit_s: float) -> None:
        """Ends all requests, and returns when each has sent its error, or after `limit_s`."""
        self.is_draining = True
        now_s = asyncio.get_running_loop().time()
        for one in self._limits:
            if not one.expired():
                one.reschedule(now_s)
        await self._wait(lambda: not self._answering, limit_s)

    async def _wait(self, holds: Callable[[], bool], limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()

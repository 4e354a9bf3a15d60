"""Whether the router serves. The router is asked at most once per period, however many callers there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, final

from pdserve.client.aio import AsyncClient
from pdserve.core.errors import PdserveError

REMEMBER_S: Final = 0.5


@final
class Health:
    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asking = asyncio.Lock()
        self._is_serving = False
        self._until_s = -float("inf")

    async def is_serving(self) -> bool:
        async with self._asking:
            if self._clock() >= self._until_s:
                try:
                    self._is_serving = await self._client.is_serving()
                except PdserveError:
                    self._is_serving = False
                self._until_s = self._clock() + REMEMBER_S
            return self._is_serving

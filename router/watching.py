"""Sends frames of the live view. A slow viewer gets fewer frames, each with all requests that ended meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final, final

from pdserve.build import FULL_VERSION
from pdserve.core.durations import check_duration
from pdserve.core.errors import Overloaded, ShuttingDown
from pdserve.core.live import PERIOD_S
from pdserve.v1 import cluster_pb2
from pdserve.wire.live import FRAME
from router.state import RouterState

SHORTEST_S: Final = 0.1
LONGEST_S: Final = 60.0
MAX_VIEWERS: Final = 8  # for each router, because a viewer costs it some milliseconds per second


@final
class Watching:
    def __init__(self, state: RouterState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._num_viewers = 0
        self._closing = asyncio.Event()

    async def frames(self, period_s: float) -> AsyncGenerator[cluster_pb2.WatchResponse, None]:
        """The first one contains recently ended requests. Raises InvalidRequest, Overloaded, and ShuttingDown after
        `close`."""
        period_s = period_s or PERIOD_S
        check_duration("period_s", period_s, SHORTEST_S, LONGEST_S)
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"the router already has {MAX_VIEWERS} viewers", LONGEST_S)
        self._num_viewers += 1
        try:
            num_seen = 0
            while not self._closing.is_set():
                frame = self._state.live_frame(self._clock(), num_seen)
                num_seen = self._state.num_ended
                response = cluster_pb2.WatchResponse(frame=FRAME.encode(frame))
                response.frame.version = FULL_VERSION
                yield response
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), period_s)
            raise ShuttingDown
        finally:
            self._num_viewers -= 1

    def close(self) -> None:
        self._closing.set()

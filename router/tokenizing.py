"""Runs tokenizers in threads, in two queues: long texts neither delay short ones nor take their places.

Each queue runs its texts in order of arrival, and limits how many wait. The queue of long texts also limits the bytes
of waiting requests, because memory holds several copies of each. Each host or tenant has a share of both
(pdserve/core/shares.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar, final

from pdserve.core.errors import Overloaded
from pdserve.core.shares import BYTES_WEIGHT, COUNT_WEIGHT, Shares
from router.fair_queue import ANONYMOUS, ClientKey

LONG_CHARS: Final = 16_384  # takes some milliseconds
LONG_BYTES: Final = 2**17  # size of the whole request
MAX_WAITING: Final = 512  # texts in a lane
MAX_WAITING_BYTES: Final = 16 * 2**20  # in the lane of long texts
RETRY_S: Final = 0.5
STUCK_S: Final = 60.0  # no text takes so long

Result = TypeVar("Result")


@final
class TokenizerThreads:
    def __init__(self) -> None:
        self._short = _Lane("short", 2)
        self._long = _Lane("long", 1)

    async def run(
        self, num_chars: int, num_bytes: int, work: Callable[[], Result], client: ClientKey = ANONYMOUS
    ) -> Result:
        """Runs `work` on a text of `num_chars`, for a request of `num_bytes`. Raises Overloaded if too many wait."""
        is_long = num_chars > LONG_CHARS or num_bytes > LONG_BYTES
        lane = self._long if is_long else self._short
        if is_long and lane.bytes.total and not lane.bytes.fits(client.host, num_bytes):
            raise Overloaded(
                f"requests of {lane.bytes.total} bytes wait to be tokenized, of {MAX_WAITING_BYTES} at most", RETRY_S
            )
        if not lane.items.fits(client.host, 1):
            raise Overloaded(
                f"{lane.items.total} {lane.name} texts wait to be tokenized, of {MAX_WAITING} at most", RETRY_S
            )
        return await lane.run(client.host, num_bytes, work)

    @property
    def can_work(self) -> bool:
        """Whether no queue has all of its threads in texts that do not end."""
        return not any(lane.is_stuck for lane in (self._short, self._long))

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.close()


@final
class _Lane:
    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self.items, self.bytes = Shares(MAX_WAITING, COUNT_WEIGHT), Shares(MAX_WAITING_BYTES, BYTES_WEIGHT)
        self._num_threads = num_threads
        self._running: set[_Task[Any]] = set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tokenize-{name}")

    async def run(self, host: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        self.items.add(host, 1)
        self.bytes.add(host, num_bytes)
        task = _Task(work, self._running)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, task)
        finally:
            # If the caller disconnects, the queue keeps the task until its turn, but not the text.
            task.work = None
            self.items.add(host, -1)
            self.bytes.add(host, -num_bytes)

    @property
    def is_stuck(self) -> bool:
        late_s = time.monotonic() - STUCK_S
        return sum(one.began_s < late_s for one in list(self._running)) >= self._num_threads

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@final
class _Task(Generic[Result]):
    def __init__(self, work: Callable[[], Result], running: set[_Task[Any]]) -> None:
        self.work: Callable[[], Result] | None = work
        self.began_s = 0.0
        self._running = running

    def __call__(self) -> Result:
        work = self.work
        if work is None:
            raise CancelledError
        self.began_s = time.monotonic()
        self._running.add(self)
        try:
            return work()
        finally:
            self._running.discard(self)

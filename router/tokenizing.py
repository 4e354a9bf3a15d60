"""Runs tokenizers beside the event loop. Long texts have a thread of their own, so that short ones never wait for them.

Each lane runs its texts in the order in which they came. The bytes of the requests that wait are bounded, for all
together: a request is held in memory several times over while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Final, Generic, TypeVar, final

from pdserve.core.errors import Overloaded

LONG_CHARS: Final = 16_384  # some milliseconds
MAX_WAITING: Final = 512  # texts
MAX_WAITING_BYTES: Final = 16 * 2**20
RETRY_S: Final = 0.5

Result = TypeVar("Result")


@final
class TokenizerThreads:
    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenize-short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._num_waiting = 0
        self._num_bytes = 0

    async def run(self, num_chars: int, num_bytes: int, work: Callable[[], Result]) -> Result:
        """`work` on `num_chars` of text, of a request of `num_bytes`. Raises Overloaded where too much waits."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} texts wait to be tokenized, of {MAX_WAITING} at most", RETRY_S)
        if self._num_bytes and self._num_bytes + num_bytes > MAX_WAITING_BYTES:
            raise Overloaded(
                f"requests of {self._num_bytes} bytes wait to be tokenized, of {MAX_WAITING_BYTES} at most", RETRY_S
            )
        self._num_waiting += 1
        self._num_bytes += num_bytes
        lane = self._long if num_chars > LONG_CHARS else self._short
        task = _Task(work)
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, task)
        finally:
            # Of a caller that has left, the lane holds the task until its turn; it must not hold the text.
            task.work = None
            self._num_waiting -= 1
            self._num_bytes -= num_bytes

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)


@final
class _Task(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self.work: Callable[[], Result] | None = work

    def __call__(self) -> Result:
        work = self.work
        if work is None:
            raise CancelledError
        return work()

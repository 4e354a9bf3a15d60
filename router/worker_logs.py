"""Asks workers for the last lines of their logs, on their Attach streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, final

from pdserve.core.errors import Unavailable
from pdserve.core.log_line import MAX_LINES
from pdserve.v1 import worker_pb2

ANSWER_S: Final = 2.0  # enough, because a worker answers on its gRPC thread, even during a step
Lines = Sequence[worker_pb2.LogLine]


@final
class WorkerLogs:
    """Lives on one event loop."""

    def __init__(self, send: Callable[[str, worker_pb2.AttachRequest], bool]) -> None:
        self._send = send
        self._asked: dict[str, asyncio.Future[Lines]] = {}  # by worker id

    async def read(self, worker_id: str) -> Lines:
        """The last lines of the worker's log. Concurrent callers share an answer. Raises Unavailable."""
        asked = self._asked.get(worker_id)
        if asked is None:
            if not self._send(worker_id, worker_pb2.AttachRequest(read_log=worker_pb2.ReadLog())):
                raise Unavailable(f"worker {worker_id} is not connected")
            asked = self._asked[worker_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(asked), ANSWER_S)
        except TimeoutError:
            if self._asked.get(worker_id) is asked:  # the next caller must send a new question
                del self._asked[worker_id]
            raise Unavailable(f"worker {worker_id} did not answer within {ANSWER_S:g} s") from None

    def reported(self, worker_id: str, lines: Lines) -> None:
        asked = self._asked.pop(worker_id, None)
        if asked is not None and not asked.done():
            asked.set_result(lines[-MAX_LINES:])

"""What workers report for operators: the last lines of their logs, and their KV links. No decision uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.live import MAX_LINES
from pdserve.v1 import worker_pb2

# --- logs of workers ------------------------------------------------------------------------------------------
# Asks for the last lines on the workers' Attach streams.

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


# --- KV links -------------------------------------------------------------------------------------------------
# The connections between workers, as prefill workers report them. Traces have them too.

MAX_LINKS: Final = 4096
MAX_ID_CHARS: Final = 1024  # in each text field


@final
class KvLinks:
    def __init__(self) -> None:
        self._of: dict[str, dict[str, worker_pb2.KvLink]] = {}  # prefill worker -> decode worker -> link

    def reported(self, prefill_worker: str, links: Iterable[worker_pb2.KvLink]) -> None:
        """Replaces the worker's links. Raises InvalidRequest."""
        kept = list(links)
        if len(kept) > MAX_LINKS:
            raise InvalidRequest("kv_links", f"{len(kept)} links", f"at most {MAX_LINKS}")
        for one in kept:
            if max(len(one.decode_worker), len(one.transport), len(one.reason)) > MAX_ID_CHARS:
                raise InvalidRequest("kv_links", "a longer text", f"at most {MAX_ID_CHARS} characters")
        self._of[prefill_worker] = {one.decode_worker: one for one in kept}

    def forget(self, worker_id: str) -> None:
        """Removes the connections of a lost worker."""
        self._of.pop(worker_id, None)
        for links in self._of.values():
            links.pop(worker_id, None)

    def of(self, prefill_worker: str) -> Sequence[worker_pb2.KvLink]:
        return list(self._of.get(prefill_worker, {}).values())

    def between(self, prefill_worker: str, decode_worker: str) -> worker_pb2.KvLink | None:
        return self._of.get(prefill_worker, {}).get(decode_worker)

"""The routers that share one port: each asks the others, so that a caller gets the same answer from all of them, and
they count what tenants use together.

The kernel gives a connection to any of them. Each therefore also listens on a unix socket in a folder of the launcher,
which only this user can enter, and finds the others there by their numbers. A router that does not answer within
ANSWER_S is left out of live views, counts and lists; an explanation that no router has then fails as Unavailable,
because that router may have it, and so does the end of a session that no router knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeVar, final

import grpc
import grpc.aio

from pdserve.config import MAX_ROUTERS, member_socket
from pdserve.core.errors import ConfigError, Overloaded
from pdserve.outage_log import OutageLog
from pdserve.owned_folder import is_private, open_private
from pdserve.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    router_group_pb2,
    router_group_pb2_grpc,
)
from pdserve.wire import status
from router.service.tenants import TenantCounts
from router.state.cluster_state import MAX_IN_PROGRESS
from router.state.history import MAX_ENDED

log = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
_TOTALS: Final = tuple(field.name for field in cluster_pb2.LiveTotals.DESCRIPTOR.fields)

Answer = TypeVar("Answer")


def check_private(name: str, folder: Path) -> None:
    """Raises ConfigError about the setting `name` unless only this user can enter the folder."""
    try:
        facts = folder.stat()
    except OSError as error:
        raise ConfigError(name, folder, f"a folder that exists ({error.strerror})") from None
    if not is_private(facts):
        raise ConfigError(name, folder, "a folder of this user with mode 0700")


def socket_of(folder: Path, member: int) -> Path:
    return folder / member_socket(member)


@final
class RouterGroup:
    """Belongs to one event loop. Without a folder, the router is alone."""

    def __init__(self, folder: str, member: int, members: int, token: str) -> None:
        """Raises ConfigError."""
        if folder and member >= members:
            raise ConfigError("member", member, f"less than members, which is {members}")
        self._folder = Path(folder) if folder else None
        self._others = [one for one in range(members) if one != member]
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channels: dict[int, grpc.aio.Channel] = {}

    def others(self, stub: Callable[[Any], Any] = cluster_pb2_grpc.ClusterServiceStub) -> dict[int, Any]:
        """A stub of each other router, by its number. Calls fail at once while it has no socket."""
        if self._folder is None:
            return {}
        for member in self._others:
            if member not in self._channels:
                target = f"unix:{socket_of(self._folder, member)}"
                self._channels[member] = grpc.aio.insecure_channel(target, _OPTIONS)
        return {one: stub(self._channels[one]) for one in self._others}

    @property
    def num_others(self) -> int:
        return 0 if self._folder is None else len(self._others)

    async def counts(self) -> tuple[int, int, int]:
        """The queued and running requests of the other routers, and how many of these have answered."""
        request = cluster_pb2.GetTopologyRequest(only_this_router=True)
        answers, _ = await self._ask(lambda stub: stub.GetTopology(request, **self.call))
        queued, running = (
            sum(getattr(one, name) for one in answers) for name in ("queued_requests", "running_requests")
        )
        return queued, running, len(answers)

    async def explain(self, request_id: str) -> tuple[cluster_pb2.ExplainResponse | None, bool]:
        """The explanation of a router that has one, and whether all have answered."""
        request = cluster_pb2.ExplainRequest(request_id=request_id, only_this_router=True)
        answers, failures = await self._ask(lambda stub: stub.Explain(request, **self.call))
        return next(iter(answers), None), all(one is grpc.StatusCode.NOT_FOUND for one in failures)

    async def demands(self) -> list[cluster_pb2.GetDemandResponse]:
        """Of the other routers that answer."""
        answers, _ = await self._ask(lambda stub: stub.GetDemand(cluster_pb2.GetDemandRequest(), **self.call))
        return answers

    async def sessions(
        self, tenant: str, after: int, limit: int
    ) -> tuple[list[inference_pb2.ListSessionsResponse], bool]:
        """A page of each other router that has made one, and whether all have: a busy one rejects the call."""
        request = router_group_pb2.ListTenantSessionsRequest(tenant=tenant, after=after, limit=limit)
        answers, failures = await self._ask(
            lambda stub: stub.ListTenantSessions(request, **self.call), router_group_pb2_grpc.RouterGroupServiceStub
        )
        return [one.page for one in answers], not failures

    async def end_session(self, tenant: str, session_id: str) -> tuple[bool, bool]:
        """Whether another router knows the session, and whether all have answered."""
        request = router_group_pb2.EndTenantSessionRequest(tenant=tenant, session_id=session_id)
        answers, failures = await self._ask(
            lambda stub: stub.EndTenantSession(request, **self.call), router_group_pb2_grpc.RouterGroupServiceStub
        )
        return any(one.is_known for one in answers), not failures

    @property
    def call(self) -> dict[str, Any]:
        return {"timeout": ANSWER_S, "metadata": self._metadata}

    def watch(self, period_s: float) -> GroupWatch:
        """The caller closes it."""
        return GroupWatch(self.others, period_s, self._metadata)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _ask(
        self,
        call: Callable[[Any], Awaitable[Answer]],
        stub: Callable[[Any], Any] = cluster_pb2_grpc.ClusterServiceStub,
    ) -> tuple[list[Answer], list[grpc.StatusCode]]:
        """The answers of the other routers, and the codes of those that have none."""
        results = await asyncio.gather(*map(call, self.others(stub).values()), return_exceptions=True)
        answers, failures = [], []
        for one in results:
            if isinstance(one, grpc.aio.AioRpcError):
                failures.append(one.code())
            elif isinstance(one, BaseException):
                raise one
            else:
                answers.append(one)
        return answers, failures


#: A shared subchannel would remember the failures of an ended router at that path. A new one is found soon.
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


# --- live view ------------------------------------------------------------------------------------------------


@final
class GroupWatch:
    """What one viewer has yet to see of the other routers. Their frames come at about the viewer's period."""

    def __init__(self, others: Callable[[], dict[int, Any]], period_s: float, metadata: Any) -> None:
        self._others, self._metadata = others, metadata
        self._request = cluster_pb2.WatchRequest(period_s=period_s, only_this_router=True)
        self._seen: dict[int, FramesOfRouter] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        """Returns when each of the other routers has sent a frame, or has ended, after ANSWER_S at the latest."""
        self._connect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                for seen in self._seen.values():
                    await seen.has_begun.wait()

    def merge_into(self, frame: cluster_pb2.LiveFrame) -> None:
        """Adds the requests and totals of the other routers to a frame of this one."""
        self._connect()
        for seen in self._seen.values():
            seen.merge_into(frame)
        if self._seen:
            _limit(frame)

    def _connect(self) -> None:
        for member, stub in self._others().items():
            if member not in self._tasks or self._tasks[member].done():
                seen = self._seen.setdefault(member, FramesOfRouter())
                self._tasks[member] = asyncio.create_task(self._follow(stub, seen), name=f"watch-router-{member}")

    async def _follow(self, stub: Any, seen: FramesOfRouter) -> None:
        try:
            async for message in stub.Watch(self._request, metadata=self._metadata):
                seen.take(message.frame)
        except grpc.RpcError as error:
            log.debug("another router cannot be watched", extra={"why": status.from_rpc_error(error).message})
        finally:
            seen.ended()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@final
class FramesOfRouter:
    """The last frame of another router, and the requests that have ended since the viewer's last frame. No I/O."""

    def __init__(self) -> None:
        self._frame: cluster_pb2.LiveFrame | None = None
        self._is_live = False  # whether the stream of frames is open
        self._ended: list[cluster_pb2.LiveRequest] = []
        self._known: dict[tuple[str, float], None] = {}  # ended requests; a new stream repeats the recent ones
        self.has_begun = asyncio.Event()  # set by its first frame or its end
        self._past = cluster_pb2.LiveTotals()  # of its earlier processes: a viewer's totals never decrease

    def take(self, frame: cluster_pb2.LiveFrame) -> None:
        if self._frame is not None and self._frame.incarnation != frame.incarnation:
            _add(self._past, self._frame.totals)
            self._known.clear()
        self._frame, self._is_live = frame, True
        self.has_begun.set()
        for one in frame.requests:
            key = (one.request_id, one.ended_s)
            if one.outcome and key not in self._known:
                self._known[key] = None
                self._ended.append(one)
        del self._ended[:-MAX_ENDED]
        for key in list(self._known)[: max(len(self._known) - MAX_ENDED, 0)]:
            del self._known[key]

    def ended(self) -> None:
        """The stream has ended. The router may have ended too, and its requests with it."""
        self.has_begun.set()
        self._is_live = False

    def merge_into(self, frame: cluster_pb2.LiveFrame) -> None:
        _add(frame.totals, self._past)
        frame.requests.extend(self._ended)
        self._ended.clear()
        found = self._frame
        if found is None:
            return
        _add(frame.totals, found.totals)
        if not self._is_live:
            return
        frame.queued += found.queued
        frame.running += found.running
        frame.omitted += found.omitted
        frame.requests.extend(one for one in found.requests if not one.outcome)
        booked = {one.worker_id: one.booked for one in found.workers}
        for worker in frame.workers:
            worker.booked += booked.get(worker.worker_id, 0)


def _limit(frame: cluster_pb2.LiveFrame) -> None:
    """To as many requests as a frame of one router has: those in progress, then the latest that have ended."""
    in_progress = [one for one in frame.requests if not one.outcome]
    ended = sorted((one for one in frame.requests if one.outcome), key=lambda one: one.ended_s)
    shown = [*in_progress[:MAX_IN_PROGRESS], *ended[-MAX_ENDED:]]
    frame.omitted += max(len(in_progress) - MAX_IN_PROGRESS, 0)
    del frame.requests[:]
    frame.requests.extend(shown)


def _add(totals: cluster_pb2.LiveTotals, more: cluster_pb2.LiveTotals) -> None:
    for name in _TOTALS:
        setattr(totals, name, getattr(totals, name) + getattr(more, name))


# --- counts of tenants ----------------------------------------------------------------------------------------
# A file in the folder, which each router maps into its memory, and locks for the few microseconds of one use. So a
# quota holds for all routers together exactly as for one, and costs no message. The kernel releases the lock of a
# router that ends, even if it is killed. A router that is stopped with the lock keeps it: the others then reject
# calls of tenants after LOCK_S, and write what has ended once they get the lock.
#
# The file has one row for each tenant. Each router has a column for its own answers in progress. When it starts, it
# clears its column, because its predecessor's answers have ended with that. Until then, they count.

FILE: Final = "tenants"
LOCK_S: Final = 0.01  # how long the event loop waits for the lock
LOCK_CHECK_S: Final = 0.0002
LOCK_RETRY_S: Final = 1.0  # retry time of a rejected call, and for how long the loop then does not wait again
WRITE_CHECK_S: Final = 0.5
MAX_ROWS: Final = 16_384  # more than a key file has tenants, with room for those that were removed from it
_FULL: Final = float("inf")  # the level of a bucket of which nothing was taken
_NUM_ROWS: Final = Struct("<Q")  # rows in use, at the start of the file
_DIGEST_BYTES: Final = 16
_ROW: Final = Struct(f"<{_DIGEST_BYTES}sdd{MAX_ROUTERS}I")  # tenant, level, at_s, answers in progress of each router
_FIRST: Final = 64  # where the rows begin
_BUCKET: Final = Struct("<dd")
_BUCKET_AT: Final = _DIGEST_BYTES
_RUNNING: Final = Struct(f"<{MAX_ROUTERS}I")
_OWN: Final = Struct("<I")
_RUNNING_AT: Final = _BUCKET_AT + _BUCKET.size


@final
class SharedCountsFile:
    def __init__(self, folder: Path, member: int) -> None:
        """`member`: the number of this router among those that share the folder. Raises ConfigError if a running
        router has it."""
        self._column = _RUNNING_AT + member * _OWN.size
        self._wait_again_s = 0.0
        self._outages = OutageLog(
            log, "another router keeps the counts of tenants locked", "the counts can be used again"
        )
        self._is_locked_out = False
        self.unwritten: set[SharedCounts] = set()  # changed while the lock could not be had
        with contextlib.ExitStack() as opened:
            number = open_private(folder / f"router-{member}.lock")
            opened.callback(os.close, number)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError("member", member, f"a number that no running router in {folder} has") from None
            self._file = open_private(folder / FILE)
            opened.callback(os.close, self._file)
            os.ftruncate(self._file, _FIRST + MAX_ROWS * _ROW.size)  # a file that is not written takes no room
            self.data = mmap.mmap(self._file, 0)
            opened.callback(self.data.close)
            for at in self._rows():  # without the lock, because only this router writes its column
                _OWN.pack_into(self.data, at + self._column, 0)
            self._opened = opened.pop_all()

    def counts_of(self, tenant: str) -> TenantCounts:
        return SharedCounts(self, blake2b(tenant.encode(), digest_size=_DIGEST_BYTES).digest(), self._column)

    def close(self) -> None:
        """Idempotent. Counts that are used afterwards stay in this process."""
        self._opened.close()

    @property
    def is_closed(self) -> bool:
        return self.data.closed

    def lock(self) -> None:
        """Raises Overloaded if another router keeps it for longer than LOCK_S."""
        until_s = None
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now_s = time.monotonic()
                if until_s is None:
                    until_s = now_s + LOCK_S if now_s >= self._wait_again_s else now_s
                if now_s >= until_s:
                    self._wait_again_s = max(self._wait_again_s, now_s + LOCK_RETRY_S)
                    self._is_locked_out = True
                    self._outages.failed(waited_s=LOCK_S)
                    message = "another router of this host does not release the counts of tenants"
                    raise Overloaded(message, LOCK_RETRY_S) from None
                time.sleep(LOCK_CHECK_S)
        if self._is_locked_out:
            self._is_locked_out, self._wait_again_s = False, 0.0
            self._outages.recovered()

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def write_rest(self) -> None:
        """What could not be written before. While locked."""
        while self.unwritten:
            counts = self.unwritten.pop()
            with contextlib.suppress(Overloaded):  # no row is left for it
                counts.read()
                counts.write()

    async def keep_written(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_CHECK_S)
            if self.unwritten and not self.is_closed:
                with contextlib.suppress(Overloaded):
                    self.lock()
                    self.write_rest()
                    self.unlock()

    def row_of(self, digest: bytes) -> int:
        """The offset of the tenant's row, which may be new. While locked. Raises Overloaded."""
        count = self._num_rows()
        end = _FIRST + count * _ROW.size
        at = self.data.find(digest, _FIRST, end)
        while at >= 0 and (at - _FIRST) % _ROW.size:  # the same bytes, by chance, elsewhere in a row
            at = self.data.find(digest, at + 1, end)
        if at < 0:
            at = end if count < MAX_ROWS else self._longest_idle()
            _ROW.pack_into(self.data, at, digest, _FULL, 0.0, *([0] * MAX_ROUTERS))
            if at == end:  # last, because this router may be killed before
                _NUM_ROWS.pack_into(self.data, 0, count + 1)
        return at

    def _longest_idle(self) -> int:
        """The row of the tenant whose last call was the longest ago."""
        idle = [at for at in self._rows() if not any(_RUNNING.unpack_from(self.data, at + _RUNNING_AT))]
        if not idle:
            raise Overloaded(f"{MAX_ROWS} tenants have answers in progress", 1.0)
        return min(idle, key=lambda at: _BUCKET.unpack_from(self.data, at + _BUCKET_AT)[1])

    def _rows(self) -> range:
        return range(_FIRST, _FIRST + self._num_rows() * _ROW.size, _ROW.size)

    def _num_rows(self) -> int:
        return min(int(_NUM_ROWS.unpack_from(self.data)[0]), MAX_ROWS)


@final
class SharedCounts(TenantCounts):
    """One tenant's row, read at the start of a block, written at its end, and locked between."""

    __slots__ = ("_at", "_column", "_digest", "_file", "_owed")

    def __init__(self, file: SharedCountsFile, digest: bytes, column: int) -> None:
        super().__init__()
        self._file, self._digest, self._column = file, digest, column
        self._at = _FIRST
        self._owed = 0.0  # tokens that are not in the file's bucket yet

    def __enter__(self) -> None:
        file = self._file
        if file.is_closed:  # the router has stopped serving
            return
        file.lock()
        try:
            self.read()
        except BaseException:
            file.unlock()
            raise

    def __exit__(self, *error: object) -> None:
        file = self._file
        if file.is_closed:
            return
        self.write()
        if file.unwritten:
            file.write_rest()
        file.unlock()

    def defer(self, tokens: float) -> None:
        self._owed += tokens
        self._file.unwritten.add(self)

    def read(self) -> None:
        """While locked. Raises Overloaded."""
        data = self._file.data
        if data[self._at : self._at + _DIGEST_BYTES] != self._digest:
            self._at = self._file.row_of(self._digest)
        level, self.at_s = _BUCKET.unpack_from(data, self._at + _BUCKET_AT)
        self.level = None if level == _FULL else level + self._owed
        self._owed = 0.0
        own = _OWN.unpack_from(data, self._at + self._column)[0]
        self.others = sum(_RUNNING.unpack_from(data, self._at + _RUNNING_AT)) - own

    def write(self) -> None:
        """While locked, after `read`."""
        data = self._file.data
        level = _FULL if self.level is None else self.level
        _BUCKET.pack_into(data, self._at + _BUCKET_AT, level, self.at_s)
        _OWN.pack_into(data, self._at + self._column, max(self.running, 0))
        self._file.unwritten.discard(self)

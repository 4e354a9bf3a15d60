"""The Attach streams of routers. Each stream begins with two hellos and then carries messages in both directions.

A router that reads too slowly loses its stream. It never delays the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import grpc

from pdserve.build import FULL_VERSION
from pdserve.core.access.gate import MOST_PACE_S
from pdserve.core.durations import clamped_s
from pdserve.core.errors import PdserveError, Unavailable
from pdserve.core.installation import is_compatible, mismatch
from pdserve.core.live import LogLine
from pdserve.outage_log import OutageLog, PeerLog
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire.protocol import LOG_LINE
from pdserve.worker.program import AnyProgram

log = logging.getLogger(__name__)

EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs

HELLO_S: Final = 10.0
MAX_OUTBOX: Final = 131_072  # messages plus token rows: about 10 MB, or one minute of 16 rows at 130 steps/s
ROW_BYTES: Final = 80  # approximate size of a token row
MAX_MERGED_ROWS: Final = 1024  # limit of one message, far below any limit on message size
MAX_INBOX: Final = 4096  # calls that may wait for the engine thread before reading of streams pauses
INBOX_PAUSE_S: Final = 0.005
PAUSE_POLL_S: Final = 0.005


@final
class SessionOutbox:
    """Messages that wait to be sent to one router. `put` is called on the event loop."""

    def __init__(
        self,
        limit: int = MAX_OUTBOX,
        *,
        is_batching: bool = False,
        on_full: Callable[[int], object] = lambda num_messages: None,
    ) -> None:
        """`is_batching`: the router accepts several messages in one, which saves time on both sides. `on_full` is
        called if the outbox closes because of its limit."""
        self._is_batching, self._on_full = is_batching, on_full
        self._messages: deque[worker_pb2.AttachResponse] = deque()
        self._limit = limit
        self._size = 0
        self._wakes = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pace_s = self._tokens_s = 0.0
        self._sent_s = -math.inf  # the last message, by the loop's clock
        self._num_put = self._num_taken = self._last_urgent = 0
        self.is_closed = False

    def put(self, messages: Sequence[worker_pb2.AttachResponse]) -> None:
        """Closes the outbox instead of growing beyond its limit."""
        if self.is_closed:
            return
        self._size += sum(map(_size, messages))
        if self._size > self._limit:
            self._on_full(len(self._messages))
            self.close()
            return
        for message in messages:
            self._messages.append(message)
            self._num_put += 1
            if not _may_wait(message):
                self._last_urgent = self._num_put
        self._schedule()

    def close(self) -> None:
        self.is_closed = True
        self._messages.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._wakes.set()

    def set_pace(self, pace: worker_pb2.SetPace) -> None:
        self._pace_s = clamped_s(pace.interval_s, 0.0, MOST_PACE_S)
        self._tokens_s = clamped_s(pace.tokens_interval_s, 0.0, MOST_PACE_S)
        self._schedule()

    async def __aiter__(self) -> AsyncIterator[worker_pb2.AttachResponse]:
        while not self.is_closed:
            await self._wakes.wait()
            self._wakes.clear()
            end = self._num_put
            while self._num_taken < end and not self.is_closed:
                self._sent_s = asyncio.get_running_loop().time()
                yield self._next_ones() if self._is_batching else self._next()
            self._schedule()

    def _schedule(self) -> None:
        """Wakes the reader when the waiting messages are due."""
        if self.is_closed or not self._messages:
            return
        is_urgent = self._last_urgent > self._num_taken
        loop = asyncio.get_running_loop()
        due_s = self._sent_s + (self._pace_s if is_urgent else max(self._pace_s, self._tokens_s))
        if self._timer is not None:
            if loop.time() < self._timer.when() <= due_s:
                return
            self._timer.cancel()
            self._timer = None
        if due_s <= loop.time():
            self._wakes.set()
        else:
            self._timer = loop.call_at(due_s, self._wakes.set)

    def _next_ones(self) -> worker_pb2.AttachResponse:
        """All waiting messages, up to the limits. A change of the cache is sent alone, because it may be large."""
        ones = [self._next()]
        size = _size(ones[0])
        while self._messages and size < MAX_MERGED_ROWS:
            if ones[-1].HasField("kv_events") or self._messages[0].HasField("kv_events"):
                break
            ones.append(self._next())
            size += _size(ones[-1])
        if len(ones) == 1:
            return ones[0]
        return worker_pb2.AttachResponse(batch=worker_pb2.AttachResponses(messages=ones))

    def _next(self) -> worker_pb2.AttachResponse:
        """The oldest message. Tokens of several waiting steps are merged: a slow router then reads fewer messages."""
        first = self._take()
        self._size -= (size := _size(first))
        if first.HasField("tokens"):
            while self._messages and size < MAX_MERGED_ROWS and _may_follow(first, self._messages[0]):
                more = self._take()
                self._size -= (more_size := _size(more))
                size += more_size
                first.tokens.MergeFrom(more.tokens)
        return first

    def _take(self) -> worker_pb2.AttachResponse:
        self._num_taken += 1
        return self._messages.popleft()


def _may_wait(message: worker_pb2.AttachResponse) -> bool:
    """Whether nobody waits for it: reports, and tokens that do not end an answer."""
    kind = message.WhichOneof("message")
    if kind == "tokens":
        return not any(row.finish for row in message.tokens.rows)
    return kind in ("load", "batch_timed", "kv_events", "kv_links")


def _may_follow(first: worker_pb2.AttachResponse, more: worker_pb2.AttachResponse) -> bool:
    """Whether the tokens in `more` may be appended to `first`. The router reads plain tokens before rows, so plain
    tokens cannot follow rows in one message."""
    return more.HasField("tokens") and not (first.tokens.rows and more.tokens.HasField("plain"))


def _size(message: worker_pb2.AttachResponse) -> int:
    """The size of a message, in token rows."""
    if message.HasField("prompt_scored") or message.HasField("log"):
        return 1 + message.ByteSize() // ROW_BYTES
    return 1 + len(message.tokens.rows) + len(message.tokens.plain.token_ids)


@final
class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService on a grpc.aio server; every method runs on its event loop."""

    def __init__(
        self,
        program: AnyProgram,
        post: Callable[[Callable[[], None]], None],
        num_waiting_calls: Callable[[], int],
        recent_log: Callable[[], tuple[LogLine, ...]] = tuple,
        change_role: Callable[[worker_pb2.ChangeRoleRequest], Awaitable[worker_pb2.ChangeRoleResponse]] | None = None,
    ) -> None:
        """`change_role` may raise PdserveError."""
        self.program = program
        self._post = post
        self._num_waiting_calls = num_waiting_calls
        self._recent_log = recent_log
        self._change_role = change_role
        self._serves = asyncio.Event()  # not while the program is exchanged
        self._serves.set()
        self._attachments = OutageLog(log, "router gone", "router attached", level=logging.INFO)
        self._lines = PeerLog(log)
        self._numbers = itertools.count(1)
        self._outboxes: dict[int, SessionOutbox] = {}
        self._calls: dict[int, asyncio.Task[Any]] = {}  # of each session
        # The newest session of each router process. Two processes may have the same router id: neither may end the
        # other's session.
        self._session_of: dict[tuple[str, str], int] = {}

    @property
    def has_routers(self) -> bool:
        return bool(self._outboxes)

    def deliver(self, messages: Mapping[int, list[worker_pb2.AttachResponse]]) -> None:
        for session, batch in messages.items():
            outbox = self._outboxes.get(session)
            if outbox is not None:
                outbox.put(batch)

    def close(self) -> None:
        """Ends every stream."""
        for outbox in self._outboxes.values():
            outbox.close()

    async def pause(self, grace_s: float) -> None:
        """Ends every stream, and lets new ones wait until `resume`. The program has then been told of each end. Raises
        Unavailable if a stream does not end within twice `grace_s`."""
        self._serves.clear()
        self.close()
        loop = asyncio.get_running_loop()
        for is_last in (False, True):
            ends_s = loop.time() + grace_s
            while self._calls and loop.time() < ends_s:
                await asyncio.sleep(PAUSE_POLL_S)
            for one in self._calls.values():  # of routers that do not read
                if is_last:
                    raise Unavailable("the stream of a router does not end")
                one.cancel()

    def resume(self, program: AnyProgram) -> None:
        """Serves another program from now on."""
        self.program = program
        self._serves.set()

    async def ChangeRole(self, request: worker_pb2.ChangeRoleRequest, context: Any) -> worker_pb2.ChangeRoleResponse:
        try:
            if self._change_role is None:
                raise Unavailable("this worker has one role only")
            return await self._change_role(request)
        except PdserveError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise  # abort has raised

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        try:
            first = await asyncio.wait_for(context.read(), HELLO_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"hello: none within {HELLO_S:g} s")
            return
        if first is EOF or first.WhichOneof("message") != "hello" or not first.hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello: expected first, with a router_id")
            return
        hello = first.hello
        if not is_compatible(FULL_VERSION, hello.version):  # an older router, which did not check it itself
            why = f"the router's hello: {mismatch(FULL_VERSION, hello.version)}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
            return
        while not self._serves.is_set():
            try:
                await asyncio.wait_for(self._serves.wait(), HELLO_S)
            except TimeoutError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker still changes its role")
                return
        name, session = hello.router_id, next(self._numbers)

        def on_full(num_messages: int) -> None:
            why = "a router reads too slowly; its stream ends"
            self._lines.warning(why, name, router_id=name, messages=num_messages)

        outbox = SessionOutbox(is_batching=hello.reads_batches, on_full=on_full)
        router = (name, hello.router_incarnation)
        older = self._outboxes.get(self._session_of.get(router, 0))
        if older is not None:  # one stream per router: the older one may be dead but still open
            older.close()
        self._outboxes[session] = outbox
        call = asyncio.current_task()
        assert call is not None
        self._calls[session] = call
        self._session_of[router] = session
        self._attachments.recovered(name, router_id=name, session=session)
        reader: asyncio.Task[None] | None = None
        try:
            await context.write(worker_pb2.AttachResponse(hello=self.program.hello()))
            self._post(partial(self.program.attached, session, hello))
            reader = asyncio.create_task(self._read(session, context, outbox))
            async for message in outbox:
                await context.write(message)
        except grpc.aio.InternalError:  # the router disconnected during a write: treated like a cancelled call
            raise asyncio.CancelledError from None
        finally:
            if reader is not None:
                reader.cancel()
            outbox.close()
            del self._outboxes[session]
            if self._session_of.get(router) == session:
                del self._session_of[router]
            self._post(partial(self.program.lost, session))
            del self._calls[session]
            self._attachments.failed(name, router_id=name, session=session)

    async def _read(self, session: int, context: Any, outbox: SessionOutbox) -> None:
        """Reads until the router ends its stream or disconnects. Both are handled in the same way."""
        try:
            while True:
                message = await context.read()
                if message is EOF:
                    return
                while self._num_waiting_calls() > MAX_INBOX:
                    await asyncio.sleep(INBOX_PAUSE_S)
                received_s = self.program.context.now()  # now, because the message may wait for the running step
                for one in message.batch.messages if message.HasField("batch") else (message,):
                    if one.HasField("read_log"):
                        outbox.put([self._log()])
                    elif one.HasField("set_pace"):
                        outbox.set_pace(one.set_pace)
                    else:
                        self._post(partial(self.program.handle, session, one, received_s))
        except (grpc.aio.UsageError, grpc.aio.AbortError):  # cancelled under the read, or a message did not parse
            return
        finally:
            outbox.close()

    def _log(self) -> worker_pb2.AttachResponse:
        lines = map(LOG_LINE.encode, self._recent_log())
        return worker_pb2.AttachResponse(log=worker_pb2.RecentLog(lines=lines))

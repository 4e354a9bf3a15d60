"""Calls from a client to the servicers of its own process: in place of a grpc.aio server and channel, without bytes.

A LocalServer takes the servicers and interceptors of a grpc.aio server, and a LocalTransport connects an AsyncClient to
it. Everything runs on one event loop.

- Each call runs in a task of its own, with its own context variables. Only those that the server names are inherited
  from the client.
- Messages are passed by reference. A message that was written belongs to its reader, so a handler writes each one once
  and does not change it afterwards. It does not change a request either, because the client may send it again.
- At most MAX_BEGUN calls begin in one turn of the event loop, because each may compute for some milliseconds. Callers
  take turns, and so do the tasks of a caller, so a request does not wait for all prompts of another one.
- A writer waits while its reader is more than MAX_AHEAD messages behind.
- Status, details, deadline and cancellation are those of grpc.aio (tests/unit/wire/test_local_channel.py compares).

A request has gRPC's limit on its size. The check of its encoded parts (requests.py) has no meaning here: it bounds the
work of parsing, and nothing is parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, final

import grpc
import grpc.aio

log = logging.getLogger(__name__)

MAX_AHEAD: Final = 8  # messages that were written and not read
MAX_BEGUN: Final = 4  # calls in one turn of the event loop: a client may begin hundreds at once
STOP_S: Final = 5.0  # in which a handler ends after its cancellation
#: gRPC's name for a peer on a unix socket: a client of this process counts as one on this host.
PEER: Final = "unix:"
EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
_OK: Final = grpc.StatusCode.OK
_CLOSED: Final = "Cancelling all calls"  # gRPC's text when a server ends

#: When the call that this task serves began to wait for its turn, by time.monotonic().
QUEUED_S: contextvars.ContextVar[float] = contextvars.ContextVar("pdserveQUEUED_S")

Metadata = Sequence[tuple[str, str | bytes]]


# --- one call -------------------------------------------------------------------------------------------------


@final
class _Details:
    """What an interceptor reads of a call."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method, self.invocation_metadata = method, metadata


@final
class _Serving:
    """A call as its handler sees it: of the methods of grpc.aio's ServicerContext, those that handlers here use."""

    __slots__ = (
        "_code",
        "_deadline_s",
        "_details",
        "_loop",
        "_response",
        "_text",
        "_timer",
        "_trailing",
        "is_cancelled",
        "messages",
        "reader",
        "status",
        "task",
        "writer",
    )

    def __init__(self, details: _Details, timeout_s: float | None, response: type | None) -> None:
        """`response`: the class that the client expects of a message; None: it expects bytes."""
        self._details, self._response = details, response
        self._loop = loop = asyncio.get_running_loop()
        self.messages: deque[Any] = deque()  # written and not read
        self.reader: asyncio.Future[None] | None = None  # of a client that waits for a message or the end
        self.writer: asyncio.Future[None] | None = None  # of a handler that waits for its reader
        self.status: tuple[Any, str, Metadata] | None = None  # at the end: code, text, trailing metadata
        self.is_cancelled = False  # by the client
        self.task: asyncio.Task[None] | None = None
        self._code: Any = _OK
        self._text = ""
        self._trailing: Metadata = ()
        self._deadline_s = None if timeout_s is None else loop.time() + timeout_s
        self._timer = None if self._deadline_s is None else loop.call_at(self._deadline_s, self.expire)

    # --- of the handler

    def invocation_metadata(self) -> Metadata:
        return self._details.invocation_metadata

    def peer(self) -> str:
        return PEER

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else max(self._deadline_s - self._loop.time(), 0.0)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, text: str) -> None:
        self._text = text

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self._check_running()
        self.end(code, details or self._text, trailing_metadata or self._trailing)
        raise grpc.aio.AbortError("Locally aborted.")

    async def write(self, message: Any) -> None:
        self._check_running()
        if self._response is not None and type(message) is not self._response:
            raise TypeError(f"{self._details.method} wrote {type(message)}, not {self._response}")
        messages = self.messages
        messages.append(message)
        self._wake(self.reader)
        while len(messages) > MAX_AHEAD:
            self.writer = self._loop.create_future()
            try:
                await self.writer
            finally:
                self.writer = None
            self._check_running()

    # --- of the call

    async def run(self, find: Callable[[_Details], Any], request: Any, most_bytes: int) -> None:
        try:
            await self._run(find, request, most_bytes)
        except grpc.aio.AbortError:
            assert self.status is not None
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED)
        except Exception as error:  # whatever a handler raises ends its call alone
            log.exception("a handler crashed", extra={"method": self._details.method})
            code = grpc.StatusCode.UNKNOWN if self._code is _OK else self._code
            self.end(code, f"Unexpected {type(error)}: {error}", self._trailing)

    async def _run(self, find: Callable[[_Details], Any], request: Any, most_bytes: int) -> None:
        handler = await find(self._details)
        if handler is None:
            self.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        if handler.request_streaming:  # an interceptor's, which rejects a call of any kind and reads nothing
            request = _one(request)
        elif (size := request.ByteSize()) > most_bytes:
            text = f"Received message larger than max ({size} vs. {most_bytes})"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            return
        if handler.response_streaming:
            serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
            if inspect.isasyncgenfunction(serve):
                async with contextlib.aclosing(serve(request, self)) as messages:
                    async for message in messages:
                        await self.write(message)
            else:
                await serve(request, self)
        else:
            response = await handler.unary_unary(request, self)
            if self._code is _OK:
                await self.write(response)
        self.end(self._code, self._text, self._trailing)

    def end(self, code: Any, text: str = "", trailing: Metadata = ()) -> None:
        """The first end counts."""
        if self.status is not None:
            return
        self.status = code, text, trailing
        if self._timer is not None:
            self._timer.cancel()
        self._wake(self.reader)
        self._wake(self.writer)

    def halt(self, code: Any, text: str) -> None:
        """Ends a running call from outside of its handler."""
        if self.status is None:
            self.messages.clear()
            self.end(code, text)
            if self.task is not None:
                self.task.cancel()

    def expire(self) -> None:
        self.halt(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def cancel(self) -> bool:
        """By the client. False if the call has ended."""
        if self.is_cancelled or (self.status is not None and not self.messages):
            return False
        self.is_cancelled = True
        self.messages.clear()
        self.halt(grpc.StatusCode.CANCELLED, "")
        return True

    def took(self) -> None:
        """The client has read a message."""
        # A writer wakes for several messages, and not for each one.
        if self.writer is not None and len(self.messages) <= MAX_AHEAD // 2:
            self._wake(self.writer)

    def _check_running(self) -> None:
        if self.status is not None:
            raise grpc.aio.UsageError("RPC already finished.")

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


@final
class LocalCall:
    """A call as its client sees it: of grpc.aio's calls, the methods that the SDK uses. A dropped call is cancelled."""

    __slots__ = ("__weakref__", "_read", "_serving")

    def __init__(self, serving: _Serving, read: Callable[[Any], Any] | None) -> None:
        """`read` converts a message for a client that expects bytes."""
        self._serving, self._read = serving, read

    def cancel(self) -> bool:
        return self._serving.cancel()

    def cancelled(self) -> bool:
        return self._serving.is_cancelled

    @property
    def has_message(self) -> bool:
        return bool(self._serving.messages)

    async def read(self) -> Any:
        """The next message, or EOF. Raises grpc.aio.AioRpcError, and CancelledError after `cancel`."""
        serving = self._serving
        while not serving.messages:
            if serving.status is not None:
                return self._end()
            if serving.reader is not None:
                raise grpc.aio.UsageError("another task reads this call")
            serving.reader = asyncio.get_running_loop().create_future()
            try:
                await serving.reader
            except asyncio.CancelledError:
                serving.cancel()
                raise
            finally:
                serving.reader = None
        message = serving.messages.popleft()
        serving.took()
        return message if self._read is None else self._read(message)

    def __await__(self) -> Generator[Any, None, Any]:
        """The response of a call that has one."""
        return self.read().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def _end(self) -> Any:
        if self._serving.is_cancelled:
            raise asyncio.CancelledError
        assert self._serving.status is not None
        code, text, trailing = self._serving.status
        if code is _OK:
            return EOF
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), text)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the event loop may be closed
            self._serving.cancel()


@final
class _Waiting:
    """Calls that have not begun, with their requests and contexts. Callers take turns, and within each its tasks."""

    def __init__(self) -> None:
        self._of: dict[Any, dict[Any, deque[tuple[_Serving, Any, contextvars.Context]]]] = {}  # the next one first

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, serving: _Serving, request: Any, context: contextvars.Context) -> None:
        caller = dict(serving.invocation_metadata()).get("authorization")
        tasks = self._of.setdefault(caller, {})
        tasks.setdefault(asyncio.current_task(), deque()).append((serving, request, context))

    def pop(self) -> tuple[_Serving, Any, contextvars.Context]:
        caller, tasks = next(iter(self._of.items()))
        task, calls = next(iter(tasks.items()))
        del self._of[caller], tasks[task]
        found = calls.popleft()
        if calls:
            tasks[task] = calls
        if tasks:
            self._of[caller] = tasks
        return found


# --- server, transport and channel ----------------------------------------------------------------------------


@final
class LocalServer:
    """Takes servicers by the generated `add_XServicer_to_server`. Belongs to one event loop."""

    def __init__(
        self,
        interceptors: Sequence[Any],
        max_message_bytes: int,
        *,
        inherited: Sequence[contextvars.ContextVar[Any]] = (),
    ) -> None:
        """`max_message_bytes`: of a request. `inherited`: variables that a call has from its client."""
        self._most_bytes = max_message_bytes
        self._handlers: dict[str, Any] = {}
        self._find: Callable[[_Details], Any] = self._handler
        for one in reversed(interceptors):
            self._find = partial(one.intercept_service, self._find)
        self._context = contextvars.copy_context()
        self._inherited = inherited
        self._running: dict[_Serving, LocalChannel] = {}  # also those that have not begun
        self._unary, self._streams = _Waiting(), _Waiting()  # for the next turns of the loop
        self._num_begun = 0  # in this turn
        self._has_ended = False

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Not used: the generated code also adds each handler by its name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": one for name, one in handlers.items()}

    async def stop(self, grace_s: float) -> None:
        """Rejects new calls and those that have not begun, and ends those that still run after `grace_s`."""
        self._has_ended = True
        for serving in list(self._running):
            if serving.task is None:
                serving.halt(grpc.StatusCode.UNAVAILABLE, _CLOSED)
        if (tasks := self._tasks()) and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)
        for serving in list(self._running):
            serving.halt(grpc.StatusCode.UNAVAILABLE, _CLOSED)
        if tasks := self._tasks():
            _, left = await asyncio.wait(tasks, timeout=STOP_S)
            if left:
                log.warning("handlers did not end", extra={"calls": len(left), "after_s": STOP_S})

    def handler(self, method: str) -> Any:
        """None if there is none."""
        return self._handlers.get(method)

    def begin(self, channel: LocalChannel, serving: _Serving, request: Any, *, is_unary: bool) -> None:
        if self._has_ended:
            serving.halt(grpc.StatusCode.UNAVAILABLE, _CLOSED)
            return
        self._running[serving] = channel
        context = self._context.copy()
        context.run(QUEUED_S.set, time.monotonic())
        for variable in self._inherited:
            if (value := variable.get(None)) is not None:
                context.run(variable.set, value)
        (self._unary if is_unary else self._streams).add(serving, request, context)
        self._begin_some()

    def close(self, channel: LocalChannel) -> None:
        for serving, owner in list(self._running.items()):
            if owner is channel:
                serving.cancel()

    def _begin_some(self) -> None:
        loop = asyncio.get_running_loop()
        while (self._unary or self._streams) and self._num_begun < MAX_BEGUN:
            # One of a stream in each turn, so that others cannot keep all streams waiting.
            is_unary = self._unary and not (self._streams and self._num_begun == MAX_BEGUN - 1)
            serving, request, context = (self._unary if is_unary else self._streams).pop()
            if serving.status is not None:  # cancelled
                del self._running[serving]
                continue
            if self._num_begun == 0:
                loop.call_soon(self._next_turn)
            self._num_begun += 1
            work = serving.run(self._find, request, self._most_bytes)
            serving.task = task = loop.create_task(work, context=context)
            task.add_done_callback(partial(self._ended, serving))

    def _next_turn(self) -> None:
        self._num_begun = 0
        self._begin_some()

    def _ended(self, serving: _Serving, task: asyncio.Task[None]) -> None:
        del self._running[serving]

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [one.task for one in self._running if one.task is not None]

    async def _handler(self, details: _Details) -> Any:
        return self._handlers.get(details.method)


@final
class LocalTransport:
    """A ClientTransport (client/connect.py) to a LocalServer, for AsyncClient alone."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server

    def open(self, target: object) -> NoReturn:
        raise TypeError("a client that blocks would stop the server on its own event loop: use AsyncClient")

    def open_aio(self, target: object) -> LocalChannel:
        return LocalChannel(self._server)


@final
class LocalChannel:
    """Of a grpc.aio channel, the methods that generated stubs and the SDK use."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._is_closed = False

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = False
    ) -> Callable[..., LocalCall]:
        return partial(self._call, method, request_serializer, response_deserializer, True)

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = False
    ) -> Callable[..., LocalCall]:
        return partial(self._call, method, request_serializer, response_deserializer, False)

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        self._server.close(self)

    def _call(
        self,
        method: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        is_unary: bool,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> LocalCall:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        handler, read = self._server.handler(method), None
        # A client of another program's, such as the SDK's own of the health service, may have other classes.
        if handler is not None and type(request) is not handler.request_deserializer.__self__:
            request = handler.request_deserializer(serialize(request))
            read = partial(_converted, handler.response_serializer, deserialize)
        kind = None if read is not None else getattr(deserialize, "__self__", None)
        serving = _Serving(_Details(method, tuple(metadata or ())), timeout, kind)
        if timeout is not None and timeout <= 0:
            serving.expire()
        else:
            self._server.begin(self, serving, request, is_unary=is_unary)
        return LocalCall(serving, read)


def _converted(serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any], message: Any) -> Any:
    return deserialize(serialize(message))

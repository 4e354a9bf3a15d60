"""Ends calls that no handler can answer: an unknown method, a message that does not parse, and one of too many parts.

gRPC itself would answer a message that does not parse with UNKNOWN, and log a traceback for each. Every client that
reaches the port can send such messages, so they get a typed error, and one line a minute in the log.

gRPC parses on the event loop, and protobuf allocates each message within a message, of which two bytes are enough. A
thread would not help, because the parser keeps the interpreter to itself. So the bytes of a large message that describe
its parts are counted before it is parsed. This holds for every field and depth, whatever is added to proto/.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, final

import grpc
import grpc.aio

from pdserve.core.errors import InvalidRequest, PdserveError, UnknownMethod
from pdserve.outage_log import PeerLog

log = logging.getLogger(__name__)

QUICK_BYTES: Final = 65_536  # a smaller message has few parts, and is parsed without counting
# Tags, lengths and numbers of a larger one: all but texts, bytes and packed arrays. The largest request within the
# other limits, of 4,096 chat messages with 8,192 calls, has 175,000.
MAX_FRAMING_BYTES: Final = 262_144
_MAX_VARINT_BYTES: Final = 10

# Ends the call with the error's status; raises like grpc.aio's abort().
Abort: TypeAlias = Callable[[Any, PdserveError], Awaitable[Any]]
Handler: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A placeholder for a message that does not parse or is not parsed, which the handler must not receive."""

    num_bytes: int
    has_many_parts: bool = False


@final
class RequestCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg]
    """Put it first among the interceptors of a grpc.aio server. It does not affect handlers that are not coroutines."""

    def __init__(
        self,
        abort: Abort,
        on_rejected: Callable[[PdserveError], None] = lambda error: None,
        *,
        uncounted: Collection[str] = (),
    ) -> None:
        """`on_rejected` is called once for each call that is rejected here, to count it. `uncounted` are methods whose
        messages may have any number of parts."""
        self._abort = abort
        self._on_rejected = on_rejected
        self._uncounted = uncounted
        self._lines = PeerLog(log)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._no_such_method(method)
        parse = handler.request_deserializer
        inner = _behaviour(handler)
        if parse is None or not (inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)):
            return handler
        check = self._checked_stream if handler.request_streaming else self._checked
        make = _MAKE[handler.request_streaming, handler.response_streaming]
        return make(
            check(inner, method),
            request_deserializer=_deserializer(parse, is_counted=method not in self._uncounted),
            response_serializer=handler.response_serializer,
        )

    # ------------------------------------------------------------------------------------------------------------

    def _no_such_method(self, method: str) -> Any:
        async def reject(requests: Any, context: Any) -> None:
            error = UnknownMethod(method)
            self._on_rejected(error)
            await self._abort(context, error)

        return grpc.stream_stream_rpc_method_handler(reject)  # suits every kind of call, because it reads nothing

    def _checked(self, inner: Handler, method: str) -> Handler:
        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, Unparsed):
                await self._reject(request, method, context)
            return await inner(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            if isinstance(request, Unparsed):
                await self._reject(request, method, context)
            async for response in inner(request, context):
                yield response

        return stream if inspect.isasyncgenfunction(inner) else answer

    def _checked_stream(self, inner: Handler, method: str) -> Handler:
        def reader(context: Any) -> _CheckedReader:
            async def reject(message: Unparsed) -> None:
                await self._reject(message, method, context)

            return _CheckedReader(context, reject)

        async def answer(requests: Any, context: Any) -> Any:
            checked = reader(context)
            return await inner(checked, checked)

        async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            checked = reader(context)
            async for response in inner(checked, checked):
                yield response

        return stream if inspect.isasyncgenfunction(inner) else answer

    async def _reject(self, message: Unparsed, method: str, context: Any) -> None:
        seen, expected = "that does not parse", f"the protobuf message that {method} takes"
        line = "a message does not parse"
        if message.has_many_parts:
            line = "a message has too many parts"
            seen = "with too many fields and messages within it"
            expected = f"at most {MAX_FRAMING_BYTES} bytes of tags, lengths and numbers; pack arrays of numbers"
        error = InvalidRequest("request", f"a message of {message.num_bytes} bytes {seen}", expected)
        self._on_rejected(error)
        self._lines.warning(line, method=method)
        await self._abort(context, error)


@final
class _CheckedReader:
    """A call's context, and the iterator over its messages, that ends the call at a message that does not parse."""

    def __init__(self, context: Any, reject: Callable[[Unparsed], Awaitable[None]]) -> None:
        self._context, self._reject = context, reject

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        if isinstance(message, Unparsed):
            await self._reject(message)
        return message

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
            yield message


_MAKE: Final[dict[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _behaviour(handler: Any) -> Any:
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def _deserializer(parse: Callable[[bytes], Any], *, is_counted: bool) -> Callable[[bytes], Any]:
    kind: Any = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]  # a class method of the message

    def deserialize(data: bytes) -> Any:
        try:
            if is_counted and len(data) > QUICK_BYTES and not has_few_parts(data, kind):
                return Unparsed(len(data), has_many_parts=True)
            return parse(data)
        except Exception:  # the C and Python parsers raise different classes
            return Unparsed(len(data))

    return deserialize


def has_few_parts(data: bytes, kind: Any, most: int = MAX_FRAMING_BYTES) -> bool:
    """Whether at most `most` bytes of an encoded message are tags, lengths and numbers, at every depth. `kind` is its
    descriptor. Takes at most `most` steps. Raises ValueError or IndexError if the message does not parse."""
    at, end, nested = 0, len(data), _nested(kind)
    outer: list[tuple[int, Mapping[int, Any]]] = []  # the messages around this one: their ends and nested fields
    while True:
        while at == end:
            if not outer:
                return True
            end, nested = outer.pop()
        begin, skipped = at, 0
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == 2:  # a text, bytes, a packed array or a message
            size, at = _varint(data, at)
            if tag in nested:
                outer.append((end, nested))
                if at + size > end:
                    raise ValueError("a message that ends behind the one around it")
                end, nested = at + size, _nested(nested[tag])
            else:
                skipped = size
        elif wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise ValueError("a group, which no message of proto/ has")
        most -= at - begin
        at += skipped
        if most < 0:
            return False
        if at > end:
            raise ValueError("a field that ends behind its message")


@cache
def _nested(kind: Any) -> Mapping[int, Any]:
    """The descriptors of the messages in a message's fields, by the fields' tags."""
    return {one.number << 3 | 2: one.message_type for one in kind.fields if one.message_type is not None}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for index in range(1, _MAX_VARINT_BYTES):
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number of over 10 bytes")

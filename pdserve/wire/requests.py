"""Ends calls that no handler can answer: an unknown method, and a message that does not parse.

gRPC itself would answer a message that does not parse with UNKNOWN, and log a traceback for each. Every client that
reaches the port can send such messages, so they get a typed error, and one line in the log per LOG_EVERY_S.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import grpc
import grpc.aio

from pdserve.core.errors import InvalidRequest, PdserveError, UnknownMethod

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 10.0

# Ends the call with the error's status; raises like grpc.aio's abort().
Abort: TypeAlias = Callable[[Any, PdserveError], Awaitable[Any]]
Handler: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A placeholder for a message that does not parse, which the handler must not receive."""

    num_bytes: int


@final
class RequestCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg]
    """Put it first among the interceptors of a grpc.aio server. It does not affect handlers that are not coroutines."""

    def __init__(
        self,
        abort: Abort,
        on_rejected: Callable[[PdserveError], None] = lambda error: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_rejected` is called once for each call that is rejected here, to count it."""
        self._abort = abort
        self._on_rejected = on_rejected
        self._clock = clock
        self._num_unlogged = 0
        self._log_at_s = -float("inf")

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
            request_deserializer=_deserializer(parse),
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
        error = InvalidRequest(
            "request",
            f"a message of {message.num_bytes} bytes that does not parse",
            f"the protobuf message that {method} takes",
        )
        self._on_rejected(error)
        self._log(method)
        await self._abort(context, error)

    def _log(self, method: str) -> None:
        self._num_unlogged += 1
        now_s = self._clock()
        if now_s >= self._log_at_s:
            log.warning("messages do not parse", extra={"method": method, "messages": self._num_unlogged})
            self._num_unlogged, self._log_at_s = 0, now_s + LOG_EVERY_S


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


def _deserializer(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialize(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception:  # the C and Python parsers raise different classes
            return Unparsed(len(data))

    return deserialize

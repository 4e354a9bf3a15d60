"""Opens a server span around each call, under the trace context in the call's metadata.

The contrib instrumentation is not used, because it loses its context on streamed answers (opentelemetry-python-contrib
#2357). Here a server span is never the current context.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any, Final

import grpc
import grpc.aio

from pdserve.telemetry import names
from pdserve.telemetry.propagate import AttributeValue, extract
from pdserve.telemetry.tracing import OpenSpan, Tracing

_NO_SPAN: Final = OpenSpan(None, "")
_span: ContextVar[OpenSpan] = ContextVar("pdserve_span", default=_NO_SPAN)


def current_span() -> OpenSpan:
    """The server span of the call that this task answers; a no-op span outside of such a call."""
    return _span.get()


class TracingServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg]
    """Opens a span around each call of `methods`, such as {"/pdserve.v1.InferenceService/Generate": SPAN_REQUEST}.

    Other methods have no span: a worker's Attach stream stays open for days and is not a request. The handler finds its
    span with current_span().
    """

    def __init__(
        self,
        tracing: Tracing,
        methods: Mapping[str, str],
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        self._tracing, self._methods, self._attributes = tracing, dict(methods), dict(attributes or {})

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        name = self._methods.get(handler_call_details.method)
        if handler is None or name is None:
            return handler
        traceparent = extract(handler_call_details.invocation_metadata)
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped = self._streamed(inner, name, traceparent)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = self._answered(inner, name, traceparent)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        if wrapped is None:  # a blocking handler: gRPC runs it in a thread, where the span is not available
            return handler
        return make(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _streamed(self, inner: Callable[..., Any], name: str, traceparent: str) -> Callable[..., Any] | None:
        if inspect.isasyncgenfunction(inner):

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                with self._around(context, name, traceparent):
                    async with aclosing(inner(request, context)) as answers:
                        async for answer in answers:
                            yield answer

            return stream
        return self._answered(inner, name, traceparent)  # writes through its context

    def _answered(self, inner: Callable[..., Any], name: str, traceparent: str) -> Callable[..., Any] | None:
        if not inspect.iscoroutinefunction(inner):
            return None

        async def answer(request: Any, context: Any) -> Any:
            with self._around(context, name, traceparent):
                return await inner(request, context)

        return answer

    @contextmanager
    def _around(self, context: Any, name: str, traceparent: str) -> Any:
        with self._tracing.span(name, traceparent, self._attributes) as span:
            # Never reset: gRPC runs each call in its own task, whose context ends with it.
            _span.set(span)
            try:
                yield span
            except (asyncio.CancelledError, GeneratorExit):
                span.set(names.RPC_STATUS, "CANCELLED")
                raise
            except Exception:
                span.set(names.RPC_STATUS, _status_name(context, False))
                raise
            else:
                span.set(names.RPC_STATUS, _status_name(context, True))


def _status_name(context: Any, has_returned: bool) -> str:
    code = context.code()
    if code is None:  # no status was set: it follows from how the handler ended
        return "OK" if has_returned else "UNKNOWN"
    if isinstance(code, grpc.StatusCode):
        return str(code.name)
    return next((str(one.name) for one in grpc.StatusCode if one.value[0] == code), "UNKNOWN")

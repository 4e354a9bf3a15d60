"""Real channels and servers; the service is the standard health service and three bare methods of ours."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.telemetry import names
from pdserve.telemetry.interceptors import TracingServerInterceptor, current_span
from pdserve.telemetry.tracing import Tracing, make_tracing
from tests.unit.telemetry.otlp_sink import OtlpSink

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACED = (("traceparent", PARENT),)


class Service:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.has_ended = asyncio.Event()

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.seen.append(current_span().traceparent)
        if request == b"abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no")
        if request == b"raise":
            raise RuntimeError("ours")
        return request

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.seen.append(current_span().traceparent)
        current_span().set(names.INPUT_TOKENS, 3)
        try:
            for _ in range(10**6):
                yield request
                await asyncio.sleep(0)
        finally:
            self.has_ended.set()

    async def write(self, request: bytes, context: Any) -> None:
        self.seen.append(current_span().traceparent)
        await context.write(request)

    async def sum(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([one async for one in requests])

    async def mirror(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for one in requests:
            yield one

    def blocking(self, request: bytes, context: Any) -> bytes:
        return request


METHODS = ("echo", "count", "write", "sum", "mirror", "blocking")


@asynccontextmanager
async def serving(tracing: Tracing, *, untraced: tuple[str, ...] = ()) -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    handlers = {
        "echo": grpc.unary_unary_rpc_method_handler(service.echo),
        "count": grpc.unary_stream_rpc_method_handler(service.count),
        "write": grpc.unary_stream_rpc_method_handler(service.write),
        "sum": grpc.stream_unary_rpc_method_handler(service.sum),
        "mirror": grpc.stream_stream_rpc_method_handler(service.mirror),
        "blocking": grpc.unary_unary_rpc_method_handler(service.blocking),
    }
    traced = {f"/t/{name}": f"t.{name}" for name in METHODS if name not in untraced}
    server = grpc.aio.server(interceptors=[TracingServerInterceptor(tracing, traced)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(1.0)


@pytest.fixture
async def tracing(sink: OtlpSink):
    tracing = make_tracing("t", sink.endpoint)
    yield tracing
    await asyncio.to_thread(tracing.close)


def channel(address: str) -> Any:
    return grpc.aio.insecure_channel(address)


async def flushed(tracing: Tracing, sink: OtlpSink) -> dict[str, Any]:
    await asyncio.to_thread(tracing.close)
    return {span.name: span for span in sink.spans}


async def test_every_kind_of_call_passes_the_context(sink: OtlpSink, tracing: Tracing) -> None:
    async with serving(tracing) as (service, address), channel(address) as client:
        assert await client.unary_unary("/t/echo")(b"x", metadata=TRACED) == b"x"
        assert [one async for one in client.unary_stream("/t/write")(b"w", metadata=TRACED)] == [b"w"]
        assert await client.stream_unary("/t/sum")(iter([b"a", b"b"]), metadata=TRACED) == b"ab"
        assert [one async for one in client.stream_stream("/t/mirror")(iter([b"a", b"b"]), metadata=TRACED)] == [
            b"a",
            b"b",
        ]
        assert await client.unary_unary("/t/blocking")(b"b", metadata=TRACED) == b"b"
        spans = await flushed(tracing, sink)
    assert set(spans) == {"t.echo", "t.write", "t.sum", "t.mirror"}
    assert {span.parent_id for span in spans.values()} == {"b7ad6b7169203331"}
    assert {span.attributes["rpc.response.status_code"] for span in spans.values()} == {"OK"}
    assert [seen.split("-")[2] for seen in service.seen] == [spans["t.echo"].span_id, spans["t.write"].span_id]


async def test_a_cancelled_stream_ends_the_handler_and_the_span(sink: OtlpSink, tracing: Tracing) -> None:
    async with serving(tracing) as (service, address), channel(address) as client:
        call = client.unary_stream("/t/count")(b"x", metadata=TRACED)
        assert await call.read() == b"x"
        call.cancel()
        await asyncio.wait_for(service.has_ended.wait(), 5.0)
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert await call.code() is grpc.StatusCode.CANCELLED
        spans = await asyncio.to_thread(sink.wait_for, "t.count")
    assert spans[0].attributes[names.INPUT_TOKENS] == 3
    assert spans[0].attributes["rpc.response.status_code"] == "CANCELLED"


async def test_a_task_that_is_cancelled_cancels_its_call(tracing: Tracing) -> None:
    async with serving(tracing) as (service, address), channel(address) as client:

        async def read() -> None:
            async for _ in client.unary_stream("/t/count")(b"x", metadata=TRACED):
                is_reading.set()

        is_reading = asyncio.Event()
        task = asyncio.create_task(read())
        await asyncio.wait_for(is_reading.wait(), 5.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(service.has_ended.wait(), 5.0)


async def test_errors_reach_the_client_and_the_span(sink: OtlpSink, tracing: Tracing) -> None:
    async with serving(tracing) as (_, address), channel(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as aborted:
            await client.unary_unary("/t/echo")(b"abort", metadata=TRACED)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.unary_unary("/t/echo")(b"raise", metadata=TRACED)
        await asyncio.to_thread(tracing.close)
    assert (aborted.value.code(), raised.value.code()) == (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNKNOWN)
    assert sorted((span.attributes["error.type"], span.is_failed) for span in sink.spans) == [
        ("AbortError", True),
        ("RuntimeError", True),
    ]
    assert {span.attributes["rpc.response.status_code"] for span in sink.spans} == {"NOT_FOUND", "UNKNOWN"}


async def test_a_method_without_a_span_name_is_not_traced(sink: OtlpSink, tracing: Tracing) -> None:
    async with serving(tracing, untraced=METHODS) as (service, address), channel(address) as client:
        assert await client.unary_unary("/t/echo")(b"x", metadata=TRACED) == b"x"
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await client.unary_unary("/t/nothing")(b"x", metadata=TRACED)
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert service.seen == [""]
    assert await flushed(tracing, sink) == {}


async def test_a_call_without_context_begins_a_trace(sink: OtlpSink, tracing: Tracing) -> None:
    async with serving(tracing) as (_, address), channel(address) as client:
        await client.unary_unary("/t/echo")(b"x")
        spans = await flushed(tracing, sink)
    assert spans["t.echo"].parent_id == ""


async def test_with_tracing_off_the_handler_still_sees_the_callers_context() -> None:
    async with serving(Tracing.off()) as (service, address), channel(address) as client:
        await client.unary_unary("/t/echo")(b"x", metadata=TRACED)
    assert service.seen == [PARENT]

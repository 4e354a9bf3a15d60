"""Calls that no handler can answer: messages that do not parse, unknown methods, and clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import InvalidRequest, PdserveError, UnknownMethod
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import inference_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.wire import status
from router.service import inference
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start

GARBAGE = b"\xff\xff\xff"
UNARY = (
    "/pdserve.v1.InferenceService/GetModel",
    "/pdserve.v1.InferenceService/Tokenize",
    "/pdserve.v1.InferenceService/Detokenize",
    "/pdserve.v1.InferenceService/EndSession",
    "/pdserve.v1.ClusterService/GetTopology",
    "/pdserve.v1.ClusterService/Explain",
    "/pdserve.v1.ClusterService/Drain",
    "/pdserve.v1.ClusterService/Undrain",
    "/grpc.health.v1.Health/Check",
)
STREAMED = ("/pdserve.v1.InferenceService/Generate", "/grpc.health.v1.Health/Watch")
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def raised(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What would be read as a fault: errors, and warnings with a traceback."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info]


async def error_of(call: Any) -> PdserveError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return status.from_rpc_error(caught.value)


async def test_a_message_that_does_not_parse_is_a_bad_request(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics("router")
    front = await connect(metrics=metrics)

    async def send(method: str) -> PdserveError:
        if method in UNARY:
            return await error_of(front.channel.unary_unary(method)(GARBAGE))
        if method in STREAMED:
            return await error_of(front.channel.unary_stream(method)(GARBAGE).read())
        call = front.channel.stream_stream(method)()
        await call.write(GARBAGE)
        return await error_of(call.read())

    methods = (*UNARY, *STREAMED, REFLECTION) * 3
    for method in methods:
        error = await send(method)
        assert isinstance(error, InvalidRequest), (method, error)
        assert error.field == "request"
        assert f"{len(GARBAGE)} bytes" in error.message
        assert method in error.message
    assert raised(caplog) == []
    assert [one.getMessage() for one in caplog.records].count("a message does not parse") == 1
    count = f'{metric_names.REQUEST_ERRORS.name}{{reason="{InvalidRequest.reason}"}} {float(len(methods))}'
    assert count in metrics.text()
    assert await front.health("") == "SERVING"


async def test_a_message_of_many_parts_is_not_parsed(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the method, and also parts that no field has."""
    front = await connect()
    unknown = b"\xc2\x3e\x00" * 2**18
    messages = b"\x1a\x80\x80\x40" + b"\x0a\x00" * 2**19  # within `chat`
    for method in UNARY:
        error = await error_of(front.channel.unary_unary(method)(unknown))
        assert isinstance(error, InvalidRequest), (method, error)
        assert f"{len(unknown)} bytes with too many fields and messages" in error.message
    for method, data in (*((one, unknown) for one in STREAMED), (STREAMED[0], messages)):
        assert "too many fields" in (await error_of(front.channel.unary_stream(method)(data).read())).message
    call = front.channel.stream_stream(REFLECTION)()
    await call.write(unknown)
    assert "too many fields" in (await error_of(call.read())).message
    assert raised(caplog) == []
    assert [one.getMessage() for one in caplog.records if "message" in one.getMessage()] == [
        "a message has too many parts"
    ]
    assert await front.health("") == "SERVING"


@pytest.mark.parametrize("method", ["/pdserve.v1.InferenceService/Explode", "/x/y", "/grpc.health.v1.Health/Delete"])
async def test_an_unknown_method_is_named(connect: Connect, method: str) -> None:
    front = await connect()
    call = front.channel.unary_unary(method)(b"")
    error = await error_of(call)
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (type(error), error.message) == (UnknownMethod, f"no method named {method!r}")


def test_grpcs_error_text_is_not_a_method_name() -> None:
    error = status.from_code(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert isinstance(error, UnknownMethod)
    assert "Method not found" not in error.message


class BrokenStream:
    """A call's stream after its client has disconnected: gRPC fails the write that was pending."""

    def __init__(self, write: Any) -> None:
        self._write = write

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        if message.HasField("delta"):
            raise grpc.aio.InternalError("Failed execute_batch")
        await self._write(message)


async def test_a_write_that_fails_is_a_disconnect(
    connect: Connect, decode: Program, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics("router")
    front = await connect(decode, metrics=metrics)
    write_answer = inference.write_answer

    async def broken(answer: Any, write: Any, *more: Any) -> None:
        await write_answer(answer, BrokenStream(write).write, *more)

    monkeypatch.setattr(inference, "write_answer", broken)
    call = front.stub.Generate(request(max_tokens=8))
    assert (await call.read()).HasField("started")
    await until(front.all_free)
    await until(lambda: num_disconnects(metrics) == 1)
    call.cancel()
    assert raised(caplog) == []


@pytest.mark.parametrize("is_reading", [True, False])
async def test_disconnected_readers_are_not_an_error(
    connect: Connect, decode: Program, caplog: pytest.LogCaptureFixture, is_reading: bool
) -> None:
    metrics = Metrics("router")
    front = await connect(decode, metrics=metrics, max_new_tokens=8000)
    num_readers = 6
    # If the client does not read, a small fixed flow-control window is soon full, and the router waits in a write.
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4096),
    ]
    channels = [grpc.aio.insecure_channel(front.server.address, options=options) for _ in range(num_readers)]
    calls = [
        InferenceServiceStub(one).Generate(request(max_tokens=8000 if is_reading else 400, logprobs=20))
        for one in channels
    ]
    await asyncio.gather(*(call.read() for call in calls))
    if is_reading:
        await asyncio.gather(*(call.read() for call in calls))
    else:
        await until(front.all_free)  # all tokens are there, and do not fit into the window
    for call in calls[::2]:
        call.cancel()
    await asyncio.gather(*(channel.close(None) for channel in channels))
    await until(front.all_free)
    await until(lambda: num_disconnects(metrics) == num_readers)
    assert raised(caplog) == []


def request(max_tokens: int, **sampling: Any) -> inference_pb2.GenerateRequest:
    settings = inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    return inference_pb2.GenerateRequest(text="hello", sampling=settings)


def num_disconnects(metrics: Metrics) -> float:
    line = next(
        one for one in metrics.text().splitlines() if one.startswith(metric_names.CLIENT_DISCONNECTS.name + " ")
    )
    return float(line.split()[1])


async def test_the_model_reports_its_token_limits(connect: Connect, start: Start) -> None:
    small = start("decode_worker", "--model=toy", "--worker-id=small", "--max-context-tokens=64")
    for limit, most in ((4096, 63), (20, 20)):
        front = await connect(small, max_new_tokens=limit)
        assert (await front.client.model()).max_new_tokens == most
        done = await front.client.generate("h", max_tokens=most, temperature=0, ignore_eos=True)
        assert done.usage.completion_tokens == most

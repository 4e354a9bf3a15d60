"""Bad calls to a worker's port: messages that do not parse, unknown methods, connections without calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.access.proof import Identity
from pdserve.core.types import Role
from pdserve.v1 import worker_pb2
from pdserve.wire import peers
from pdserve.worker import host
from pdserve.worker.session import SessionOutbox
from tests.support.cluster_secret import ROUTER, SECRET

GARBAGE = b"\xff\xff\xff"
ATTACH = peers.ATTACH


async def proof(channel: Any, method: str, address: str) -> Any:
    caller = ROUTER if method == peers.ATTACH else Identity.of(SECRET, "worker", "p0", "1")
    return await peers.prove(channel, peers.introduce(caller, method, address))


async def test_idle_connections_are_closed_and_streams_are_not(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(host.OPTIONS)
    assert options["grpc.max_allowed_incoming_connections"] == host.MAX_CONNECTIONS
    monkeypatch.setattr(host, "OPTIONS", tuple((options | {"grpc.max_connection_idle_ms": 200}).items()))
    worker = start(Role.DECODE)
    name, port = worker.address.rsplit(":", 1)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call = channel.stream_stream(ATTACH)(metadata=await proof(channel, peers.ATTACH, worker.address))
        await call.write(worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="r0")).SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        made = [await asyncio.open_connection(name, int(port)) for _ in range(10)]
        for reader, writer in made:
            await asyncio.wait_for(reader.read(), 60)
            writer.close()
        assert await asyncio.wait_for(call.read(), 60) is not grpc.aio.EOF  # A load report.
        assert not call.done()
        call.cancel()


async def ended_with(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return caught.value.code(), caught.value.details() or ""


async def test_a_message_that_does_not_parse_is_a_bad_request(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(Role.DECODE)
    hello = worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="r0")).SerializeToString()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        for first in ((), (hello,)):
            call = channel.stream_stream(ATTACH)(metadata=await proof(channel, peers.ATTACH, worker.address))
            for message in first:
                await call.write(message)
                assert await call.read() is not grpc.aio.EOF
            await call.write(GARBAGE)
            code, details = await ended_with(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"a message of {len(GARBAGE)} bytes that does not parse" in details
        sender = await proof(channel, peers.OPEN, worker.address)
        call = channel.unary_stream(peers.OPEN)(GARBAGE, metadata=sender)
        assert (await ended_with(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        call = channel.unary_stream("/pdserve.v1.WorkerService/Explode")(b"")
        code, details = await ended_with(call)
        assert (code, details) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "no method named '/pdserve.v1.WorkerService/Explode'",
        )
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info] == []
    assert [one.getMessage() for one in caplog.records].count("a message does not parse") == 1


async def test_a_message_of_many_parts_is_not_parsed(start: Callable[..., Any]) -> None:
    worker = start(Role.DECODE)
    unknown = b"\xc2\x3e\x00" * 2**18
    async with grpc.aio.insecure_channel(worker.address) as channel:
        for method in ("/pdserve.v1.PeerService/GetChallenge", "/grpc.health.v1.Health/Check"):
            with pytest.raises(grpc.aio.AioRpcError, match="too many fields") as caught:
                await channel.unary_unary(method)(unknown)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = channel.stream_stream(ATTACH)(metadata=await proof(channel, peers.ATTACH, worker.address))
        await call.write(b"\x3a\x80\x80\x40" + b"\x0a\x00" * 2**19)  # within `batch`
        code, details = await ended_with(call)
        assert (code, "too many fields" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_router_that_disconnects_during_a_write_is_no_error(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC fails the write that was pending. Here it fails the first report of load."""
    worker = start(Role.DECODE)

    async def failing(self: SessionOutbox) -> AsyncIterator[worker_pb2.AttachResponse]:
        raise grpc.aio.InternalError("Failed execute_batch")
        yield worker_pb2.AttachResponse()

    monkeypatch.setattr(SessionOutbox, "__aiter__", failing)
    hello = worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="r0")).SerializeToString()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call = channel.stream_stream(ATTACH)(metadata=await proof(channel, peers.ATTACH, worker.address))
        await call.write(hello)
        assert await call.read() is not grpc.aio.EOF
        until_s = time.monotonic() + 60
        while worker.host._servicer._outboxes:
            assert time.monotonic() < until_s, "the stream's outbox is still there"
            await asyncio.sleep(0.005)
        call.cancel()
    await asyncio.to_thread(worker.host.stop)  # The call has ended by then.
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info] == []


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass

"""Calls to a worker's port that no handler can answer: messages that do not parse, and unknown methods."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.types import Role
from pdserve.v1 import worker_pb2

GARBAGE = b"\xff\xff\xff"
ATTACH = "/pdserve.v1.WorkerService/Attach"


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
            call = channel.stream_stream(ATTACH)()
            for message in first:
                await call.write(message)
                assert await call.read() is not grpc.aio.EOF
            await call.write(GARBAGE)
            code, details = await ended_with(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"a message of {len(GARBAGE)} bytes that does not parse" in details
        call = channel.unary_stream("/pdserve.v1.TransferService/Open")(GARBAGE)
        assert (await ended_with(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        call = channel.unary_stream("/pdserve.v1.WorkerService/Explode")(b"")
        code, details = await ended_with(call)
        assert (code, details) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "no method named '/pdserve.v1.WorkerService/Explode'",
        )
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info] == []
    assert [one.getMessage() for one in caplog.records].count("messages do not parse") == 1


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass

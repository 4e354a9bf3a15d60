"""The router's gate rejects calls before they are read, and learns from the rejections of its state."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pdserve.client.aio import AsyncClient
from pdserve.config import GatewayConfig
from pdserve.core.access.gate import ACCEPTED_S, BURST_S, Gate
from pdserve.core.access.shares import OPERATOR
from pdserve.core.errors import LoadShed, Overloaded, PdserveError
from pdserve.gateway.server import GatewayServer
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import inference_pb2
from pdserve.wire import status
from router.service.admission import Admission
from tests.unit.router_io.conftest import Connect, Front, until
from tests.unit.router_io.processes import Program, Start

REQUEST = inference_pb2.GenerateRequest(
    text="hello",
    sampling=inference_pb2.SamplingParams(max_tokens=2),
    slo=inference_pb2.Slo(ttft_s=60.0, tpot_s=60.0),
)


async def error_of(front: Front, request: inference_pb2.GenerateRequest) -> PdserveError | None:
    try:
        async for _ in front.stub.Generate(request):
            pass
    except grpc.aio.AioRpcError as error:
        return status.from_rpc_error(error)
    return None


async def test_a_call_is_shed_with_its_cause(connect: Connect, decode: Program) -> None:
    metrics = Metrics("router")
    front = await connect(decode, metrics=metrics)
    gate = front.server.gate.core
    assert await error_of(front, REQUEST) is None
    await until(lambda: gate.running == 0)
    gate.request_s = 3600.0  # of CPU time: one rejection uses up the budget for the test
    gate.rejected(OPERATOR, 0, 2.0, front.server.gate.clock())
    gate._callers[OPERATOR][0].passes = -1e6
    errors = [await error_of(front, REQUEST) for _ in range(3)]
    for error in errors:
        assert isinstance(error, LoadShed)
        assert error.cause == "cluster"
        assert 2.0 <= error.retry_after_s <= 4.0
    text = metrics.text()
    assert 'pdserve_requests_shed_total{cause="cluster"} 3.0' in text
    assert 'pdserve_request_errors_total{reason="LOAD_SHED"} 3.0' in text
    urgent = inference_pb2.GenerateRequest()
    urgent.CopyFrom(REQUEST)
    urgent.priority = 1
    assert await error_of(front, urgent) is None


async def test_an_answer_is_noted_as_accepted(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    gate = front.server.gate.core
    assert await error_of(front, REQUEST) is None
    [flow] = gate._callers[OPERATOR].values()
    assert flow.accepted_rps > 0.0
    await until(lambda: gate.running == 0)


async def test_a_rejection_by_the_state_uses_the_budget(connect: Connect, start: Start) -> None:
    """The queue has no room for all answers of a call."""
    flags = ("--model=toy", "--worker-id=d2", "--heartbeat-s=0.05", "--max-batch=2", "--inbox-depth=1")
    front = await connect(start("decode_worker", *flags, "--toy-step-s=0.02"), max_queue=1)
    gate = front.server.gate.core
    gate.request_s = 3600.0
    many = inference_pb2.GenerateRequest(text="hello", n=16, sampling=inference_pb2.SamplingParams(max_tokens=200))
    error = await error_of(front, many)
    assert type(error) is Overloaded
    [flow] = gate._callers[OPERATOR].values()
    assert flow.level_s < 0.0
    assert flow.retry_s == pytest.approx(error.retry_after_s)


async def post(address: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def status_of(address: str, body: bytes) -> bytes:
    reader, writer = await post(address, body)
    answer = await reader.read()
    writer.close()
    return answer.split()[1]


async def test_a_gateway_in_the_routers_process_enters_each_request_once(
    connect: Connect, slow_decode: Program
) -> None:
    front = await connect(slow_decode)
    gate = front.server.gate.core
    gateway = GatewayServer(GatewayConfig(router="", port=0), front.server.transport, gate=front.server.gate)
    address = await gateway.start()
    try:
        reader, writer = await post(address, b'{"prompt": "hello", "max_tokens": 20, "stream": true}')
        assert b" 200 " in await reader.readline()
        assert gate.running == 1
        assert b"[DONE]" in await reader.read()
        writer.close()
        await until(lambda: gate.running == 0)
        [flow] = gate._callers[OPERATOR].values()
        assert 0.0 < flow.accepted_rps <= 1.0 / ACCEPTED_S
    finally:
        await gateway.stop()


async def test_a_gateway_in_the_routers_process_leaves_the_decision_to_the_router(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an error nor a rejection that is not the state's counts."""
    front = await connect(decode)
    gate = front.server.gate.core
    gate.request_s = 3600.0
    gateway = GatewayServer(GatewayConfig(router="", port=0), front.server.transport, gate=front.server.gate)
    address = await gateway.start()
    try:
        assert await status_of(address, b'{"prompt": "hello", "max_tokens": 1000000}') == b"400"

        async def no_room(*args: object) -> None:
            raise Overloaded("too many prompts are waiting", 1.0)

        with monkeypatch.context() as patch:
            patch.setattr(Admission, "prepare", no_room)
            assert await status_of(address, b'{"prompt": "hello"}') == b"429"
        [flow] = gate._callers[OPERATOR].values()
        assert (flow.accepted_rps, flow.level_s, flow.budget.level_s) == (0.0, 0.0, BURST_S)
    finally:
        await gateway.stop()


async def test_a_gateway_that_ends_leaves_the_routers_gate_open(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    gate = front.server.gate
    gateway = GatewayServer(GatewayConfig(router="", port=0), front.server.transport, gate=gate)
    await gateway.start()
    with gate.enter(OPERATOR, 0):
        await gateway.stop()
        assert gate._timer is not None


async def test_the_time_in_the_tokenizer_is_no_wait_of_a_request(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer with its prompt (`echo`) has its prompt tokenized before its call."""
    front = await connect(decode)
    gate = front.server.gate
    waits: list[tuple[float, float]] = []
    ended_s: list[float] = []
    tokenize = AsyncClient.tokenize

    async def slow(self: AsyncClient, *args: Any) -> list[int]:
        found = await tokenize(self, *args)
        await asyncio.sleep(0.01)
        ended_s.append(gate.clock())
        return found

    monkeypatch.setattr(AsyncClient, "tokenize", slow)
    monkeypatch.setattr(Gate, "waited", lambda self, seconds: waits.append((seconds, gate.clock())))
    gateway = GatewayServer(GatewayConfig(router="", port=0), front.server.transport, gate=gate)
    address = await gateway.start()
    try:
        body = b'{"prompt": "hello", "max_tokens": 1, "echo": true, "logprobs": 1}'
        assert await status_of(address, body) == b"200"
    finally:
        await gateway.stop()
    [(waited_s, at_s)], [tokenized_s] = waits, ended_s
    assert 0.0 < waited_s <= at_s - tokenized_s

"""Messages that are ready together travel as one, where both ends can read that, and in order."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from pdserve.v1 import worker_pb2, worker_pb2_grpc
from router.service import worker_stream
from router.service.worker_stream import WorkerStream
from tests.support.cluster_secret import ROUTER, proofs, protect
from tests.unit.router_io.conftest import until


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that sends its hello and then `answers`, and stores the messages that it receives."""

    def __init__(self, *answers: worker_pb2.AttachResponse, reads_batches: bool) -> None:
        hello = worker_pb2.WorkerHello(worker_id="d0", incarnation="1", reads_batches=reads_batches)
        self._says = [worker_pb2.AttachResponse(hello=hello), *answers]
        self.facts: list[worker_pb2.AttachRequest] = []

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        for message in self._says:
            await context.write(message)
        while isinstance(message := await context.read(), worker_pb2.AttachRequest):
            self.facts.append(message)


class Ears:
    def __init__(self) -> None:
        self.heard: list[worker_pb2.AttachResponse] = []

    def attached(self, one: WorkerStream, hello: worker_pb2.WorkerHello) -> str | None:
        return None

    def received(self, one: WorkerStream, message: worker_pb2.AttachResponse) -> None:
        self.heard.append(message)

    def detached(self, one: WorkerStream, reason: str) -> None: ...


async def exchange(worker: Worker, *, say: int, hear: int) -> Ears:
    """One session that sends `say` cancels at once and receives `hear` messages."""
    interceptor = proofs()
    server, ears = grpc.aio.server(interceptors=(interceptor,)), Ears()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    protect(server, interceptor, f"127.0.0.1:{port}")
    await server.start()
    one = WorkerStream(f"127.0.0.1:{port}", lambda: worker_pb2.RouterHello(router_id="r"), ears, ROUTER)
    task = asyncio.create_task(one.run())
    try:
        await until(lambda: one.is_attached)
        for number in range(say):
            assert one.send(worker_pb2.AttachRequest(cancel=worker_pb2.Cancel(request_id="a", attempt=number)))
        await until(lambda: len(attempts(worker)) == say and len(ears.heard) == hear)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await server.stop(None)
    return ears


def attempts(worker: Worker) -> list[int]:
    ones = [one for facts in worker.facts for one in (facts.batch.messages if facts.HasField("batch") else [facts])]
    return [one.cancel.attempt for one in ones]


async def test_waiting_messages_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stream, "MAX_BATCH", 10)
    worker = Worker(reads_batches=True)
    await exchange(worker, say=25, hear=0)
    assert attempts(worker) == list(range(25))
    assert [len(facts.batch.messages) for facts in worker.facts] == [10, 10, 5]


async def test_a_batch_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stream, "MAX_BATCH_BYTES", 1)
    worker = Worker(reads_batches=True)
    await exchange(worker, say=3, hear=0)
    assert attempts(worker) == [0, 1, 2]
    assert [len(facts.batch.messages) for facts in worker.facts[:2]] == [1, 1]


async def test_a_worker_that_does_not_know_batches_gets_none() -> None:
    worker = Worker(reads_batches=False)
    await exchange(worker, say=5, hear=0)
    assert [facts.cancel.attempt for facts in worker.facts] == list(range(5))
    assert not any(facts.HasField("batch") for facts in worker.facts)


async def test_a_batch_is_received_as_its_messages_in_order() -> None:
    loads = [worker_pb2.AttachResponse(load=worker_pb2.Load(steps=steps)) for steps in range(5)]
    batch = worker_pb2.AttachResponse(batch=worker_pb2.AttachResponses(messages=loads[:4]))
    ears = await exchange(Worker(batch, loads[4], reads_batches=True), say=0, hear=5)
    assert [one.load.steps for one in ears.heard] == list(range(5))

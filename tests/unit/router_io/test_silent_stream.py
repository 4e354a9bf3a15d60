"""A stream that stays open and silent, as a cut network leaves one, is ended and dialled anew."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from pdserve.v1 import worker_pb2, worker_pb2_grpc
from router.service.worker_stream import WorkerStream
from tests.support.cluster_secret import ROUTER, proofs, protect
from tests.unit.router_io.conftest import until


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Tells its load every `beat_s` seconds; never where that is None."""

    def __init__(self, beat_s: float | None) -> None:
        self._beat_s = beat_s
        self.streams = 0

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        self.streams += 1
        await context.read()
        hello = worker_pb2.WorkerHello(worker_id="p0", incarnation="1")
        await context.write(worker_pb2.AttachResponse(hello=hello))
        while True:
            await asyncio.sleep(3600.0 if self._beat_s is None else self._beat_s)
            await context.write(worker_pb2.AttachResponse(load=worker_pb2.Load()))


class Ears:
    def __init__(self) -> None:
        self.heard = 0
        self.reasons: list[str] = []

    def attached(self, one: WorkerStream, hello: worker_pb2.WorkerHello) -> str | None:
        return None

    def received(self, one: WorkerStream, message: worker_pb2.AttachResponse) -> None:
        self.heard += 1

    def detached(self, one: WorkerStream, reason: str) -> None:
        self.reasons.append(reason)


async def listen(worker: Worker, silence_s: float, is_enough: Any) -> Ears:
    interceptor = proofs()
    server, ears = grpc.aio.server(interceptors=(interceptor,)), Ears()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    protect(server, interceptor, f"127.0.0.1:{port}")
    await server.start()
    hello = worker_pb2.RouterHello(router_id="r")
    task = asyncio.create_task(WorkerStream(f"127.0.0.1:{port}", lambda: hello, ears, ROUTER, silence_s).run())
    try:
        await until(lambda: is_enough(ears))
    finally:
        task.cancel()
        await asyncio.wait([task])
        await server.stop(None)
    return ears


async def test_a_silent_stream_is_closed_and_reconnected() -> None:
    worker = Worker(beat_s=None)
    ears = await listen(worker, 0.2, lambda ears: worker.streams >= 3)
    assert set(ears.reasons[:2]) == {"the worker sent nothing for 0.2 s"}


async def test_a_worker_that_reports_its_load_stays_connected() -> None:
    worker = Worker(beat_s=0.05)
    ears = await listen(worker, 3.0, lambda ears: ears.heard >= 80)  # for longer than that
    assert worker.streams == 1
    assert len(ears.reasons) == 1, "at the end"

"""Clients that leave or do not read, and workers that go: nothing stays behind on any worker."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pdserve.engine.toy import answer
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from router.service.answer import Answer
from router.service.inference import InferenceServicer
from router.service.worker_stream import WorkerStream
from tests.support.cluster_secret import ROUTER
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start


async def test_closing_a_stream_in_the_middle_frees_the_workers(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    stream = front.client.stream("hello", max_tokens=4000, temperature=0)
    piece = await anext(stream)
    assert piece.token_ids
    assert front.server.runtime.num_calls == 1
    await stream.aclose()
    await until(front.all_free)
    assert front.server.runtime.num_calls == 0


async def test_leaving_before_the_first_token_frees_the_workers(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    calls = [
        asyncio.create_task(front.client.generate("hello " * 100 + str(number), max_tokens=4000)) for number in range(8)
    ]
    await until(lambda: front.server.runtime.num_calls == 8)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(front.all_free)


async def test_a_broken_connection_is_a_disconnect(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    channel = grpc.aio.insecure_channel(front.server.address)
    stub = InferenceServiceStub(channel)
    request = inference_pb2.GenerateRequest(text="hello", sampling=inference_pb2.SamplingParams(max_tokens=4000))
    call = stub.Generate(request)
    assert (await call.read()).HasField("started")
    await channel.close(None)
    await until(front.all_free)


async def test_a_reader_that_reads_nothing_is_disconnected(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceServicer.__init__, "__kwdefaults__", {"write_s": 0.3})
    front = await connect(decode, max_new_tokens=8000)
    # Logprobs make the answer many times larger than this stream's window, which without probing does not grow.
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    channel = grpc.aio.insecure_channel(front.server.address, options=window)
    sampling = inference_pb2.SamplingParams(max_tokens=8000, temperature=0.0, logprobs=1)
    call = InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hello", sampling=sampling))
    assert (await call.read()).HasField("started")
    await until(front.all_free)
    with pytest.raises(grpc.RpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert "took nothing" in caught.value.details()
    await channel.close()


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stream_continues_at_the_exact_next_token(connect: Connect, start: Start) -> None:
    flags = ("--model=toy", "--heartbeat-s=0.05", "--toy-step-s=0.02")
    doomed = start("decode_worker", "--worker-id=doomed", *flags)
    front = await connect(doomed)
    other = await asyncio.to_thread(start, "decode_worker", "--worker-id=other", *flags)
    stream = front.client.stream("hello", max_tokens=60, temperature=0)
    first = await anext(stream)
    front.server._workers.dial([other.address])
    await until(lambda: len(front.server._workers.roles) == 2)
    doomed.kill()
    rest = [piece async for piece in stream]
    assert (first.text + "".join(piece.text for piece in rest)).encode() == bytes(answer(list(b"hello"), 60))
    assert stream.completion.timings.decode_worker == "other"
    assert stream.completion.timings.attempts == 2


async def test_prompt_logprobs_are_sent_once_despite_a_worker_death(
    connect: Connect, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once some scores have come; the next attempt begins anew, and the client gets each once."""
    flags = ("--model=toy", "--heartbeat-s=0.05", "--toy-step-s=0.02", "--max-batch-tokens=64")
    doomed = start("decode_worker", "--worker-id=doomed", *flags)
    other = await asyncio.to_thread(start, "decode_worker", "--worker-id=other", *flags)
    front = await connect(doomed)
    scored: list[int] = []
    score = Answer.score

    def noted(self: Answer, scores: inference_pb2.PromptLogprobs) -> None:
        scored.append(scores.first_position)
        if len(scored) == 3:
            doomed.kill()
            front.server._workers.dial([other.address])
        score(self, scores)

    monkeypatch.setattr(Answer, "score", noted)
    prompt = [33 + index % 90 for index in range(900)]
    done = await front.client.generate(prompt, max_tokens=4, temperature=0, prompt_logprobs=0)
    assert scored.count(1) == 2
    assert scored.index(1, 1) >= 3
    assert (done.timings.attempts, done.timings.decode_worker) == (2, "other")
    assert done.token_ids == tuple(answer(prompt, 4))
    assert [one.token_id for one in done.prompt_logprobs if one is not None] == prompt[1:]
    await until(lambda: front.server.runtime.state.is_empty)


async def test_readiness_follows_decode_workers_and_a_restarted_one_is_redialled(
    connect: Connect, start: Start, prefill: Program
) -> None:
    decode = start("decode_worker", "--model=toy", "--worker-id=again")
    front = await connect(decode, prefill)
    assert await front.health() == "SERVING"
    decode.kill()

    async def is_not_serving() -> bool:
        return await front.health() == "NOT_SERVING"

    await until(is_not_serving)
    assert await front.health("") == "SERVING"
    port = decode.address.rsplit(":", 1)[1]
    await asyncio.to_thread(start, "decode_worker", "--model=toy", "--worker-id=again", f"--port={port}")

    async def is_serving() -> bool:
        return await front.health() == "SERVING"

    await until(is_serving)
    done = await front.client.generate("hello", max_tokens=8, temperature=0)
    assert done.text.encode() == bytes(answer(list(b"hello"), 8))


async def test_a_worker_of_another_model_is_rejected(
    connect: Connect, decode: Program, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = start("decode_worker", "--model=toy-marked", "--worker-id=stranger")
    front = await connect(decode)
    front.server._workers.dial([stranger.address])
    await until(lambda: "a worker is rejected" in caplog.text)
    [refusal] = [one for one in caplog.records if one.message == "a worker is rejected"]
    assert refusal.__dict__["worker_id"] == "stranger"
    assert "toy-marked" in refusal.__dict__["why"]
    assert list(front.server._workers.roles) == ["d0"]


class Ears:
    """Receives a session's reports."""

    def __init__(self, complaint: str | None = None) -> None:
        self.complaint = complaint
        self.heard: list[str] = []

    def attached(self, session: WorkerStream, hello: worker_pb2.WorkerHello) -> str | None:
        self.heard.append(f"attached {hello.worker_id}")
        return self.complaint

    def received(self, session: WorkerStream, message: worker_pb2.AttachResponse) -> None:
        if message.HasField("load") and "load" not in self.heard:
            self.heard.append("load")

    def detached(self, session: WorkerStream, reason: str) -> None:
        self.heard.append("detached")


def hello() -> worker_pb2.RouterHello:
    return worker_pb2.RouterHello(router_id="test", router_incarnation="1")


async def test_a_session_reconnects_after_hanging_up(decode: Program) -> None:
    ears = Ears()
    session = WorkerStream(decode.address, hello, ears, ROUTER)
    task = asyncio.create_task(session.run())
    await until(lambda: "load" in ears.heard)
    session.hang_up()
    await until(lambda: ears.heard.count("attached d0") == 2)
    assert ears.heard[:4] == ["attached d0", "load", "detached", "attached d0"]
    task.cancel()
    await asyncio.wait([task])
    assert ears.heard[-1] == "detached"
    assert not session.send(worker_pb2.AttachRequest(drain=worker_pb2.DrainWorker()))


async def test_a_rejected_worker_is_reported_once(decode: Program) -> None:
    ears = Ears(complaint="not ours")
    task = asyncio.create_task(WorkerStream(decode.address, hello, ears, ROUTER).run())
    await until(lambda: ears.heard.count("attached d0") == 2)
    task.cancel()
    await asyncio.wait([task])
    assert set(ears.heard) == {"attached d0"}

"""The asyncio client, against the same scripted server as the blocking one."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import grpc.aio
import pytest

from pdserve import (
    AsyncClient,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Retries,
    Unavailable,
)
from pdserve.client import aio
from pdserve.client.aio import AsyncStream
from pdserve.client.base import AnswerBuilder
from pdserve.client.retries import Attempts
from pdserve.v1 import inference_pb2

from .conftest import WAIT_S, Script, delta, finished, started

QUICK = Retries(limit=2, first_backoff_s=0.01, longest_backoff_s=0.02)


async def saw_cancel(script: Script) -> bool:
    return await asyncio.to_thread(script.cancelled.wait, WAIT_S)


async def test_a_completion_has_the_whole_answer(script: Script, target: str) -> None:
    script.says(started("abc"), delta("a", 1), delta("b", 2), finished())
    async with AsyncClient(target) as client:
        done = await client.generate("hi", max_tokens=2)
    assert (done.request_id, done.text, done.token_ids, done.finish_reason) == ("abc", "ab", (1, 2), "length")


async def test_a_stream_yields_pieces_and_then_its_completion(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), delta("b", 2), finished())
    async with AsyncClient(target) as client:
        stream = client.stream("hi")
        assert [piece.text async for piece in stream] == ["a", "b"]
        assert stream.completion.text == "ab"
        assert [piece async for piece in stream] == []


async def test_a_client_made_outside_the_loop_works_inside(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), finished())

    def elsewhere() -> str:
        client = AsyncClient(target)

        async def ask() -> str:
            async with client:
                return (await client.generate("hi")).text

        return asyncio.run(ask())

    assert await asyncio.to_thread(elsewhere) == "a"


async def test_a_rejection_is_retried_after_the_servers_time(script: Script, target: str) -> None:
    script.fails(Overloaded("full", retry_after_s=0.2))
    script.says(started(), delta("a", 1), finished())
    begin_s = time.monotonic()
    async with AsyncClient(target) as client:
        assert (await client.generate("hi")).text == "a"
    assert time.monotonic() - begin_s >= 0.2


async def test_a_failure_after_the_first_token_is_not_retried_without_a_key(script: Script, target: str) -> None:
    script.fails(Unavailable("gone"), started(), delta("a", 1))
    async with AsyncClient(target, retries=QUICK) as client:
        stream = client.stream("hi")
        assert (await anext(stream)).text == "a"
        with pytest.raises(Unavailable, match="gone"):
            await anext(stream)
    assert len(script.requests) == 1


async def test_a_bad_request_names_its_field(script: Script, target: str) -> None:
    script.fails(InvalidRequest("prompt", "", "at least one token"))
    async with AsyncClient(target) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("")
    assert caught.value.field == "prompt"


async def test_a_stream_without_a_finish_reason_is_an_error(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1))
    async with AsyncClient(target) as client:
        with pytest.raises(InternalError, match="finish reason"):
            await client.generate("hi")


async def test_leaving_the_with_block_cancels_the_request(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    async with AsyncClient(target) as client:
        async with client.stream("hi") as stream:
            await anext(stream)
        assert await saw_cancel(script)


async def test_breaking_out_of_the_loop_cancels_the_request(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1), delta("b", 2))
    async with AsyncClient(target) as client:
        async for _ in client.stream("hi"):
            break
        assert await saw_cancel(script)


async def test_cancelling_the_reading_task_cancels_the_request(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    has_first = asyncio.Event()

    async def read(client: AsyncClient) -> None:
        async for _ in client.stream("hi"):
            has_first.set()

    async with AsyncClient(target) as client:
        task = asyncio.create_task(read(client))
        await asyncio.wait_for(has_first.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await saw_cancel(script)


async def test_a_close_by_another_task_ends_a_waiting_reader(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    async with AsyncClient(target) as client:
        stream = client.stream("hi")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.close)
        assert [piece async for piece in stream] == []


async def test_the_timeout_covers_the_call(script: Script, target: str) -> None:
    script.hangs(started())
    async with AsyncClient(target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("hi", timeout_s=0.3)


async def test_a_closed_port_is_unavailable_after_the_retries() -> None:
    async with AsyncClient("127.0.0.1:1", retries=QUICK) as client:
        with pytest.raises(Unavailable):
            await client.model()


async def test_results_are_typed_values(script: Script, target: str) -> None:
    script.unary_errors = [Unavailable("gone")]
    async with AsyncClient(target, retries=QUICK) as client:
        assert (await client.model()).vocab_size == 300
        assert await client.tokenize("ab") == [97, 98]
        assert (await client.end_session("s"), await client.end_session("t")) == (True, False)
        assert (await client.topology()).queued_requests == 2
        assert (await client.explain("r9")).decision == "remote"


async def test_callers_with_different_tokens_share_a_connection(script: Script, target: str) -> None:
    async with AsyncClient(target) as client:
        for token in ("one", "two", None):
            script.says(started(prompt_tokens=7), delta("a", 1), finished())
            stream = client.with_token(token).stream("hi")
            assert (await anext(stream)).text == "a"
            assert stream.prompt_tokens == 7
            async for _ in stream:
                pass
    assert [one.get("authorization") for one in script.metadata] == ["Bearer one", "Bearer two", None]


async def test_a_token_is_not_sent_in_plain_text_to_another_host() -> None:
    with pytest.raises(ConfigError, match="TLS"):
        AsyncClient("192.0.2.1:50051").with_token("secret")


async def test_a_closed_client_says_so(target: str) -> None:
    client = AsyncClient(target)
    other = client.with_token("x")
    await client.close()
    for call in (client.generate("hi"), client.topology(), other.model(), anext(client.watch())):
        with pytest.raises(ValueError, match=r"^this Client is closed$"):
            await call


class ScoredCall:
    """A call whose next message is always of prompt logprobs."""

    is_cancelled = False

    async def read(self) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        message.prompt_logprobs.first_position = 1
        message.prompt_logprobs.tokens.add()
        return message

    def cancel(self) -> None:
        self.is_cancelled = True


def scored_stream(call: ScoredCall) -> AsyncStream:
    request = inference_pb2.GenerateRequest()
    request.sampling.prompt_logprobs = 1
    return AsyncStream(
        lambda _: call, AnswerBuilder(request, ("localhost", 1), is_stream=True), Attempts(WAIT_S, QUICK)
    )


async def test_a_cancelled_reader_ends_its_call_while_prompt_logprobs_are_converted() -> None:
    is_converting, may_end = threading.Event(), threading.Event()
    converter = aio._CONVERTER
    holding = converter.submit(lambda: (is_converting.set(), may_end.wait(WAIT_S)))  # before the conversion
    try:
        call = ScoredCall()
        stream = scored_stream(call)
        reader = asyncio.create_task(anext(stream))
        async with asyncio.timeout(WAIT_S):
            while not converter._work_queue.qsize() or not is_converting.is_set():
                await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert call.is_cancelled
    finally:
        may_end.set()
    await asyncio.wrap_future(holding)
    await asyncio.get_running_loop().run_in_executor(converter, int)  # after the conversion
    assert stream.prompt_logprobs == (None,)


async def test_a_conversion_that_fails_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_: object) -> None:
        raise MemoryError

    call = ScoredCall()
    monkeypatch.setattr(aio, "scored_tokens", crash)
    with pytest.raises(MemoryError):
        await anext(scored_stream(call))
    assert call.is_cancelled


async def test_a_reader_that_is_cancelled_before_a_retry_ends_its_stream() -> None:
    calls: list[FailingCall] = []

    class FailingCall(ScoredCall):
        async def read(self) -> inference_pb2.GenerateResponse:
            has_failed.set()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    def begin(_: float) -> FailingCall:
        calls.append(FailingCall())
        return calls[-1]

    has_failed = asyncio.Event()
    answer = AnswerBuilder(inference_pb2.GenerateRequest(), ("localhost", 1), is_stream=True)
    attempts = Attempts(10 * WAIT_S, Retries(limit=2, first_backoff_s=WAIT_S, longest_backoff_s=WAIT_S))
    stream = AsyncStream(begin, answer, attempts)
    reader = asyncio.create_task(anext(stream))
    await has_failed.wait()
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert [piece async for piece in stream] == []
    assert len(calls) == 1

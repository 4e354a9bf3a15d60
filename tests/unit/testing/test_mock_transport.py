"""Clients whose calls a function answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdserve import AsyncClient, Client, InternalError, NotFound, Overloaded, Retries, Unavailable
from pdserve.testing import MockTransport
from pdserve.v1 import inference_pb2
from tests.unit.client.test_import import HEAVY, loaded_by

QUICK = Retries(limit=2, first_backoff_s=0.001, longest_backoff_s=0.002)


def in_pieces(request: Any) -> Iterator[str]:
    yield from ("Hel", "lo ", request.text)


def test_a_function_answers_both_clients_calls() -> None:
    with Client(transport=MockTransport(in_pieces)) as client:
        assert [piece.text for piece in client.stream("you")] == ["Hel", "lo ", "you"]
        done = client.generate("you", n=2)
    assert (done.text, [choice.text for choice in done.choices]) == ("Hello you", ["Hello you"] * 2)


async def test_a_function_answers_async_calls() -> None:
    async with AsyncClient(transport=MockTransport(in_pieces)) as client:
        assert [piece.text async for piece in client.stream("you")] == ["Hel", "lo ", "you"]
        assert (await client.generate("you")).finish_reason == "stop"


async def test_a_stream_need_not_keep_its_pieces() -> None:
    with Client(transport=MockTransport(in_pieces)) as client, client.stream("you", keeps_pieces=False) as stream:
        assert [piece.text for piece in stream] == ["Hel", "lo ", "you"]
        assert (stream.completion.text, stream.completion.finish_reason) == ("", "stop")
        assert stream._answer._pieces == []
    async with AsyncClient(transport=MockTransport(in_pieces)) as client:
        stream = client.stream("you", keeps_pieces=False)
        assert [piece.text async for piece in stream] == ["Hel", "lo ", "you"]
        assert (stream.completion.text, stream.completion.finish_reason) == ("", "stop")


async def test_calls_with_one_response_get_its_message() -> None:
    def tokens(request: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=list(request.text.encode()))

    with Client(transport=MockTransport(tokens)) as client:
        assert client.tokenize("ab") == [97, 98]
    async with AsyncClient(transport=MockTransport(tokens)) as client:
        assert await client.tokenize("ab") == [97, 98]


def test_messages_are_passed_on_unchanged() -> None:
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=1)
    finished = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
    messages = [
        inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r7", prompt_tokens=3)),
        inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="a", token_ids=[97])),
        inference_pb2.GenerateResponse(finished=finished),
    ]
    with Client(transport=MockTransport(lambda _: messages)) as client:
        done = client.generate("hi")
    assert (done.request_id, done.token_ids, done.finish_reason, done.usage.prompt_tokens) == ("r7", (97,), "length", 3)


@pytest.mark.parametrize("error", [NotFound("model", "x"), Overloaded("full", 2.5), InternalError("broken")])
async def test_an_error_reaches_the_caller_with_its_fields(error: Any) -> None:
    def fail(request: Any) -> str:
        raise error

    with Client(transport=MockTransport(fail), retries=Retries(limit=0)) as client:
        with pytest.raises(type(error)) as caught:
            client.generate("hi")
        assert vars(caught.value) == vars(error)
        with pytest.raises(type(error)):
            client.model()
    async with AsyncClient(transport=MockTransport(fail), retries=Retries(limit=0)) as client:
        with pytest.raises(type(error)):
            await client.generate("hi")
        with pytest.raises(type(error)):
            await client.model()


def test_a_failed_attempt_is_retried_before_the_first_piece_only() -> None:
    attempts: list[Any] = []

    def fail_once(request: Any) -> Iterator[str]:
        attempts.append(request)
        if len(attempts) == 1:
            raise Unavailable("gone")
        yield "a"
        raise Unavailable("gone again")

    with Client(transport=MockTransport(fail_once), retries=QUICK) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        with pytest.raises(Unavailable, match="gone again"):
            next(stream)
    assert len(attempts) == 2


def test_arguments_are_still_checked() -> None:
    with Client(transport=MockTransport(in_pieces)) as client, pytest.raises(TypeError, match="max_tokens"):
        client.generate("hi", max_tokens="many")  # type: ignore[arg-type]


def test_a_closed_stream_ends() -> None:
    with Client(transport=MockTransport(in_pieces)) as client, client.stream("you") as stream:
        next(stream)
        stream.close()
        assert list(stream) == []


def test_mock_transport_needs_only_the_client() -> None:
    assert loaded_by("from pdserve.testing import MockTransport").isdisjoint(HEAVY)

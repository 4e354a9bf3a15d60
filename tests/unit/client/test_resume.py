"""Interrupted calls of both clients: what the next attempt asks for, and when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pdserve import AsyncClient, Client, Completion, InvalidRequest, NoWorkers, Overloaded, Unavailable
from pdserve.client.retries import FIRST_RESUME_S, LONGEST_RESUME_S, MAX_LOST, HeldCall, Retries
from pdserve.core.errors import NONE_YET, InternalError, PdserveError, ShuttingDown
from pdserve.v1 import inference_pb2
from pdserve.wire.status import is_connection_lost, not_connected

from .conftest import WAIT_S, Script, delta, finished, started

LOST = not_connected("Socket closed")
WAITED = NoWorkers("decode", 0.01, "1 away")
QUICK = Retries(limit=0)


@pytest.fixture(params=[False, True], ids=["sync", "aio"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def generate(target: str, is_async: bool, retries: Retries = QUICK, **options: Any) -> tuple[str, Completion | None]:
    """The text of all pieces, and the completion; without keeping pieces there is none."""
    if not is_async:
        with Client(target, retries=retries) as client:
            stream = client.stream("hi", **options)
            return "".join(piece.text for piece in stream), stream.completion

    async def read() -> tuple[str, Completion | None]:
        async with AsyncClient(target, retries=retries) as client:
            stream = client.stream("hi", **options)
            return "".join([piece.text async for piece in stream]), stream.completion

    return asyncio.run(read())


def first(key: bytes = b"key", *, is_resumed: bool = False, seed: int = 5) -> inference_pb2.GenerateResponse:
    message = started("r7")
    message.started.resume_key, message.started.is_resumed, message.started.seed = key, is_resumed, seed
    return message


def with_logprob(message: inference_pb2.GenerateResponse, logprob: float) -> inference_pb2.GenerateResponse:
    message.delta.logprobs.add(token_id=message.delta.token_ids[0], logprob=logprob)
    return message


@pytest.mark.parametrize("keeps_pieces", [True, False])
def test_an_interrupted_call_continues_after_its_tokens(
    script: Script, target: str, is_async: bool, keeps_pieces: bool
) -> None:
    script.fails(LOST, first(), with_logprob(delta("héll", 1), -0.5), with_logprob(delta("", 2), -0.25))
    script.fails(ShuttingDown(), first(b"next", is_resumed=True), with_logprob(delta("o", 3), -1.0))
    script.says(first(is_resumed=True), with_logprob(delta(" you", 4), -1.0), finished())
    text, done = generate(target, is_async, logprobs=0, temperature=0.5, keeps_pieces=keeps_pieces)
    assert text == "héllo you"
    assert done is not None
    assert (done.request_id, done.text) == ("r7", text if keeps_pieces else "")
    begun, second, third = script.requests
    assert not begun.HasField("resume")
    assert not begun.sampling.HasField("seed")
    assert (second.request_id, second.sampling.seed, second.sampling.temperature) == ("r7", 5, 0.5)
    [held] = second.resume.answers
    assert (second.resume.key, list(held.token_ids), held.num_chars) == (b"key", [1, 2], 4)
    assert (held.cumulative_logprob, held.has_finished) == (-0.75, False)
    [held] = third.resume.answers
    assert (third.resume.key, list(held.token_ids), held.num_chars) == (b"next", [1, 2, 3], 5)
    assert held.cumulative_logprob == -1.75
    assert third.text == "hi"


def of(index: int, message: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
    (message.delta if message.HasField("delta") else message.finished).index = index
    return message


def test_each_answer_continues_after_its_own_tokens(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), of(0, delta("a", 1)), of(1, delta("bc", 2, 3)), of(1, finished()))
    script.says(
        first(is_resumed=True), of(0, delta("d", 4)), of(2, delta("e", 5)), of(0, finished()), of(2, finished())
    )
    _, done = generate(target, is_async, n=3)
    assert done is not None
    assert [one.text for one in done.choices] == ["ad", "bc", "e"]
    held = script.requests[1].resume.answers
    assert [(list(one.token_ids), one.num_chars, one.has_finished) for one in held] == [
        ([1], 1, False),
        ([2, 3], 2, True),
        ([], 0, False),
    ]
    assert not any(one.HasField("cumulative_logprob") for one in held)


def test_a_call_that_only_lacks_its_status_is_complete(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1), finished())
    assert generate(target, is_async)[0] == "a"
    assert len(script.requests) == 1


def test_a_router_that_begins_again_is_passed_over(script: Script, target: str, is_async: bool) -> None:
    """A router of an older build does not know that it should continue."""
    script.fails(LOST, first(), delta("a", 1))
    script.says(first(), delta("x", 7), finished())
    script.hangs(first(), delta("x", 7))
    script.says(first(is_resumed=True), delta("b", 2), finished())
    assert generate(target, is_async)[0] == "ab"
    assert script.cancelled.wait(WAIT_S), "the answer that begins again is ended"
    assert [list(one.token_ids) for request in script.requests[1:] for one in request.resume.answers] == [[1]] * 3


def test_without_a_router_that_can_resume_the_call_is_interrupted(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1))
    for _ in range(20):
        script.says(first(), delta("a", 1), finished())
    with pytest.raises(Unavailable, match="Socket closed") as caught:
        generate(target, is_async, Retries(resume_s=0.5))
    assert "cannot resume the answer" in str(caught.value.__cause__)
    assert script.requests[2:], "it was tried again"


def test_a_rejected_resume_is_the_interruption(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1))
    script.fails(InvalidRequest("resume.key", "24 bytes", "another"))
    with pytest.raises(Unavailable, match="Socket closed") as caught:
        generate(target, is_async)
    assert "resume.key" in str(caught.value.__cause__)


#: What a router that lives may say. It has waited for workers itself, and the text does not matter.
ANSWERS = [InternalError("broken"), WAITED, Unavailable("4 attempts were lost"), Unavailable("Socket closed", 0.01)]


@pytest.mark.parametrize("error", [*ANSWERS, NoWorkers("decode", 0.01, NONE_YET), Overloaded("full", 0.01)])
def test_other_failures_are_no_interruption(script: Script, target: str, is_async: bool, error: PdserveError) -> None:
    script.fails(error, first(), delta("a", 1))
    with pytest.raises(type(error)):
        generate(target, is_async)
    assert len(script.requests) == 1


@pytest.mark.parametrize("error", ANSWERS)
def test_what_a_router_says_about_a_resumed_call_is_its_end(
    script: Script, target: str, is_async: bool, error: PdserveError
) -> None:
    script.fails(LOST, first(), delta("a", 1))
    script.fails(error)
    with pytest.raises(type(error)) as caught:
        generate(target, is_async)
    assert caught.value.message == error.message
    assert len(script.requests) == 2


def test_what_a_router_says_after_further_tokens_is_the_end_too(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1))
    script.fails(WAITED, first(is_resumed=True), delta("b", 2))
    with pytest.raises(NoWorkers, match="1 away"):
        generate(target, is_async)


def test_a_call_that_is_sent_again_is_retried_as_any_other(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST)
    script.fails(WAITED)
    script.says(first(), delta("a", 1), finished())
    assert generate(target, is_async, Retries(limit=2, first_backoff_s=0.01))[0] == "a"


def test_an_interrupted_call_waits_for_workers_and_room(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1))
    script.fails(NoWorkers("decode", 0.01, NONE_YET))
    script.fails(Overloaded("full", 0.01))
    script.says(first(is_resumed=True), delta("b", 2), finished())
    assert generate(target, is_async)[0] == "ab"


def test_a_call_that_was_lost_before_its_first_token_is_sent_again(script: Script, target: str, is_async: bool) -> None:
    def lose(_: Any, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer")
        yield started()

    script.plays.append(lose)
    script.fails(ShuttingDown())
    script.says(first(), delta("b", 2), finished())
    assert generate(target, is_async)[0] == "b"
    assert [one.HasField("resume") for one in script.requests] == [False] * 3


def test_without_time_to_resume_the_call_fails(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1))
    with pytest.raises(Unavailable, match="Socket closed"):
        generate(target, is_async, Retries(limit=2, first_backoff_s=0.01, resume_s=0.0))
    assert len(script.requests) == 1


def test_a_call_that_may_end_its_routers_is_not_sent_for_ever(script: Script, target: str, is_async: bool) -> None:
    script.fails(LOST, first(), delta("a", 1))
    script.fails(LOST, first(is_resumed=True), delta("b", 2))
    for _ in range(MAX_LOST - 1):  # a single further token is no progress
        script.fails(LOST)
    with pytest.raises(Unavailable, match="Socket closed"):
        generate(target, is_async)
    assert script.plays == []
    assert len(script.requests) == 1 + MAX_LOST


def test_a_lost_connection_is_told_from_one_that_was_never_made() -> None:
    assert is_connection_lost(LOST)
    assert is_connection_lost(not_connected("recvmsg:Connection reset by peer"))
    for text in ("gone", "no server answers at h:1 (Connection reset by peer)", "no connection to h:1: Socket closed"):
        assert not is_connection_lost(not_connected(text))
    assert not is_connection_lost(Unavailable("Socket closed"))
    assert not is_connection_lost(ShuttingDown())


def test_waits_grow_until_the_time_to_resume_is_over() -> None:
    retries = Retries(resume_s=60.0)
    assert retries.resume_delay_s(LOST, 1, 0.0, noise=0.5) == 0.5 * FIRST_RESUME_S
    waits = [retries.resume_delay_s(LOST, tries, 1.0, noise=1.0) for tries in (2, 3, 4, 5, 6, 1000)]
    assert waits == [0.2, 0.4, 0.8, 1.6, LONGEST_RESUME_S, LONGEST_RESUME_S]
    assert retries.resume_delay_s(Overloaded("full", 9.0), 2, 1.0, noise=0.0) == 9.0
    assert retries.resume_delay_s(Overloaded("full", 9.0), 2, 51.0, noise=0.0) is None
    assert retries.resume_delay_s(LOST, 1000, 58.0, noise=1.0) is None


def test_no_number_of_answers_takes_memory_before_the_server_has_checked_it() -> None:
    assert len(HeldCall(inference_pb2.GenerateRequest(n=2**32 - 1)).answers) <= 1024


def test_a_call_without_key_or_token_cannot_be_resumed() -> None:
    held = HeldCall(inference_pb2.GenerateRequest(text="hi"))
    assert not held.resume(LOST)
    held.started(first().started)
    assert not held.resume(LOST)
    held.took(delta("a", 1).delta)
    assert held.resume(LOST)
    held.started(first(b"", is_resumed=True).started)
    assert not held.resume(LOST)

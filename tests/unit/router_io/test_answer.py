"""An answer on its way to its client, without any connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.core.errors import Cancelled, InternalError, KvLost
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.results import Timings, Usage
from pdserve.core.types import FinishReason, Sampling, TokenOut
from pdserve.text.stops import THINK_MARKS, ReasoningSplit
from pdserve.text.tokenizer import ToyTokenizer
from pdserve.v1 import inference_pb2
from router.service.answer import Answer, write_answer
from router.state.interface import FinishRequest, Outcome


def tokens(text: str) -> list[TokenOut]:
    return [TokenOut(token_id=byte) for byte in text.encode()]


def answer(**settings: object) -> Answer:
    return Answer("r", 3, Sampling(**settings), ToyTokenizer().detokenizer(), (256,))  # type: ignore[arg-type]


def end(completion_tokens: int, reason: FinishReason = FinishReason.LENGTH) -> FinishRequest:
    return FinishRequest(
        request_id="r",
        reason=reason,
        usage=Usage(prompt_tokens=3, completion_tokens=completion_tokens, cached_prompt_tokens=0),
        timings=Timings(ttft_s=0.1, tpot_s=0.0, total_s=0.1),
        outcome=Outcome.SERVED,
    )


def kinds(messages: list[inference_pb2.GenerateResponse]) -> list[str | None]:
    return [one.WhichOneof("event") for one in messages]


def test_nothing_goes_out_before_the_first_token() -> None:
    one = answer()
    assert one.drain() == []
    one.take(tokens("a"))
    assert kinds(one.drain()) == ["started", "delta"]


def test_a_slow_reader_gets_larger_pieces() -> None:
    one = answer()
    for text in ("ab", "c", "de"):
        one.take(tokens(text))
    one.finish(end(5))
    messages = one.drain()
    assert kinds(messages) == ["started", "delta", "finished"]
    assert (messages[1].delta.text, list(messages[1].delta.token_ids)) == ("abcde", list(b"abcde"))
    assert one.drain() == []


def test_a_reader_too_far_behind_is_disconnected() -> None:
    one = Answer("r", 3, Sampling(), ToyTokenizer().detokenizer(), max_pending_tokens=4)
    one.take(tokens("abcde"))
    assert isinstance(one.error, Cancelled)
    assert one.take(tokens("f")) is None


async def test_a_reader_may_take_long_over_a_stream_that_has_nothing_for_it() -> None:
    one, sent = answer(), []
    limit_s = 0.01

    async def write(message: Any) -> None:
        sent.append(message)

    writing = asyncio.create_task(write_answer(one, write, write_s=limit_s))
    for text in "abc":
        await asyncio.sleep(3 * limit_s)
        one.take(tokens(text))
        while not sent or sent[-1].delta.text != text:
            await asyncio.sleep(0)
    one.finish(end(3))
    await writing
    assert kinds(sent) == ["started", "delta", "delta", "delta", "finished"]


async def test_a_write_that_takes_too_long_is_a_disconnect() -> None:
    one, never, began = answer(), asyncio.Event(), asyncio.Event()

    async def write(message: Any) -> None:
        if message.HasField("delta"):
            began.set()
            await never.wait()

    writing = asyncio.create_task(write_answer(one, write, write_s=0.4))
    await asyncio.sleep(0.3)  # the time of the write counts, and not that of the stream
    one.take(tokens("a"))
    await began.wait()
    began_s = asyncio.get_running_loop().time()  # late on a busy machine
    with pytest.raises(Cancelled, match=r"the reader took nothing for 0\.4 s"):
        await writing
    assert asyncio.get_running_loop().time() - began_s > 0.2, "less than 0.1 s if the stream counted"


async def test_a_cancelled_stream_is_no_slow_reader() -> None:
    writing = asyncio.create_task(write_answer(answer(), lambda message: asyncio.sleep(0), write_s=60.0))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


def test_a_stop_string_overrides_the_workers_reason() -> None:
    one = answer(stop=("cd",))
    assert one.take(tokens("ab")) is None
    assert one.take(tokens("cdef")) == 4
    assert one.take(tokens("gh")) is None
    one.finish(end(8))
    messages = one.drain()
    assert (messages[1].delta.text, bytes(messages[1].delta.token_ids)) == ("ab", b"abcd")
    finished = messages[2].finished
    assert (finished.reason, finished.stop, finished.usage.completion_tokens) == (
        inference_pb2.FINISH_REASON_STOP,
        "cd",
        4,
    )
    assert not finished.HasField("stop_token_id")


def test_held_back_text_is_sent_at_the_end() -> None:
    one = answer(stop=("never",))
    one.take([*tokens("ne"), TokenOut(token_id="é".encode()[0])])
    one.finish(end(3))
    messages = one.drain()
    assert messages[1].delta.text == "ne\ufffd"


def test_the_first_error_is_kept() -> None:
    one = answer()
    one.take(tokens("a"))
    one.fail(KvLost("gone"))
    one.fail(Cancelled("late"))
    assert isinstance(one.error, KvLost)
    one.finish(end(1))
    assert kinds(one.drain()) == ["started", "delta"]


@pytest.mark.parametrize(("is_kept", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_tokens_text_is_left_out_unless_asked_for(is_kept: bool, text: str) -> None:
    one = answer(stop_token_ids=(ord("c"),), include_stop_in_output=is_kept)
    one.take(tokens("abc"))
    one.finish(end(3, FinishReason.STOP))
    messages = one.drain()
    assert messages[1].delta.text == text
    assert messages[2].finished.stop_token_id == ord("c")


def test_an_end_token_before_min_tokens_is_text_like_any_other() -> None:
    one = answer(stop_token_ids=(ord("a"),), min_tokens=2)
    one.take(tokens("ab"))
    one.finish(end(2))
    assert one.drain()[1].delta.text == "ab"


def scores(first: int, *token_ids: int) -> inference_pb2.PromptLogprobs:
    tokens = [inference_pb2.TokenLogprobs(token_id=one, logprob=-0.5) for one in token_ids]
    return inference_pb2.PromptLogprobs(first_position=first, tokens=tokens)


def scored(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    found = [one.prompt_logprobs for one in messages if one.HasField("prompt_logprobs")]
    return [token.token_id for one in found for token in one.tokens]


def scored_answer() -> Answer:
    return Answer("r", 4, Sampling(prompt_logprobs=0), ToyTokenizer().detokenizer(), (256,))


def test_the_prompts_logprobs_come_once_before_the_first_piece() -> None:
    one = scored_answer()
    one.score(scores(1, 11, 12))
    one.score(scores(3, 13))
    assert one.drain() == []
    one.take(tokens("a"))
    messages = one.drain()
    assert kinds(messages) == ["started", "prompt_logprobs", "prompt_logprobs", "delta"]
    assert scored(messages) == [11, 12, 13]
    one.score(scores(1, 11))  # of a worker that had not heard of its end
    one.take(tokens("b"))
    assert kinds(one.drain()) == ["delta"]


def test_a_new_attempt_begins_the_prompts_logprobs_anew() -> None:
    one = scored_answer()
    one.score(scores(1, 11, 12))
    one.score(scores(1, 11))
    one.score(scores(3, 13))  # late, of the attempt before
    one.score(scores(2, 12, 13))
    one.take(tokens("a"))
    assert scored(one.drain()) == [11, 12, 13]


def test_missing_prompt_logprobs_are_an_internal_error() -> None:
    one = scored_answer()
    one.score(scores(1, 11))
    one.take(tokens("a"))
    assert isinstance(one.error, InternalError)


def test_the_end_of_a_document_is_never_text() -> None:
    class Loud:
        """Shows each token that it is given."""

        def push(self, token_ids: tuple[int, ...]) -> str:
            return "".join(f"<{token_id}>" for token_id in token_ids)

        def finish(self) -> str:
            return ""

    for grammar, text in ((None, "<97><256>"), (Grammar(GrammarKind.REGEX, "a"), "<97>")):
        sampling = Sampling(min_tokens=5, ignore_eos=True, grammar=grammar)
        one = Answer("r", 3, sampling, Loud(), (256,))
        one.take([*tokens("a"), TokenOut(token_id=256)])
        one.finish(end(2, FinishReason.STOP))
        assert "".join(message.delta.text for message in one.drain()) == text


@pytest.mark.parametrize(
    ("text", "is_open", "sent", "stop"),
    [
        ("a\n\nb</think>\n\nfive\n\nsix", True, "a\n\nb</think>\n\nfive", "\n\n"),
        ("<think>\n\n</think>\n\nfive\n\n", False, "<think>\n\n</think>\n\nfive", "\n\n"),
        ("five\n\n<think>", False, "five", "\n\n"),
        ("a\n\nb", True, "a\n\nb", None),
        ("<thi\n\n", False, "<thi", "\n\n"),
        ("<thi", False, "<thi", None),
    ],
)
def test_stop_strings_apply_after_the_reasoning(text: str, is_open: bool, sent: str, stop: str | None) -> None:
    for size in range(1, len(text) + 1):
        one = Answer(
            "r",
            3,
            Sampling(stop=("\n\n",)),
            ToyTokenizer().detokenizer(),
            (256,),
            split=ReasoningSplit(THINK_MARKS, is_open=is_open),
        )
        for start in range(0, len(text), size):
            one.take(tokens(text[start : start + size]))
        one.finish(end(len(text)))
        messages = one.drain()
        assert "".join(message.delta.text for message in messages) == sent
        assert (messages[-1].finished.stop if messages[-1].finished.HasField("stop") else None) == stop

"""An interrupted call continues on another router at the exact next token, from every point of its stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from pdserve import Completion, Unavailable
from pdserve.client.base import AnswerBuilder
from pdserve.client.request import generate_request
from pdserve.client.retries import HeldCall
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.errors import InvalidRequest
from pdserve.core.protocol import TokensArrived
from pdserve.core.types import FinishReason, Sampling, TokenOut
from pdserve.text.detokenize import ByteDetokenizer
from pdserve.v1 import inference_pb2
from pdserve.wire import status
from router.service.answer import Answer
from router.service.resumption import CLOCK_SKEW_S, CallFacts, ResumedAnswer, check_key, make_key
from router.state.interface import Event, RequestArrived
from tests.support.cluster_secret import TEXT
from tests.support.slow import slow_except
from tests.unit.router_io.conftest import Connect, Front, until
from tests.unit.router_io.processes import Program
from tests.unit.router_io.test_grammars import MODEL

LOST = Unavailable("Socket closed")
Responses = list[inference_pb2.GenerateResponse]
LONG = "a prompt that is long enough to be computed by the prefill worker and to fill blocks " * 2


async def received(front: Front, request: inference_pb2.GenerateRequest) -> Responses:
    return [message async for message in front.stub.Generate(request)]


def completed(request: inference_pb2.GenerateRequest, messages: Responses) -> Completion:
    builder = AnswerBuilder(request, ("localhost", 1), is_stream=False)
    for message in messages:
        builder.take(message)
    return builder.completion


def held_after(request: inference_pb2.GenerateRequest, messages: Responses) -> HeldCall:
    held = HeldCall(request)
    for message in messages:
        match message.WhichOneof("event"):
            case "started":
                held.started(message.started)
            case "delta":
                held.took(message.delta)
            case "finished":
                held.finished(message.finished)
    return held


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7},
    "unseeded": {"temperature": 1.5},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stop": {"temperature": 0.0, "stop": ["STOP"]},
    "stop in output": {"temperature": 0.0, "stop": ["STOP"], "include_stop_in_output": True},
    "held back": {"temperature": 0.0, "stop": ["HELD"]},
    "min tokens": {"seed": 5, "min_tokens": 6, "stop": [" "]},
    "several": {"n": 3, "seed": 11},
    "several with logprobs": {"n": 2, "seed": 12, "logprobs": 2, "prompt_logprobs": 1},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}


@pytest.mark.parametrize("kind", slow_except(OPTIONS, *(one for one in OPTIONS if one != "several")))
async def test_a_call_continues_from_every_message(
    connect: Connect, slow_decode: Program, prefill: Program, kind: str
) -> None:
    first, second = await connect(slow_decode, prefill), await connect(slow_decode, prefill)
    options = {"max_tokens": 10, "ignore_eos": True, **OPTIONS[kind]}
    if "stop" in options:
        text = (await first.client.generate(LONG, max_tokens=10, temperature=0.0, ignore_eos=True)).text
        found = {"STOP": text[5:8], "HELD": text[8:] + "never", " ": " "}  # HELD: its beginning is the text's end
        options["stop"] = [found[one] for one in options["stop"]]
    request = generate_request(LONG, options)
    whole = await received(first, request)
    expected = completed(request, whole)
    points = [at for at in range(len(whole)) if held_after(request, whole[:at]).num_tokens]
    assert len(points) > 1
    for at in points:
        held = held_after(request, whole[:at])
        assert held.resume(LOST)
        rest = await received(second, held.request)
        assert rest[0].started.is_resumed
        assert not any(message.HasField("prompt_logprobs") for message in rest)
        found = completed(request, whole[:at] + rest)
        assert [(one.text, one.token_ids, one.finish_reason, one.stop) for one in found.choices] == [
            (one.text, one.token_ids, one.finish_reason, one.stop) for one in expected.choices
        ], f"after {at} of {len(whole)} messages"
        assert [one.logprobs for one in found.choices] == [one.logprobs for one in expected.choices]
        assert [one.cumulative_logprob for one in found.choices] == [one.cumulative_logprob for one in expected.choices]
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (
            expected.usage.prompt_tokens,
            expected.usage.completion_tokens,
        )
        assert found.prompt_logprobs == expected.prompt_logprobs
    await until(second.all_free)


async def test_a_resumed_call_can_be_resumed_again(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    request = generate_request("again and again", {"max_tokens": 20, "seed": 1, "ignore_eos": True})
    expected = completed(request, await received(front, request))
    held, messages = HeldCall(request), []
    while True:
        call, count = front.stub.Generate(held.request), 0
        async for message in call:
            messages.append(message)
            if message.HasField("started"):
                held.started(message.started)
            elif message.HasField("delta"):
                held.took(message.delta)
                count += 1
            if count == 2:
                break
        else:
            break
        call.cancel()
        assert held.resume(LOST)
    assert completed(request, messages).token_ids == expected.token_ids


async def test_only_the_last_block_of_a_resumed_answer_is_computed_again(connect: Connect, decode: Program) -> None:
    """The worker has the KV of the others in its prefix cache. The prompt has no full block. One answer has several,
    and its sibling none, so each is looked up by itself."""
    front = await connect(decode)
    request = generate_request("abc", {"n": 2, "max_tokens": 200, "seed": 3, "ignore_eos": True})
    begun: Responses = []
    for message in await received(front, request):
        num_tokens = held_after(request, begun).num_tokens
        is_first = not message.HasField("delta") or message.delta.index == 0
        if message.HasField("started") or (message.HasField("delta") and num_tokens < 100 and is_first):
            begun.append(message)
    held = held_after(request, begun)
    assert held.resume(LOST)
    events: list[Event] = []
    front.server.runtime._on_step = lambda now_s, event, commands: events.append(event)

    async def is_cached() -> bool:
        events.clear()
        await received(front, held.request)
        return bool(arrivals()[0].cached_blocks)

    def arrivals() -> list[RequestArrived]:
        return [one for one in events if isinstance(one, RequestArrived)]

    await until(is_cached)
    size = front.server.runtime.state._cluster.fleet.workers["d0"].hello.block_size
    first, second = arrivals()
    num_tokens = first.num_prompt_tokens + len(first.output_ids)
    assert first.cached_blocks == {"d0": num_tokens // size}
    assert num_tokens >= 3 * size
    assert second.cached_blocks == {}, "those of its sibling"
    rows = [row for one in events if isinstance(one, TokensArrived) for row in one.rows if row.prefill_s]
    found = {row.key.request_id: row.cached_tokens for row in rows}
    assert found[first.request_id] == (num_tokens - 1) // size * size  # at least one token is computed


Change = Callable[[inference_pb2.GenerateRequest], object]
CHANGES: dict[str, tuple[str, Change]] = {
    "prompt": ("resume.key", lambda one: setattr(one, "text", "another prompt")),
    "seed": ("resume.key", lambda one: setattr(one.sampling, "seed", 8)),
    "option": ("resume.key", lambda one: setattr(one.sampling, "top_k", 5)),
    "number": ("resume.key", lambda one: setattr(one, "n", 2)),
    "no key": ("resume.key", lambda one: one.resume.ClearField("key")),
    "other key": ("resume.key", lambda one: setattr(one.resume, "key", one.resume.key[:-1] + b"\0\0")),
    "later key": ("resume.key", lambda one: setattr(one.resume, "key", bytes(8) + one.resume.key[8:])),
    "long key": ("resume.key", lambda one: setattr(one.resume, "key", bytes(1000))),
    "best_of": ("resume", lambda one: setattr(one, "best_of", 2)),
    "two answers": ("resume.answers", lambda one: one.resume.answers.add(token_ids=[1])),
    "no token": ("resume.answers", lambda one: one.resume.answers[0].ClearField("token_ids")),
    "all finished": ("resume.answers", lambda one: setattr(one.resume.answers[0], "has_finished", True)),
    "no such token": ("resume.answers.token_ids", lambda one: one.resume.answers[0].token_ids.append(1 << 20)),
    "too many": ("resume.answers.token_ids", lambda one: one.resume.answers[0].token_ids.extend([65] * 50)),
    "end before": ("resume.answers.token_ids", lambda one: one.resume.answers[0].token_ids.insert(0, 256)),
    "stop before": ("resume.answers.token_ids", lambda one: one.resume.answers[0].token_ids.extend(b"$$$.")),
    "less text": ("resume.answers.num_chars", lambda one: setattr(one.resume.answers[0], "num_chars", 0)),
    "more text": ("resume.answers.num_chars", lambda one: setattr(one.resume.answers[0], "num_chars", 99)),
    "no sum": ("resume.answers.cumulative_logprob", lambda one: one.resume.answers[0].ClearField("cumulative_logprob")),
    "no number": (
        "resume.answers.cumulative_logprob",
        lambda one: setattr(one.resume.answers[0], "cumulative_logprob", float("nan")),
    ),
}


@pytest.fixture
async def resumption(connect: Connect, decode: Program) -> tuple[Front, inference_pb2.GenerateRequest]:
    """A call that can be resumed after three tokens."""
    front = await connect(decode)
    request = generate_request("a prompt", {"max_tokens": 40, "seed": 7, "logprobs": 0, "stop": ["$$$"]})
    call, held = front.stub.Generate(request), HeldCall(request)
    async for message in call:
        if message.HasField("started"):
            held.started(message.started)
        elif message.HasField("delta"):
            held.took(message.delta)
        if held.num_tokens >= 3:
            break
    call.cancel()
    assert held.resume(LOST)
    return front, held.request


async def test_what_differs_from_the_call_is_rejected(
    resumption: tuple[Front, inference_pb2.GenerateRequest],
) -> None:
    front, request = resumption
    assert (await received(front, request))[-1].finished.usage.completion_tokens == 40
    for name, (field, change) in CHANGES.items():
        changed = inference_pb2.GenerateRequest()
        changed.CopyFrom(request)
        change(changed)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await received(front, changed)
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest), (name, error)
        assert error.field == field, (name, error)
    await until(front.all_free)


def test_a_key_is_of_one_tenant_and_of_limited_age() -> None:
    secret = ClusterSecret(TEXT)

    def facts(tenant: str = "acme") -> CallFacts:
        return CallFacts(
            tenant=tenant, model=MODEL, adapter="", prompt_ids=(1, 2), sampling=Sampling(seed=1), num_answers=1
        )

    key = make_key(secret, facts(), 1000.0)
    for now_s in (1000.0 - CLOCK_SKEW_S, 1000.0, 1600.0 + CLOCK_SKEW_S):
        check_key(secret, [facts()], key, now_s, longest_s=600.0)
    for now_s in (999.0 - CLOCK_SKEW_S, 1601.0 + CLOCK_SKEW_S):
        with pytest.raises(InvalidRequest, match=r"resume\.key"):
            check_key(secret, [facts()], key, now_s, longest_s=600.0)
    assert check_key(secret, [facts("beta"), facts()], key, 1000.0, longest_s=600.0) == facts()
    with pytest.raises(InvalidRequest, match=r"resume\.key"):
        check_key(secret, [facts("beta")], key, 1000.0, longest_s=600.0)
    with pytest.raises(InvalidRequest, match=r"resume\.key"):
        check_key(ClusterSecret(TEXT[::-1]), [facts()], key, 1000.0, longest_s=600.0)


# --- the seam -------------------------------------------------------------------------------------------------


def answer_of(**options: Any) -> Answer:
    return Answer("r", 3, Sampling(max_tokens=64, **options), ByteDetokenizer(lambda token_id: bytes((token_id,))))


def texts(answer: Answer) -> str:
    return "".join(message.delta.text for message in answer.drain())


def given(token_ids: bytes, num_chars: int, finish: FinishReason | None = None) -> ResumedAnswer:
    return ResumedAnswer(
        token_ids=tuple(token_ids), num_chars=num_chars, logprob_sum=0.0, has_finished=False, finish=finish
    )


@pytest.mark.parametrize("text", ["größer 漢字 🚀 über", "a🚀", "ab]c]]>d"])
def test_the_seam_may_be_within_a_character_or_a_stop_string(text: str) -> None:
    tokens = text.encode()
    for stop in ((), ("]]>",), ("字 🚀",), ("never 🚀",)):
        for cut in range(1, len(tokens)):
            whole, resumed = answer_of(stop=stop), answer_of(stop=stop)
            stopped = whole.take([TokenOut(token_id=one) for one in tokens[:cut]])
            before = texts(whole)
            if stopped is not None:
                break
            resumed.resume(given(tokens[:cut], len(before)))
            for one in (whole, resumed):
                one.take([TokenOut(token_id=token) for token in tokens[cut:]])
            assert texts(resumed) == texts(whole), (stop, cut)
            assert (resumed.has_stopped, resumed.num_tokens) == (whole.has_stopped, whole.num_tokens)


def test_random_texts_of_random_bytes_continue_exactly() -> None:
    draw = random.Random(5)
    for _ in range(300):
        tokens = bytes(draw.choice(b"ab\xc3\xa4\xf0\x9f\x9a\x80") for _ in range(24))
        cut, options = draw.randrange(1, 24), {"stop": ("ab", "ba\u00e4"), "min_tokens": draw.randrange(12)}
        whole, resumed = answer_of(**options), answer_of(**options)
        whole.take([TokenOut(token_id=one) for one in tokens[:cut]])
        before = texts(whole)
        if whole.has_stopped:
            continue
        resumed.resume(given(tokens[:cut], len(before)))
        for one in (whole, resumed):
            one.take([TokenOut(token_id=token) for token in tokens[cut:]])
        assert texts(resumed) == texts(whole)

"""Requests through a real router and real workers; every text is compared with a computation by hand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pdserve import AsyncClient, Client
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import RequestAttributes
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import SEQUENCE
from router.recording import replay
from router.service.answer import Answer
from router.state.interface import RequestArrived
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program


def text_of(prompt: str, num_tokens: int, seed: int | None = None) -> str:
    return bytes(answer(list(prompt.encode()), num_tokens, seed=seed)).decode()


async def test_a_short_prompt_is_answered_locally_with_the_right_text(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    done = await front.client.generate("hello", max_tokens=12, temperature=0)
    assert done.text == text_of("hello", 12)
    assert done.token_ids == tuple(done.text.encode())
    assert (done.finish_reason, done.timings.path) == ("length", "local")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 12)


async def test_a_long_prompt_goes_through_both_workers(connect: Connect, decode: Program, prefill: Program) -> None:
    # By a policy that predicts nothing: on a busy machine it may be right to read the prompt where it decodes.
    front = await connect(decode, prefill, policy="least-loaded")
    prompt = "a prompt that is long enough to be read by a prefill worker, and new"
    done = await front.client.generate(prompt, max_tokens=30, temperature=0)
    assert done.text == text_of(prompt, 30)
    assert (done.timings.path, done.timings.prefill_worker, done.timings.decode_worker) == ("remote", "p0", "d0")
    assert done.timings.transfer_bytes > 0
    explanation = await front.client.explain(done.request_id)
    assert [(one.prefill_worker, one.decode_worker) for one in explanation.candidates if one.is_chosen] == [
        ("p0", "d0")
    ]


async def test_request_attributes_reach_state_and_workers(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = await connect(decode)
    runtime = front.server.runtime
    begin, begun = runtime.begin, []

    def note(arrival: RequestArrived, answer: Answer, sequence: worker_pb2.Sequence, *rest: Any) -> None:
        begun.append((arrival, SEQUENCE.decode(sequence, chain_key=b"", arrived_s=0.0, deadline_at_s=None)))
        begin(arrival, answer, sequence, *rest)

    monkeypatch.setattr(runtime, "begin", note)
    said = {"priority": -2, "session_id": "é" * 128, "reuse_within_s": 30.0}
    await front.client.generate("hello", max_tokens=4, **said)
    await front.client.generate("hello", max_tokens=4)
    assert [(arrival.attributes(), attempt.attributes()) for arrival, attempt in begun] == [
        (said, said),
        (RequestAttributes().attributes(),) * 2,
    ]
    recorded = replay.decode_value(RequestArrived, replay.encode_value(begun[0][0]))
    assert recorded.attributes() == said


async def test_many_at_once_do_not_mix(connect: Connect, decode: Program, prefill: Program) -> None:
    front = await connect(decode, prefill)
    prompts = [f"{number} " + "words of a prompt " * (number % 5) for number in range(40)]
    answers = await asyncio.gather(
        *(front.client.generate(prompt, max_tokens=20, seed=number) for number, prompt in enumerate(prompts))
    )
    assert [done.text for done in answers] == [text_of(one, 20, seed=number) for number, one in enumerate(prompts)]
    await until(front.all_free)


async def test_token_ids_are_a_prompt_and_a_seed_is_chosen(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    texts = {(await front.client.generate([104, 105], max_tokens=16)).text for _ in range(3)}
    assert len(texts) > 1
    done = await front.client.generate([104, 105], max_tokens=16, seed=9)
    assert done.text == text_of("hi", 16, seed=9)


async def test_a_stop_string_ends_the_text_anywhere(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    whole = text_of("hello", 40)
    stop = whole[10:13]
    start = whole.index(stop)
    done = await front.client.generate("hello", max_tokens=400, temperature=0, stop=[stop, "never"])
    assert (done.text, done.stop, done.finish_reason) == (whole[:start], stop, "stop")
    assert done.usage.completion_tokens == start + len(stop)
    assert done.token_ids == tuple(whole[: start + len(stop)].encode())
    kept = await front.client.generate("hello", max_tokens=400, temperature=0, stop=[stop], include_stop_in_output=True)
    assert kept.text == whole[: start + len(stop)]
    await until(front.all_free)


async def test_stop_strings_wait_for_min_tokens(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    whole = text_of("hello", 40)
    stop = whole[2]
    done = await front.client.generate("hello", max_tokens=40, min_tokens=20, temperature=0, stop=[stop])
    assert done.text.startswith(whole[:20])
    assert done.usage.completion_tokens >= 20


async def test_the_end_of_sequence_adds_no_text(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    prompt = b"hi\x05\x04".decode()
    done = await front.client.generate(prompt, max_tokens=40, temperature=0)
    assert done.text == bytes(answer(list(prompt.encode()), 5)).decode()
    assert (done.finish_reason, done.stop, done.token_ids[-1], done.stop_token_id) == ("stop", None, 256, 256)


async def test_a_stop_token_is_not_part_of_the_text_unless_asked_for(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    whole = text_of("hello", 40)
    stop_id = ord(whole[7])
    start = whole.index(whole[7])
    done = await front.client.generate("hello", max_tokens=40, temperature=0, stop_token_ids=[stop_id])
    assert (done.text, done.stop_token_id) == (whole[:start], stop_id)
    kept = await front.client.generate(
        "hello", max_tokens=40, temperature=0, stop_token_ids=[stop_id], include_stop_in_output=True
    )
    assert kept.text == whole[: start + 1]


async def test_logprobs_come_with_each_token(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    pieces = [piece async for piece in front.client.stream("hello", max_tokens=6, temperature=0, logprobs=1)]
    logprobs = [one for piece in pieces for one in piece.logprobs]
    assert [one.token_id for one in logprobs] == list(text_of("hello", 6).encode())
    assert all(one.top == ((one.token_id, 0.0),) for one in logprobs)


async def test_truncation_keeps_the_last_tokens(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    done = await front.client.generate("x" * 20_000 + "hello", max_tokens=8, temperature=0, truncate_prompt_tokens=5)
    assert done.text == text_of("hello", 8)
    assert done.usage.prompt_tokens == 5


async def test_an_id_may_be_reused_concurrently(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    calls = [front.client.generate("hello", max_tokens=8, temperature=0, request_id="mine") for _ in range(3)]
    answers = await asyncio.gather(*calls)
    assert [(done.request_id, done.text) for done in answers] == [("mine", text_of("hello", 8))] * 3


async def test_a_late_end_does_not_affect_the_next_call(connect: Connect, slow_decode: Program) -> None:
    """Between an answer's last word and the end of its call another one may begin under the id."""
    front = await connect(slow_decode)
    runtime = front.server.runtime
    answering = asyncio.create_task(front.client.generate("hello", max_tokens=8, temperature=0, request_id="mine"))
    await until(lambda: runtime.knows("mine"))
    runtime.leave("mine", cast(Answer, object()))
    assert (await asyncio.wait_for(answering, 60)).text == text_of("hello", 8)


async def test_the_model_and_tokenisation_are_served(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    model = await front.client.model()
    assert (model.name, model.vocab_size, model.eos_token_ids) == ("toy", 257, (256,))
    assert (model.max_new_tokens, model.has_chat_template, model.is_mock) == (4096, True, True)
    assert await front.client.tokenize("hé") == list("hé".encode())


async def test_a_chat_with_the_toy_gets_its_template(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    prompt = "system: be short\nuser: hé\nassistant: "
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hé"}]
    assert await front.client.tokenize(messages) == list(prompt.encode())
    done = await front.client.generate(messages, max_tokens=6, temperature=0)
    assert done.text == text_of(prompt, 6)


@pytest.mark.parametrize("length", [300, 5000])
async def test_a_repeated_prompt_is_found_in_a_cache(connect: Connect, decode: Program, length: int) -> None:
    front = await connect(decode)
    prompt = f"{length} " * (length // 4)
    first = await front.client.generate(prompt, max_tokens=4, temperature=0)
    again = await front.client.generate(prompt, max_tokens=4, temperature=0)
    assert again.text == first.text == text_of(prompt, 4)
    assert again.usage.cached_prompt_tokens > first.usage.cached_prompt_tokens


@pytest.mark.parametrize("length", [1, 40, 3000])
async def test_prompt_logprobs_come_with_the_first_piece(
    connect: Connect, decode: Program, prefill: Program, length: int
) -> None:
    """Local, remote, in chunks; and again when every block of it is in a cache."""
    front = await connect(decode, prefill)
    prompt = [33 + index % 90 for index in range(length)]
    for _ in range(2):
        stream = front.client.stream(prompt, max_tokens=4, temperature=0, prompt_logprobs=1)
        async for _ in stream:
            assert len(stream.prompt_logprobs) == length
        done = stream.completion
        assert done.token_ids == tuple(answer(prompt, 4))
        first, *others = done.prompt_logprobs
        assert first is None
        assert [one.token_id for one in others if one is not None] == prompt[1:]
        assert all(one is not None and one.top == ((one.token_id, 0.0),) for one in others)
        assert done.usage.cached_prompt_tokens == 0
    await until(front.all_free)


async def test_several_answers_score_the_prompt_once(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    done = await front.client.generate("a prompt of some blocks, for three", n=3, max_tokens=4, prompt_logprobs=0)
    assert len(done.prompt_logprobs) == done.usage.prompt_tokens == 34
    assert len(done.choices) == 3


async def test_beam_search_finds_a_models_only_answer(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    for prompt in ("hello", list(b"hello")):
        [beam] = await front.client.beam_search(prompt, width=3, max_tokens=12)
        assert (beam.text, beam.score, beam.finish_reason) == (text_of("hello", 12), 0.0, "length")
    with pytest.raises(InvalidRequest, match="max_tokens"):
        await front.client.beam_search("hello", max_tokens=8192)
    await until(front.all_free)


async def test_tokens_become_text(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    assert await front.client.detokenize(list("hé".encode())) == "hé"
    assert await front.client.detokenize([104, 105, 256], prompt=[1, 2]) == "hi"
    with pytest.raises(InvalidRequest, match="token_ids"):
        await front.client.detokenize([257])


async def test_the_bytes_of_tokens_come_in_their_order(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    async with AsyncClient(front.server.address) as client:
        assert await client.token_bytes([104, 226, 256, 105]) == [b"h", b"\xe2", b"", b"i"]
        with pytest.raises(InvalidRequest, match="8193 tokens, expected at most 8192"):
            await client.token_bytes([1] * 8193)


async def test_the_sdk_checks_health_without_a_token(connect: Connect, decode: Program) -> None:
    front = await connect(decode, token="right")
    async with AsyncClient(front.server.address) as client:
        assert await client.is_serving()
    with Client(front.server.address) as other:
        assert await asyncio.to_thread(other.is_serving)

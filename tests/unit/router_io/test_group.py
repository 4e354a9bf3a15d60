"""Several answers to one prompt: each follows from its seed, they share the prompt's blocks, and they end together."""

from __future__ import annotations

import asyncio

import pytest

from pdserve import Piece
from pdserve.core.errors import DeadlineExceeded, InternalError, Overloaded
from pdserve.core.results import Timings, Usage
from pdserve.core.types import FinishReason, Sampling, TokenOut
from pdserve.text.tokenizer import ToyTokenizer
from router.service import answer as group
from router.service.answer import Answer, Group
from router.state.interface import FinishRequest, Outcome
from tests.unit.router_io.conftest import SLOW_STEP_S, Connect, until
from tests.unit.router_io.processes import Program, Start
from tests.unit.router_io.test_generate import text_of

LONG = "a prompt that is long enough to be read by a prefill worker, and shared by many answers"


def seeds(seed: int, count: int) -> list[int]:
    return [one.seed for one in group.samplings(Sampling(seed=seed), count, count)]


@pytest.mark.parametrize(("prompt", "salt"), [("hello", 0), (LONG, 1)])
async def test_each_answer_follows_from_its_seed(
    connect: Connect, decode: Program, prefill: Program, prompt: str, salt: int
) -> None:
    front = await connect(decode, prefill)
    stream = front.client.stream(prompt, n=4, max_tokens=30, seed=5 + salt)
    pieces = [piece async for piece in stream]
    done = stream.completion
    texts = [text_of(prompt, 30, seed=seed) for seed in seeds(5 + salt, 4)]
    assert [one.text for one in done.choices] == texts
    assert len(set(texts)) == 4
    assert [one.index for one in done.choices] == [0, 1, 2, 3]
    for index, text in enumerate(texts):
        assert "".join(piece.text for piece in pieces if piece.index == index) == text
    alone = await front.client.generate(prompt, max_tokens=30, seed=5 + salt)
    assert (done.text, done.choices[0].text) == (alone.text, alone.text)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), 120)
    await until(front.all_free)


async def test_the_prompt_is_prefilled_once(connect: Connect, decode: Program, prefill: Program) -> None:
    front = await connect(decode, prefill)
    prompt = "a prompt nobody else has sent, read once and sampled from by five " * 4
    done = await front.client.generate(prompt, n=5, max_tokens=20, seed=3, request_id="five")
    assert done.timings.path == "remote"
    for index in range(1, 5):
        explained = await front.client.explain(f"five#{index}")
        assert "local" in explained.decision, explained  # only the prompt's last tokens were left to compute
    await until(front.all_free)


async def test_an_answer_that_ends_early_leaves_the_others_alone(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    texts = [text_of("hello", 60, seed=seed) for seed in seeds(8, 3)]
    stop = texts[1][10:13]
    assert stop not in texts[0] + texts[2]
    done = await front.client.generate("hello", n=3, max_tokens=60, seed=8, stop=[stop])
    assert [one.text for one in done.choices] == [texts[0], texts[1][:10], texts[2]]
    assert [one.finish_reason for one in done.choices] == ["length", "stop", "length"]
    assert [one.stop for one in done.choices] == [None, stop, None]
    assert done.usage.completion_tokens == 60 + 13 + 60


async def test_a_disconnect_cancels_all_answers(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    stream = front.client.stream("hello, five of you", n=5, max_tokens=1000, seed=1)
    seen: set[int] = set()
    async for piece in stream:
        seen.add(piece.index)
        if len(seen) == 5:
            break
    assert front.server.runtime.num_calls == 5
    stream.close()
    await until(front.all_free)
    assert front.server.runtime.num_calls == 0


async def test_a_deadline_ends_all(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode, request_timeout_s=0.4)
    with pytest.raises(DeadlineExceeded):
        await front.client.generate("hello", n=3, max_tokens=1000, seed=1)
    await until(front.all_free)


async def test_all_answers_are_admitted_or_none(connect: Connect, start: Start) -> None:
    """Siblings that find the queue full: the call is refused before anything has gone out."""
    flags = ("--model=toy", "--worker-id=d2", "--heartbeat-s=0.05", "--max-batch=2", "--inbox-depth=1")
    small = start("decode_worker", *flags, f"--toy-step-s={SLOW_STEP_S}")
    front = await connect(small, max_queue=1)
    pieces: list[Piece] = []

    async def read() -> None:
        async for piece in front.client.stream("a prompt", n=16, max_tokens=200, seed=1):
            pieces.append(piece)

    with pytest.raises(Overloaded):
        await read()
    assert pieces == []
    await until(front.all_free)


async def test_best_of_returns_the_likeliest_answers(connect: Connect, decode: Program) -> None:
    """The toy's logprobs are all equal, so the first answers win. Usage also counts the tokens of dropped answers."""
    front = await connect(decode)
    stream = front.client.stream("hello", n=2, best_of=4, max_tokens=30, seed=5)
    pieces = [piece async for piece in stream]
    assert [piece.index for piece in pieces] == [0, 1]
    done = stream.completion
    assert [one.text for one in done.choices] == [text_of("hello", 30, seed=seed) for seed in seeds(5, 4)[:2]]
    assert [one.cumulative_logprob for one in done.choices] == [0.0, 0.0]
    assert not any(piece.logprobs for piece in pieces)
    assert done.usage.completion_tokens == 120


def answers_of(*logprobs: list[float]) -> Group:
    changed = asyncio.Event()
    answers = []
    for one in logprobs:
        answer = Answer("r", 3, Sampling(logprobs=0), ToyTokenizer().detokenizer(), changed=changed)
        answer.take([TokenOut(token_id=97 + len(answers), logprob=logprob) for logprob in one])
        answers.append(answer)
    return Group(answers, changed, num_kept=2)


def finish(answer: Answer) -> None:
    answer.finish(
        FinishRequest(
            request_id="r",
            reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=3, completion_tokens=answer.num_tokens, cached_prompt_tokens=1),
            timings=Timings(ttft_s=0.1, tpot_s=0.0, total_s=0.1),
            outcome=Outcome.SERVED,
        )
    )


def test_ranked_answers_are_returned_best_first() -> None:
    one = answers_of([-1.0, -1.0], [-0.5, -2.0, -0.2], [-3.0])
    finish(one.answers[0])
    finish(one.answers[2])
    assert one.drain() == []
    finish(one.answers[1])
    messages = one.drain()
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", "delta", "finished", "delta", "finished"]
    assert [(messages[at].delta.index, messages[at].delta.text) for at in (1, 3)] == [(0, "bbb"), (1, "aa")]
    assert [messages[at].finished.index for at in (2, 4)] == [0, 1]
    assert messages[2].finished.cumulative_logprob == pytest.approx(-2.7)
    assert not messages[2].finished.HasField("total_usage")
    total = messages[4].finished.total_usage
    assert (total.prompt_tokens, total.completion_tokens, total.cached_prompt_tokens) == (3, 6, 1)
    assert one.drain() == []


def test_one_failed_answer_fails_the_call() -> None:
    one = answers_of([-1.0], [-1.0], [-1.0])
    one.answers[1].fail(InternalError("gone"))
    assert isinstance(one.error, InternalError)


def test_siblings_have_different_seeds() -> None:
    assert seeds(7, 1) == [7]
    sampled = [seed for start in range(200) for seed in seeds(start, 16)]
    assert len(set(sampled)) == len(sampled)

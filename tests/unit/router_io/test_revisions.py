"""A router with workers of two revisions: each answer is one of one model's, also after its router was lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from pdserve.client.request import generate_request
from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.types import Sampling, TokenOut
from pdserve.testing import toy_answer
from pdserve.text.detokenize import ByteDetokenizer
from pdserve.v1 import worker_pb2
from pdserve.wire import status
from router.service.answer import Answer, Group
from router.service.model import difference
from router.service.workers import Workers
from router.state.interface import Event, WorkerConnected
from tests.support.cluster_secret import ROUTER
from tests.unit.router_io.conftest import Connect, Front, until
from tests.unit.router_io.processes import Program, Start
from tests.unit.router_io.test_grammars import MODEL
from tests.unit.router_io.test_resume import LONG, LOST, completed, held_after, received

OTHER = ("--model=toy-other", "--revision=v2", "--heartbeat-s=0.05")
TOKENS = 24


@pytest.fixture
def others(start: Start) -> tuple[Program, Program]:
    return (
        start("prefill_worker", "--worker-id=p2", *OTHER),
        start("decode_worker", "--worker-id=d2", "--toy-step-s=0.005", *OTHER),
    )


def one_of(prompt: str) -> dict[str, str]:
    """The model of each possible answer."""
    return {toy_answer(prompt, TOKENS, model): model for model in ("toy", "toy-other")}


async def ask(front: Front, prompt: str) -> str:
    done = await front.client.generate(prompt, max_tokens=TOKENS, temperature=0)
    return one_of(prompt)[done.text]


async def test_each_answer_is_one_of_one_model(
    connect: Connect, decode: Program, prefill: Program, others: tuple[Program, Program]
) -> None:
    front = await connect(decode, prefill, *others)
    found = await asyncio.gather(*(ask(front, f"{number} {LONG}") for number in range(12)))
    assert set(found) == {"toy", "toy-other"}
    assert (await front.client.model()).name == "toy"
    topology = await front.client.topology()
    assert {one.worker_id: one.revision for one in topology.workers} == {"d0": "", "p0": "", "d2": "v2", "p2": "v2"}
    several = {"n": 3, "seed": 5, "max_tokens": TOKENS}
    alone = [await connect(decode, prefill), await connect(*others)]
    possible = [(await one.client.generate(LONG, **several)).choices for one in alone]
    for _ in range(3):
        texts = [one.text for one in (await front.client.generate(LONG, **several)).choices]
        assert all(text in {one[at].text for one in possible} for at, text in enumerate(texts))


async def test_a_call_is_resumed_with_the_weights_that_began_it(
    connect: Connect, decode: Program, prefill: Program, others: tuple[Program, Program]
) -> None:
    both = await connect(decode, prefill, *others)
    old, new = await connect(decode, prefill), await connect(*others)
    request = generate_request(LONG, {"max_tokens": TOKENS, "temperature": 0.0})
    for first, away in ((old, new), (new, old)):
        whole = await received(first, request)
        held = held_after(request, whole[: len(whole) // 2])
        assert held.num_tokens
        assert held.resume(LOST)
        rest = await received(both, held.request)
        assert completed(request, whole[: len(whole) // 2] + rest).text == completed(request, whole).text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await received(away, held.request)
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest), "its weights are not there"
        assert error.field == "resume.key"


def test_a_call_with_answers_of_different_weights_has_no_key() -> None:
    for second, key in (("a", b"1"), ("b", b"")):
        changed = asyncio.Event()
        answers = [
            Answer(
                "r",
                3,
                Sampling(max_tokens=8),
                ByteDetokenizer(lambda token_id: b"x"),
                changed=changed,
                resume_keys=keys,
            )
            for keys in [{"a": b"1", "b": b"2"}] * 2
        ]
        group = Group(answers, changed, num_kept=2)
        answers[0].computed_with("a")
        answers[0].take([TokenOut(token_id=1)])
        assert group.drain() == [], "the key depends on the other answer"
        answers[1].computed_with(second)
        answers[1].take([TokenOut(token_id=1)])
        started, *rest = group.drain()
        assert started.started.resume_key == key
        assert len(rest) == 2
        answers[0].take([TokenOut(token_id=1)])
        assert len(group.drain()) == 1


async def test_an_answer_fails_with_the_last_worker_of_its_weights(
    connect: Connect, decode: Program, prefill: Program, start: Start
) -> None:
    slow = start("decode_worker", "--worker-id=d2", "--toy-step-s=0.5", *OTHER)
    front = await connect(slow)
    prompt, text = "short", ""

    async def read() -> None:
        nonlocal text
        options = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        async for message in front.stub.Generate(generate_request(prompt, options)):
            text += message.delta.text

    reading = asyncio.create_task(read())
    await until(lambda: text)
    front.server._workers.dial([decode.address, prefill.address])
    await until(lambda: front.num_workers == 3)
    front.server._workers.dial_only([decode.address, prefill.address])  # as at the end of a roll-out
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    error = status.from_rpc_error(caught.value)
    assert isinstance(error, Unavailable)
    assert "weights" in error.message
    assert toy_answer(prompt, 400, "toy-other").startswith(text)


def test_workers_of_one_revision_have_the_same_weights() -> None:
    other = replace(MODEL, fingerprint=replace(MODEL.fingerprint, engine="other", model="folder-2"))
    assert difference(MODEL, other) is not None
    assert difference(MODEL, replace(other, revision="v2")) is None
    assert "vocab_size" in str(difference(MODEL, replace(other, revision="v2", vocab_size=7)))
    assert "eos_token_ids" in str(difference(MODEL, replace(other, revision="v2", eos_token_ids=(7,))))


async def test_a_worker_without_a_revision_must_have_the_weights_of_the_others(
    decode: Program, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    hello = worker_pb2.RouterHello(router_id="test", router_incarnation="1")
    workers = Workers(lambda: hello, events.append, identity=ROUTER, model_name="toy")
    strangers = [
        start("decode_worker", f"--worker-id=s{number}", *OTHER[:1], *flags)
        for number, flags in enumerate(((), ("--revision=v2",)))
    ]
    try:
        workers.dial([decode.address])
        await until(lambda: "d0" in workers.roles)
        workers.dial([one.address for one in strangers])
        await until(lambda: "s1" in workers.roles and "a worker is rejected" in caplog.text)
        assert sorted(workers.roles) == ["d0", "s1"]
        assert [one.revision for one in workers.models] == ["", "v2"]
        assert len({one.weights for one in workers.models}) == 2
        assert {one.revision for one in events if isinstance(one, WorkerConnected)} == {"", "v2"}
        workers.dial_only([one.address for one in strangers])
        await until(lambda: sorted(workers.roles) == ["s1"])
        assert [one.revision for one in workers.models] == ["v2"]
        assert workers.model is not None
        assert workers.model.name == "toy"
    finally:
        await workers.close()

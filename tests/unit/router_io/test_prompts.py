"""Large prompts are cut, or rejected by their size before they are tokenized. Waiting requests are bounded."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.core.types import Slo
from pdserve.text.chat import TemplateSources
from pdserve.text.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from pdserve.v1 import inference_pb2
from pdserve.wire import status
from router.service.admission import Admission, Limits
from router.service.text import tokenizing
from router.service.text.fair_queue import client_of
from router.service.text.prompts import MAX_CHARS_WITHOUT_MODEL
from router.service.text.tokenizing import LONG_BYTES, LONG_CHARS, TokenizerThreads
from tests.unit.router_io.conftest import Connect
from tests.unit.router_io.processes import Program
from tests.unit.router_io.test_grammars import MODEL

BUNDLED = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))
LIMITS = Limits(max_new_tokens=100, default_slo=Slo(), request_timeout_s=60.0)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class RecordingTokenizer:
    """The bundled model's; keeps the length of each text that it tokenizes."""

    def __init__(self) -> None:
        self._inner = HuggingFaceTokenizer(BUNDLED)
        self.num_chars: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, *, has_special_tokens: bool = True, salt: bytes | None = None) -> list[int]:
        self.num_chars.append(len(text))
        return self._inner.encode(text, has_special_tokens=has_special_tokens, salt=salt)

    def encode_tail(self, text: str, num_tokens: int) -> list[int]:
        return self.encode(text[self._inner.bounds.tail_start(text, num_tokens) :])[-num_tokens:]


@pytest.fixture
def tokenizer() -> RecordingTokenizer:
    return RecordingTokenizer()


@pytest.fixture
async def admission(tokenizer: RecordingTokenizer) -> AsyncIterator[Admission]:
    kept: Tokenizer = tokenizer  # type: ignore[assignment]
    one = Admission(kept, TemplateSources(TEMPLATE, None, {}), LIMITS)
    yield one
    await one.close()


def most_chars(tokenizer: RecordingTokenizer) -> int:
    found = tokenizer.bounds.max_chars(MODEL.max_prompt_tokens)
    assert isinstance(found, int)
    return found


def text_request(text: str, **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


def chat_request(text: str, **fields: Any) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content=text)]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages), **fields)


@pytest.mark.parametrize("make", [text_request, chat_request])
async def test_a_text_that_cannot_fit_is_not_tokenized(
    admission: Admission, tokenizer: RecordingTokenizer, make: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await admission.prepare(make("x = 1\n" * 650_000), MODEL, None)
    assert caught.value.field == "prompt"
    assert f"at most {most_chars(tokenizer)} characters" in caught.value.expected
    kind = "text" if make is text_request else "chat"
    fields: dict[str, Any] = {kind: getattr(make("y = 2\n" * 650_000), kind)}
    with pytest.raises(InvalidRequest):
        await admission.tokenize(inference_pb2.TokenizeRequest(**fields), MODEL)
    assert tokenizer.num_chars == []


async def test_the_longest_text_that_fits_is_taken(admission: Admission, tokenizer: RecordingTokenizer) -> None:
    """One token for as many characters as any: a line end and its indentation."""
    longest = "\n" + " " * (tokenizer.bounds.max_token_chars - 1)
    text = longest * MODEL.max_prompt_tokens
    assert len(text) == most_chars(tokenizer)
    prepared = await admission.prepare(text_request(text), MODEL, None)
    assert len(prepared.prompt_ids) <= MODEL.max_prompt_tokens
    with pytest.raises(InvalidRequest):
        await admission.prepare(text_request(text + "\n"), MODEL, None)


@pytest.mark.parametrize("make", [text_request, chat_request])
async def test_only_the_tail_of_a_truncated_text_is_tokenized(
    admission: Admission, tokenizer: RecordingTokenizer, make: Any
) -> None:
    text = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n" * 10_000
    prepared = await admission.prepare(make(text, truncate_prompt_tokens=20), MODEL, None)
    rendered = text if make is text_request else f"user: {text}\n"
    assert prepared.prompt_ids == tuple(HuggingFaceTokenizer(BUNDLED).encode(rendered)[-20:])
    assert max(tokenizer.num_chars) < 30 * tokenizer.bounds.max_token_chars


async def test_short_texts_do_not_wait_for_long_ones(tokenizer: RecordingTokenizer) -> None:
    threads = TokenizerThreads()
    gate = threading.Event()
    try:
        long = [asyncio.create_task(threads.run(LONG_CHARS + 1, 10, gate.wait)) for _ in range(16)]
        await asyncio.sleep(0)
        short = await asyncio.wait_for(threads.run(LONG_CHARS, 10, lambda: "done"), 60)
        assert short == "done"
        assert not any(one.done() for one in long)
        gate.set()
        await asyncio.gather(*long)
    finally:
        gate.set()
        threads.close()


async def test_the_bytes_of_long_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "MAX_WAITING_BYTES", 100)
    threads = TokenizerThreads()
    gate = threading.Event()
    try:
        first = asyncio.create_task(threads.run(LONG_CHARS + 1, 90, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="90 bytes wait to be tokenized, of 100 at most") as caught:
            await threads.run(LONG_CHARS + 1, 11, lambda: None)
        assert caught.value.retry_after_s > 0
        await threads.run(1, 1000, lambda: None)  # a short one is not concerned
        gate.set()
        await first
        await threads.run(LONG_CHARS + 1, 1000, lambda: None)  # alone, anything is taken that a message can hold
    finally:
        gate.set()
        threads.close()


async def test_many_long_texts_leave_places_for_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "MAX_WAITING", 3)
    threads = TokenizerThreads()
    gate = threading.Event()
    try:
        # The second kind is long by its bytes: fields beside the text count.
        sizes = [(LONG_CHARS + 1, 1), (1, LONG_BYTES + 1), (LONG_CHARS + 1, 1)]
        long = [asyncio.create_task(threads.run(chars, size, gate.wait)) for chars, size in sizes]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="3 long texts wait to be tokenized, of 3 at most"):
            await threads.run(LONG_CHARS + 1, 1, gate.wait)
        assert await asyncio.wait_for(threads.run(1, 1, lambda: "done"), 60) == "done"
        gate.set()
        await asyncio.gather(*long)
    finally:
        gate.set()
        threads.close()


@pytest.mark.parametrize(("num_chars", "num_bytes"), [(1, 1), (LONG_CHARS + 1, 1), (LONG_CHARS + 1, 2**19)])
async def test_the_texts_of_a_tenant_leave_room_for_others(num_chars: int, num_bytes: int) -> None:
    threads = TokenizerThreads()
    gate = threading.Event()

    async def fill(tenant: str) -> list[asyncio.Task[bool]]:
        """Starts waiting texts until one is rejected."""
        waiting: list[asyncio.Task[bool]] = []
        while True:
            one = asyncio.create_task(threads.run(num_chars, num_bytes, gate.wait, client_of("ipv4:1.2.3.4:5", tenant)))
            await asyncio.sleep(0)
            if one.done():
                assert isinstance(one.exception(), Overloaded)
                return waiting
            waiting.append(one)

    try:
        tasks = await fill("greedy")
        for number in range(40):
            tasks += (others := await fill(f"t{number}"))
            assert others or number > 1
        operators = await fill("")
        assert operators
        gate.set()
        await asyncio.gather(*tasks, *operators)
    finally:
        gate.set()
        threads.close()


async def test_a_disconnected_callers_text_is_dropped() -> None:
    class Text:
        pass

    threads = TokenizerThreads()
    gate = threading.Event()
    try:
        busy = asyncio.create_task(threads.run(LONG_CHARS + 1, 1, gate.wait))
        await asyncio.sleep(0)
        text = Text()
        kept = weakref.ref(text)
        waiting = asyncio.create_task(threads.run(LONG_CHARS + 1, 1, lambda text=text: text))  # type: ignore[misc]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        del text, waiting
        gc.collect()
        assert kept() is None
        gate.set()
        await busy
    finally:
        gate.set()
        threads.close()


async def test_requests_over_the_held_bytes_are_overload(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode, max_held_bytes=3000)
    sampling = inference_pb2.SamplingParams(max_tokens=1000)
    running = front.stub.Generate(text_request("x" * 1500, sampling=sampling))
    assert (await running.read()).HasField("started")
    with pytest.raises(grpc.RpcError) as caught:
        await front.stub.Generate(text_request("x" * 2000)).read()
    assert isinstance(status.from_rpc_error(caught.value), Overloaded)
    assert (await front.stub.Generate(text_request("x" * 10)).read()).HasField("started")
    running.cancel()


LARGE: list[tuple[str, str, inference_pb2.GenerateRequest]] = [
    ("prompt", "at most 8191", text_request("x" * 3_900_000)),
    ("prompt", "at most 8191", inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 3_900_000))),
    ("stop", "at most 16", text_request("x", sampling=inference_pb2.SamplingParams(stop=["x"] * 50_000))),
    ("bad_words", "at most 128", text_request("x", sampling=inference_pb2.SamplingParams(bad_words=["x"] * 50_000))),
    (
        "choice",
        "1 to 4096",
        text_request(
            "x",
            sampling=inference_pb2.SamplingParams(
                structured_output=inference_pb2.StructuredOutput(choice=inference_pb2.Choice(strings=["x"] * 50_000))
            ),
        ),
    ),
]


async def test_large_fields_are_named(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    for field, expected, request in LARGE:
        with pytest.raises(grpc.RpcError) as caught:
            await front.stub.Generate(request).read()
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest), field
        assert error.field == field
        assert expected in error.expected
    many = [1] * 9000
    with pytest.raises(InvalidRequest, match=r"^token_ids: got 9000 tokens, expected at most 8192"):
        await front.client.detokenize(many)
    with pytest.raises(InvalidRequest, match="prompt_token_ids: got 9000 tokens, expected at most 8192"):
        await front.client.detokenize([1], many)
    with pytest.raises(InvalidRequest, match="at most 8191 characters"):
        await front.client.tokenize("x" * 100_000)


async def test_tokenize_without_a_worker_is_limited(connect: Connect) -> None:
    front = await connect()
    assert await front.client.tokenize("ab") == [97, 98]
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CHARS_WITHOUT_MODEL} characters"):
        await front.client.tokenize("x" * (MAX_CHARS_WITHOUT_MODEL + 1))


async def test_a_chat_without_a_template_says_what_to_do() -> None:
    one = Admission(load_tokenizer("toy"), None, LIMITS)
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    with pytest.raises(InvalidRequest) as caught:
        await one.prepare(inference_pb2.GenerateRequest(chat=chat), MODEL, None)
    assert caught.value.field == "chat"
    for part in ("no chat template", "/v1/completions", "chat_template.jinja"):
        assert part in caught.value.expected
    await one.close()

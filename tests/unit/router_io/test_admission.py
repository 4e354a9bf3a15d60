"""Checking and tokenising a request beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest

from pdserve.core.access.shares import COUNT_WEIGHT, Shares
from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.core.types import Slo
from pdserve.text.detokenize import Detokenizer
from pdserve.text.tokenizer import ToyTokenizer
from pdserve.v1 import inference_pb2
from router.service import admission
from router.service.admission import Admission, Limits
from router.service.model import ModelFacts, difference
from router.service.text import prompts

FINGERPRINT = Fingerprint(
    protocol=1,
    model="toy",
    engine="toy.v1",
    shape=KvShape(layout="toy.v1", dtype="uint64", num_layers=1, num_kv_heads=1, head_dim=1, block_size=16),
)
MODEL = ModelFacts(
    name="toy",
    max_context_tokens=8192,
    vocab_size=257,
    eos_token_ids=(256,),
    block_size=16,
    hash_seed=b"s" * 32,
    fingerprint=FINGERPRINT,
)
LIMITS = Limits(max_new_tokens=100, default_slo=Slo(), request_timeout_s=60.0)
LONG = "x" * (prompts.QUICK_CHARS + 1)


class GatedTokenizer:
    """The toy's, but a text waits until the gate is open."""

    vocab_size = 257
    bounds = ToyTokenizer.bounds
    is_linear = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.has_begun = threading.Event()
        self._toy = ToyTokenizer()

    def encode(self, text: str, *, has_special_tokens: bool = True, salt: bytes | None = None) -> list[int]:
        if len(text) > prompts.QUICK_CHARS:
            self.has_begun.set()
            assert self.gate.wait(60)
        return self._toy.encode(text)

    def encode_tail(self, text: str, num_tokens: int) -> list[int]:
        return self.encode(text)[-num_tokens:]

    def decode(self, token_ids: Sequence[int], *, has_special_tokens: bool = False) -> str:
        return self._toy.decode(token_ids)

    def detokenizer(self, prompt_token_ids: Iterable[int] = (), *, has_special_tokens: bool = False) -> Detokenizer:
        return self._toy.detokenizer(prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._toy.token_bytes(token_id)

    def control_tokens(self, template: str) -> dict[str, int]:
        return {}

    def is_special(self, token_id: int) -> bool:
        return self._toy.is_special(token_id)


@pytest.fixture
async def gated() -> AsyncIterator[tuple[Admission, GatedTokenizer]]:
    tokenizer = GatedTokenizer()
    one = Admission(tokenizer, None, LIMITS)
    yield one, tokenizer
    tokenizer.gate.set()
    await one.close()


def request(text: str, **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def test_a_long_text_leaves_the_event_loop_free(gated: tuple[Admission, GatedTokenizer]) -> None:
    one, tokenizer = gated
    slow = asyncio.create_task(one.prepare(request(LONG), MODEL, None))
    assert await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    quick = await one.prepare(request("hello"), MODEL, None)
    assert quick.prompt_ids == tuple(b"hello")
    assert not slow.done()
    tokenizer.gate.set()
    assert (await slow).prompt_ids == tuple(LONG.encode())


async def test_too_many_long_texts_are_rejected(
    gated: tuple[Admission, GatedTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tokenizer = gated
    monkeypatch.setattr(one._threads._short, "items", Shares(1, COUNT_WEIGHT))
    slow = asyncio.create_task(one.prepare(request(LONG), MODEL, None))
    assert await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    with pytest.raises(Overloaded) as caught:
        await one.prepare(request(LONG), MODEL, None)
    assert caught.value.retry_after_s > 0
    tokenizer.gate.set()
    await slow
    assert (await one.prepare(request(LONG), MODEL, None)).prompt_ids


async def test_a_prompt_with_too_many_logprobs_is_refused(
    gated: tuple[Admission, GatedTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_PROMPT_LOGPROBS", 15)
    sampling = inference_pb2.SamplingParams(prompt_logprobs=2)
    assert (await gated[0].prepare(request("hello", sampling=sampling), MODEL, None)).sampling.prompt_logprobs == 2
    with pytest.raises(InvalidRequest) as caught:
        await gated[0].prepare(request("hello!", sampling=sampling), MODEL, None)
    assert (caught.value.field, caught.value.expected) == (
        "prompt_logprobs",
        "at most 5 tokens, or fewer logprobs of each",
    )


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ({"reuse_within_s": -1.0}, "between 0 and 86400 seconds"),
        ({"reuse_within_s": 86_401.0}, "between 0 and 86400 seconds"),
        ({"reuse_within_s": float("nan")}, "between 0 and 86400 seconds"),
        *(({"slo_task_s": one}, "between 1e-06 and 86400 seconds") for one in (0.0, -1.0, float("nan"), 1e300)),
        ({"expected_output_tokens": 0}, "at least 1"),
    ],
)
async def test_hints_are_bounded(
    gated: tuple[Admission, GatedTokenizer], hint: dict[str, float], expected: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await gated[0].prepare(request("hi", **hint), MODEL, None)
    assert (caught.value.field, caught.value.expected) == (*hint, expected)


async def test_an_answer_is_not_expected_to_exceed_its_limit(gated: tuple[Admission, GatedTokenizer]) -> None:
    asked = request("hi", expected_output_tokens=2**32 - 1)
    asked.sampling.max_tokens = 5
    assert (await gated[0].prepare(asked, MODEL, None)).expected_tokens == 5


@pytest.mark.parametrize("session_id", ["s" * 129, "a\nb"])
async def test_a_session_id_is_checked_before_the_prompt(
    gated: tuple[Admission, GatedTokenizer], session_id: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await gated[0].prepare(request("", session_id=session_id), MODEL, None)
    assert (caught.value.field, caught.value.expected) == ("session_id", "at most 128 printable characters")
    prepared = await gated[0].prepare(request("hi", session_id="s" * 128, priority=-2), MODEL, None)
    assert prepared.attributes() == {"priority": -2, "session_id": "s" * 128, "reuse_within_s": None}


async def test_absent_fields_get_defaults(gated: tuple[Admission, GatedTokenizer]) -> None:
    one, _ = gated
    prompt = "a prompt of two full blocks and a bit more."
    prepared = await one.prepare(request(prompt), MODEL, None)
    assert prepared.request_id
    assert prepared.sampling.max_tokens == LIMITS.max_new_tokens
    assert (prepared.slo, prepared.deadline_s, prepared.priority) == (Slo(), 60.0, 0)
    expected = block_hashes(list(prompt.encode()), 16, chain_key(b"", MODEL.hash_seed))
    assert prepared.block_hashes == tuple(expected)
    assert len(expected) == 2


@pytest.mark.parametrize(("caller_s", "expected_s"), [(None, 60.0), (5.0, 5.0), (900.0, 60.0), (-1.0, 0.0)])
async def test_the_shorter_deadline_counts(
    gated: tuple[Admission, GatedTokenizer], caller_s: float | None, expected_s: float
) -> None:
    assert (await gated[0].prepare(request("hi"), MODEL, caller_s)).deadline_s == expected_s


async def test_a_token_outside_the_vocabulary_is_rejected(gated: tuple[Admission, GatedTokenizer]) -> None:
    import dataclasses

    small = dataclasses.replace(MODEL, vocab_size=100)
    with pytest.raises(InvalidRequest) as caught:
        await gated[0].prepare(request("hello"), small, None)
    assert (caught.value.field, caught.value.expected) == ("text", "ids below 100")


def test_a_different_model_names_the_field() -> None:
    import dataclasses

    assert difference(MODEL, MODEL) is None
    other = dataclasses.replace(MODEL, fingerprint=dataclasses.replace(FINGERPRINT, engine="toy.v2"))
    assert difference(MODEL, other) == "its engine is 'toy.v2', the cluster's is 'toy.v1'"
    attention = dataclasses.replace(FINGERPRINT.shape, layout="block-major.v1", dtype="float32")
    other = dataclasses.replace(MODEL, fingerprint=dataclasses.replace(FINGERPRINT, shape=attention))
    assert (
        difference(MODEL, other)
        == "its kv_shape.layout is 'toy.v1', the cluster's is a layout that can be converted to block-major.v1"
    )
    large = dataclasses.replace(FINGERPRINT.shape, block_size=32)
    other = dataclasses.replace(MODEL, fingerprint=dataclasses.replace(FINGERPRINT, shape=large), block_size=32)
    assert difference(MODEL, other) is None
    assert difference(MODEL, dataclasses.replace(MODEL, vocab_size=1)) == "its vocab_size differs from the cluster's"

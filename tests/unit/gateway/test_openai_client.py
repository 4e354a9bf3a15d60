"""Answers through OpenAI's own client, sync, async and streamed, against those of the SDK; in both forms of the
gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import Served, serve

PROMPT = "def fib(n):\n    return"
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "add two numbers"}]
SEEDED = {"max_tokens": 24, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module", params=[False, True], ids=["process", "in router"])
def bundled(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Both forms of the gateway."""
    with serve(model=str(BUNDLED), worker={"deterministic": "on"}, prefill=0, in_router=request.param) as served:
        yield served


@pytest.fixture(scope="module", params=[False, True], ids=["process", "in router"])
def toy(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(in_router=request.param) as served:
        yield served


def test_a_completion_matches_the_sdk(bundled: Served) -> None:
    expected = bundled.sdk.generate(PROMPT, **SEEDED)
    found = bundled.openai.completions.create(model=bundled.model, prompt=PROMPT, **SEEDED)
    [choice] = found.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
        expected.usage.total_tokens,
    )
    assert (found.object, found.model) == ("text_completion", bundled.model)


def test_a_chat_matches_the_sdk(bundled: Served) -> None:
    expected = bundled.sdk.generate(MESSAGES, **SEEDED)
    found = bundled.openai.chat.completions.create(model=bundled.model, messages=MESSAGES, **SEEDED)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", expected.text)
    assert found.object == "chat.completion"


def test_a_streamed_chat_is_the_whole_one(bundled: Served) -> None:
    whole = bundled.openai.chat.completions.create(model=bundled.model, messages=MESSAGES, **SEEDED)
    chunks = list(
        bundled.openai.chat.completions.create(
            model=bundled.model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SEEDED
        )
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in parts) == whole.choices[0].message.content
    assert [one.choices[0].finish_reason for one in parts[-2:]] == [None, "length"]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    assert all(one.usage is None for one in parts)
    assert len({one.id for one in chunks}) == 1


async def test_the_async_client_streams(bundled: Served) -> None:
    expected = bundled.sdk.generate(PROMPT, **SEEDED)
    async with openai.AsyncOpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model=bundled.model, prompt=PROMPT, stream=True, **SEEDED)
        assert "".join([one.choices[0].text async for one in stream]) == expected.text


def test_each_of_several_answers_has_its_index(bundled: Served) -> None:
    expected = bundled.sdk.generate(PROMPT, n=3, **SEEDED)
    found = bundled.openai.completions.create(model=bundled.model, prompt=PROMPT, n=3, **SEEDED)
    assert [(one.index, one.text) for one in found.choices] == [(one.index, one.text) for one in expected.choices]
    texts = {0: "", 1: "", 2: ""}
    for chunk in bundled.openai.completions.create(model=bundled.model, prompt=PROMPT, n=3, stream=True, **SEEDED):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [one.text for one in expected.choices]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_prompts_are_one_request(bundled: Served, is_streamed: bool) -> None:
    prompts = [PROMPT, "import os\n", "class A:"]
    expected = [choice.text for prompt in prompts for choice in bundled.sdk.generate(prompt, n=2, **SEEDED).choices]
    texts = dict.fromkeys(range(6), "")
    found = bundled.openai.completions.create(model=bundled.model, prompt=prompts, n=2, stream=is_streamed, **SEEDED)
    for chunk in found if is_streamed else [found]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == expected


def test_token_ids_are_a_prompt(bundled: Served) -> None:
    ids = bundled.sdk.tokenize(PROMPT)
    expected = bundled.sdk.generate(ids, **SEEDED).text
    for prompt in (ids, [ids]):
        found = bundled.openai.completions.create(model=bundled.model, prompt=prompt, **SEEDED)
        assert found.choices[0].text == expected


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_of_a_chat_have_tokens_and_bytes(bundled: Served, is_streamed: bool) -> None:
    expected = bundled.sdk.generate(MESSAGES, logprobs=3, **SEEDED)
    found = bundled.openai.chat.completions.create(
        model=bundled.model, messages=MESSAGES, logprobs=True, top_logprobs=3, stream=is_streamed, **SEEDED
    )
    scored = [
        one
        for chunk in (found if is_streamed else [found])
        for choice in chunk.choices
        if choice.logprobs is not None
        for one in choice.logprobs.content or []
    ]
    assert b"".join(bytes(one.bytes) for one in scored).decode() == expected.text
    assert [one.logprob for one in scored] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-6)
    assert [len(one.top_logprobs) for one in scored] == [3] * len(expected.logprobs)
    assert all(one.token == bytes(one.bytes).decode("utf-8", "replace") for one in scored)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_of_a_text_have_offsets(bundled: Served, is_streamed: bool) -> None:
    expected = bundled.sdk.generate(PROMPT, logprobs=2, **SEEDED)
    found = bundled.openai.completions.create(
        model=bundled.model, prompt=PROMPT, logprobs=2, stream=is_streamed, **SEEDED
    )
    parts = [
        choice.logprobs
        for chunk in (found if is_streamed else [found])
        for choice in chunk.choices
        if choice.logprobs is not None
    ]
    tokens = [token for part in parts for token in part.tokens or []]
    offsets = [offset for part in parts for offset in part.text_offset or []]
    assert "".join(tokens) == expected.text
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    logprobs = [value for part in parts for value in part.token_logprobs or []]
    assert logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-6)


def test_json_schemas_are_enforced(bundled: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = bundled.openai.chat.completions.create(
        model=bundled.model,
        messages=MESSAGES,
        max_tokens=200,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    document = json.loads(found.choices[0].message.content or "")
    assert set(document) == {"name", "age"}
    assert isinstance(document["age"], int)


def test_cached_tokens_are_counted(bundled: Served) -> None:
    prompt = "# a prompt that is longer than some blocks of the cache\n" * 8
    used = [bundled.openai.completions.create(model=bundled.model, prompt=prompt, max_tokens=2).usage for _ in range(2)]
    assert [one.prompt_tokens_details.cached_tokens > 0 for one in used if one and one.prompt_tokens_details] == [
        False,
        True,
    ]


def test_models_are_listed_and_retrieved(bundled: Served) -> None:
    [model] = bundled.openai.models.list().data
    assert (model.id, model.object) == (bundled.model, "model")
    assert bundled.openai.models.retrieve(bundled.model) == model
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        bundled.openai.models.retrieve("gpt-5")


def test_a_chat_may_use_the_servers_limit(toy: Served) -> None:
    """Without max_tokens a chat ends when the model stops or at the server's limit, and a text after 16 tokens."""
    found = toy.openai.completions.create(model="toy", prompt="x", temperature=0)
    assert found.usage is not None
    assert found.usage.completion_tokens == 16


def test_headers_reach_the_router(toy: Served) -> None:
    found = toy.openai.completions.with_raw_response.create(
        model="toy",
        prompt="hello there",
        max_tokens=2,
        extra_headers={"x-request-id": "mine", "x-slo-ttft-ms": "90000", "x-slo-tpot-ms": "5000"},
    )
    assert found.headers["x-request-id"] == "mine"
    assert found.parse().id == "cmpl-mine"
    explained = toy.sdk.explain("mine")
    assert explained.decision in ("remote", "local")


def test_texts_are_tokenized_as_in_vllm(toy: Served) -> None:
    client = toy.openai.with_options(base_url=toy.url)
    found = client.post("/tokenize", body={"prompt": "hi", "return_token_strs": True}, cast_to=object)
    assert found == {"count": 2, "max_model_len": 8192, "tokens": [104, 105], "token_strs": ["h", "i"]}
    assert client.post("/detokenize", body={"tokens": [104, 105]}, cast_to=object) == {"prompt": "hi"}


def test_messages_are_tokenized_by_the_chat_template(bundled: Served) -> None:
    client = bundled.openai.with_options(base_url=bundled.url)
    found = client.post("/tokenize", body={"messages": MESSAGES}, cast_to=object)
    assert found["tokens"] == bundled.sdk.tokenize(MESSAGES)  # type: ignore[index]

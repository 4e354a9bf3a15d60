"""Every field of the API is supported, ignored or rejected, each with a test through OpenAI's client."""

from __future__ import annotations

import json
import typing
from typing import Any

import openai
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from pdserve.gateway.api.field_support import IGNORED, MODELS, REJECTED, Endpoint
from tests.unit.gateway.conftest import Served

MESSAGES = [{"role": "user", "content": "add two numbers"}]
PROMPT = "def add(a, b):"
BASE = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
PARAMS: dict[Endpoint, Any] = {"chat": chat_params, "text": text_params}
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "text")  # test_responses.py has the third one.

#: The SDK's option for a field and its value; both must give the same text.
EQUAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (5, {"max_tokens": 5}),
    "temperature": (0.0, {"temperature": 0.0}),
    "top_p": (0.5, {"top_p": 0.5}),
    "stop": (["e", "a"], {"stop": ["e", "a"]}),
    # test_histories.py has their effects on a model that reasons.
    "reasoning_effort": ("none", {"reasoning_effort": "none"}),
    "stop_in_reasoning": (True, {"stop_in_reasoning": True}),
    "allow_special_tokens": (True, {"allow_special_tokens": True}),
    "seed": (-1, {"seed": 2**64 - 1}),
    "presence_penalty": (2.0, {"presence_penalty": 2.0}),
    "frequency_penalty": (2.0, {"frequency_penalty": 2.0}),
    "logit_bias": ({"40": 60}, {"logit_bias": {40: 60}}),
    "response_format": ({"type": "json_object"}, {"json_object": True}),
    "top_k": (2, {"top_k": 2}),
    "min_p": (0.5, {"min_p": 0.5}),
    "top_n_sigma": (1.0, {"top_n_sigma": 1.0}),
    "repetition_penalty": (5.0, {"repetition_penalty": 5.0}),
    "min_tokens": (12, {"min_tokens": 12}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "stop_token_ids": (list(range(200)[::4]), {"stop_token_ids": list(range(200)[::4])}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "bad_words": (["return", "self"], {"bad_words": ["return", "self"]}),
    "allowed_token_ids": ([30, 40, 50], {"allowed_token_ids": [30, 40, 50]}),
    "truncate_prompt_tokens": (2, {"truncate_prompt_tokens": 2}),
    "structured_outputs": ({"choice": ["one", "two"]}, {"choice": ["one", "two"]}),
    "priority": (3, {"priority": -3}),
    "max_completion_tokens": (5, {"max_tokens": 5}),
    "best_of": (3, {"best_of": 3}),
}
#: Fields of requests that add a field to the answer.
SHOWN: dict[str, tuple[dict[str, Any], typing.Callable[[Any], bool]]] = {
    "model": ({}, lambda found: found.model == "stdlib-5m"),
    "n": ({"n": 2}, lambda found: [one.index for one in found.choices] == [0, 1]),
    "logprobs": ({"logprobs": True}, lambda found: found.choices[0].logprobs is not None),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda found: len(found.choices[0].logprobs.content[0].top_logprobs) == 2,
    ),
    "return_token_ids": (
        {"return_token_ids": True},
        lambda found: len(found.choices[0].token_ids) == found.usage.completion_tokens,
    ),
    "echo": ({"echo": True}, lambda found: found.choices[0].text.startswith(PROMPT)),
    "request_id": ({"request_id": "mine"}, lambda found: found.id.endswith("-mine")),
    "include_stop_str_in_output": (
        {"stop": ["e", "a"], "include_stop_str_in_output": True},
        lambda found: (
            found.choices[0].message.content if hasattr(found.choices[0], "message") else found.choices[0].text
        ).endswith(("e", "a")),
    ),
}


def ask(served: Served, endpoint: Endpoint, **fields: Any) -> Any:
    """Fields that the client's methods do not know are sent as `extra_body`, as users do."""
    known = typing.get_type_hints(PARAMS[endpoint].CompletionCreateParamsStreaming)
    extra = {name: fields.pop(name) for name in list(fields) if name not in known}
    fields = {"model": served.model, **fields, "extra_body": extra}
    if endpoint == "chat":
        return served.openai.chat.completions.create(**{"messages": MESSAGES, **fields})
    return served.openai.completions.create(**{"prompt": PROMPT, **fields})


def text_of(answer: Any) -> str:
    [choice] = answer.choices
    return choice.message.content if hasattr(choice, "message") else choice.text


def cases(table: typing.Mapping[Endpoint, typing.Iterable[str]]) -> list[tuple[Endpoint, str]]:
    return [(endpoint, name) for endpoint in ENDPOINTS for name in table[endpoint]]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_field_of_openai_is_missing(endpoint: Endpoint) -> None:
    theirs = set(typing.get_type_hints(PARAMS[endpoint].CompletionCreateParamsStreaming))
    assert theirs <= {*MODELS[endpoint].model_fields, *IGNORED[endpoint], *REJECTED[endpoint]}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_field_is_in_one_table(endpoint: Endpoint) -> None:
    tables = (MODELS[endpoint].model_fields, IGNORED[endpoint], REJECTED[endpoint])
    assert len(set().union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize(
    ("endpoint", "name"), cases({endpoint: MODELS[endpoint].model_fields for endpoint in ENDPOINTS})
)
def test_a_supported_field_has_its_effect(bundled: Served, tooled: Served, endpoint: Endpoint, name: str) -> None:
    prompt: Any = MESSAGES if endpoint == "chat" else PROMPT
    if name in EQUAL:
        value, options = EQUAL[name]
        fields = {**BASE, name: value}
        if name == "max_completion_tokens":
            del fields["max_tokens"]
        found, expected = ask(bundled, endpoint, **fields), bundled.sdk.generate(prompt, **{**BASE, **options})
        assert text_of(found) == expected.text
        assert found.choices[0].finish_reason == expected.finish_reason
    elif name in SHOWN:
        fields, holds = SHOWN[name]
        if name == "logprobs" and endpoint == "text":
            fields = {"logprobs": 0}
        assert holds(ask(bundled, endpoint, **{**BASE, **fields}))
    elif name in ("tools", "tool_choice", "parallel_tool_calls"):
        tool = {"type": "function", "function": {"name": "stop"}}
        fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        [choice] = ask(tooled, endpoint, **{**BASE, **fields, "max_tokens": 60}).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["stop"]
    elif name == "chat_template_kwargs":
        sizes = [
            ask(tooled, endpoint, **{**BASE, name: value}).usage.prompt_tokens
            for value in ({}, {"style": "# Write short names.\n"})
        ]
        assert sizes[0] < sizes[1]
    elif name == "cache_salt":
        text = "def add(a, b):\n    return a + b\n" * 10
        long: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if endpoint == "chat" else {"prompt": text}
        )
        seen = [
            ask(bundled, endpoint, **BASE, **long, cache_salt=f"{endpoint} {salt}").usage.prompt_tokens_details
            for salt in ("x", "x", "y")
        ]
        assert [one.cached_tokens > 0 for one in seen] == [False, True, False]
    elif name in ("messages", "prompt"):
        assert text_of(ask(bundled, endpoint, **BASE)) == bundled.sdk.generate(prompt, **BASE).text
    elif name in ("stream", "stream_options"):
        chunks = list(ask(bundled, endpoint, stream=True, stream_options={"include_usage": True}, **BASE))
        assert chunks[-1].usage.completion_tokens == 12
    else:
        assert name == "prompt_logprobs"
        found = ask(bundled, endpoint, prompt_logprobs=1, **BASE)
        scores = found.prompt_logprobs if endpoint == "chat" else found.choices[0].prompt_logprobs
        expected_scores = bundled.sdk.generate(prompt, prompt_logprobs=1, **BASE).prompt_logprobs
        assert scores[0] is None
        assert [
            score[str(one.token_id)]["logprob"] for score, one in zip(scores[1:], expected_scores[1:], strict=True)
        ] == (
            pytest.approx([one.logprob for one in expected_scores[1:]], abs=1e-6)  # type: ignore[union-attr]
        )


@pytest.mark.parametrize(("endpoint", "name"), cases(IGNORED))
def test_an_ignored_field_changes_nothing(bundled: Served, endpoint: Endpoint, name: str) -> None:
    assert text_of(ask(bundled, endpoint, **BASE, **{name: "x"})) == text_of(ask(bundled, endpoint, **BASE))


@pytest.mark.parametrize(("endpoint", "name"), cases(REJECTED))
def test_a_rejected_field_is_named_with_its_reason(bundled: Served, endpoint: Endpoint, name: str) -> None:
    rejected = REJECTED[endpoint][name]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(bundled, endpoint, **BASE, **{name: {"no": "such value"}})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    assert rejected.reason in caught.value.message
    for value in (*rejected.harmless, None):
        assert text_of(ask(bundled, endpoint, **BASE, **{name: value}))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_unknown_field_is_rejected(toy: Served, endpoint: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(toy, endpoint, max_tokens=2, temprature=0.5)
    assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"temperature": True}, "temperature"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"n": 17}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_wrong_value_names_its_field(bundled: Served, endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        list(ask(bundled, endpoint, **fields))
    assert (caught.value.param or "").startswith(param)


SCHEMA = {"type": "nope"}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "says"),
    [
        ("text", {"prompt": ["a", [1]]}, "prompt", "a text, token ids"),
        ("text", {"prompt": [True]}, "prompt", "a text, token ids"),
        ("text", {"stop": ["a", 1]}, "stop", "strings"),
        ("text", {"structured_outputs": {"regex": "["}}, "structured_outputs", "a grammar that compiles"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "response_format",
            "a grammar that compiles",
        ),
        ("chat", {"logprobs": True, "top_logprobs": 65}, "top_logprobs", "0 and 64"),
        ("chat", {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "a function"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages", "prompt is too long"),
        ("chat", {"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight", "no such field"),
        ("responses", {"input": "x" * 200_000}, "input", "prompt is too long"),
        ("responses", {"max_output_tokens": 10**6}, "max_output_tokens", "at most"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "text.format",
            "a grammar that compiles",
        ),
    ],
)
def test_an_error_names_the_field_of_the_request(
    bundled: Served, endpoint: str, fields: dict[str, Any], param: str, says: str
) -> None:
    """Neither the SDK's field nor the name of an alternative in our types."""
    path = {"text": "/completions", "chat": "/chat/completions", "responses": "/responses"}[endpoint]
    base = {"text": {"prompt": "x"}, "chat": {"messages": MESSAGES}, "responses": {"input": "x"}}[endpoint]
    with pytest.raises(openai.BadRequestError) as caught:
        bundled.openai.post(path, body={**base, **fields}, cast_to=object)
    body: Any = caught.value.body
    assert (caught.value.param, body["message"].partition(":")[0]) == (param, param)
    assert says in body["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
)
def test_wrong_messages_are_named(bundled: Served, messages: list[Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(bundled, "chat", messages=messages)
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type: got 'image_url', expected 'text': this server takes text only",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "usr", "content": "x"}]},
            "messages[0].role: got 'usr', expected 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type: got 'input_image', expected 'input_text': this server takes text only",
        ),
    ],
)
def test_an_unknown_kind_is_named(bundled: Served, path: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        bundled.openai.post(path, body={"model": "stdlib-5m", **fields}, cast_to=object)
    body: Any = caught.value.body
    assert body["message"] == message
    assert caught.value.param == message.partition(":")[0]


def test_a_long_text_in_place_of_a_kind_is_not_repeated(bundled: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(bundled, "chat", messages=[{"role": "a secret prompt " * 9, "content": "x"}])
    assert "secret" not in str(caught.value)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}
NOWHERE = {"$ref": "#/nowhere"}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ("/v1/chat/completions", {"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ("/v1/chat/completions", {"messages": [USER, 3]}, "messages[1]"),
        ("/v1/chat/completions", {"messages": [USER, {**USER, "weight": 1}]}, "messages[1].weight"),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CALL, {**CALL, "function": {"arguments": "{}"}}]},
                    USER,
                ]
            },
            "messages[0].tool_calls[1].function.name",
        ),
        ("/v1/chat/completions", {"messages": [USER], "tools": [tool({}), tool(3)]}, "tools[1].function.parameters"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tools": [tool(NOWHERE)], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ("/v1/chat/completions", {"messages": [USER], "stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ("/v1/chat/completions", {"messages": [USER], "allowed_token_ids": [1, "x"]}, "allowed_token_ids[1]"),
        ("/v1/chat/completions", {"messages": [USER], "logit_bias": {"5": "x"}}, "logit_bias.5"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "structured_outputs": {"choice": ["a", 3]}},
            "structured_outputs.choice[1]",
        ),
        ("/v1/completions", {"prompt": [1, 2**40]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], [2, 3, -1]]}, "prompt[1][2]"),
        ("/v1/responses", {"input": [USER, {"type": "computer_call"}]}, "input[1].type"),
        ("/v1/responses", {"input": [USER, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
        ("/v1/responses", {"input": "x", "include": ["x"]}, "include[0]"),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": NOWHERE}],
                "tool_choice": "required",
            },
            "tools[1].parameters",
        ),
        ("/tokenize", {"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
    ],
)
def test_places_in_arrays_are_written_as_openai_does(
    tooled: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    status, text = tooled.post(path, fields)
    error = json.loads(text)["error"]
    assert (status, error["param"], error["message"].partition(":")[0]) == (400, param, param), error


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None}}),
        ("text", {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}),
        ("chat", {"response_format": {"type": "text", "json_schema": None}}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": None, "schema": None}}}),
        ("text", {"structured_outputs": {"json": None, "choice": ["a"], "regex": None, "whitespace": None}}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image": None}]}]}),
        ("chat", {"messages": [{"role": "user", "content": "x", "weight": None}]}),
        ("responses", {"stream": True, "stream_options": {"include_obfuscation": None}}),
        ("responses", {"text": {"format": {"type": "text", "schema": None}, "verbosity": None}}),
    ],
)
def test_null_is_absent_at_every_level(bundled: Served, endpoint: str, fields: dict[str, Any]) -> None:
    path = {"text": "completions", "chat": "chat/completions", "responses": "responses"}[endpoint]
    base = {"text": {"prompt": "x"}, "chat": {"messages": MESSAGES}, "responses": {"input": "x"}}[endpoint]
    most = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    status, answer = bundled.post(f"/v1/{path}", {**base, most: 2, **fields})
    assert status == 200, answer


def test_text_parts_are_joined_and_a_developer_is_the_system(bundled: Served) -> None:
    parts = [{"type": "text", "text": "add"}, {"type": "text", "text": "numbers"}]
    messages = [{"role": "developer", "content": "Write."}, {"role": "user", "content": parts}]
    expected = [{"role": "system", "content": "Write."}, {"role": "user", "content": "add\nnumbers"}]
    assert text_of(ask(bundled, "chat", messages=messages, **BASE)) == bundled.sdk.generate(expected, **BASE).text


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_running_usage_counts_the_tokens_of_each_chunk(bundled: Served, endpoint: Endpoint) -> None:
    told = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(bundled, endpoint, stream=True, stream_options=told, **BASE))
    counts = [one.usage.completion_tokens for one in chunks]
    assert counts == sorted(counts)
    assert (counts[-2:], {one.usage.prompt_tokens for one in chunks}) == ([12, 12], {chunks[-1].usage.prompt_tokens})


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_padded_chunks_are_multiples_of_64_bytes(bundled: Served, endpoint: Endpoint) -> None:
    fields = {"model": bundled.model, "stream": True, "stream_options": {"include_obfuscation": True}, **BASE}
    if endpoint == "chat":
        opened = bundled.openai.chat.completions.with_streaming_response.create(messages=MESSAGES, **fields)
    else:
        opened = bundled.openai.completions.with_streaming_response.create(prompt=PROMPT, **fields)
    with opened as answer:
        chunks = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(chunks) > 1  # on a busy machine a chunk has several tokens
    assert all("obfuscation" in json.loads(chunk) for chunk in chunks)
    assert {len(chunk.encode()) % 64 for chunk in chunks} == {0}


@pytest.mark.parametrize(
    ("path", "given", "meant"),
    [
        ("chat/completions", {"max_token": 3}, "max_tokens"),
        ("completions", {"promt": "x"}, "prompt"),
        ("responses", {"max_output_token": 3}, "max_output_tokens"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, "schema"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parmeters": {}}}]},
            "parameters",
        ),
        ("chat/completions", {"stream_options": {"include_usages": True}}, "include_usage"),
    ],
)
def test_a_mistyped_field_gets_a_suggestion(toy: Served, path: str, given: dict[str, Any], meant: str) -> None:
    base = {
        "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "completions": {"prompt": "x"},
        "responses": {"input": "x"},
    }
    status, text = toy.post(f"/v1/{path}", base[path] | given)
    assert status == 400
    assert f"did you mean {meant}?" in json.loads(text)["error"]["message"]


def test_a_long_unknown_field_gets_no_suggestion(toy: Served) -> None:
    for name in ("max_tokens" * 100_000, "qqzzqq"):
        status, text = toy.post("/v1/completions", {"prompt": "x", name: 1})
        assert status == 400
        assert "did you mean" not in text
        assert len(text) < 2000

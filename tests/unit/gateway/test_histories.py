"""Histories as clients send them back: optional values reach the router as they are, and an error names its message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.v1 import inference_pb2
from tests.unit.client.conftest import Script, delta, fail, finished
from tests.unit.client.conftest import target as target
from tests.unit.gateway.conftest import gateway
from tests.unit.gateway.test_reasoning import ThinkingScript

USER: Any = {"role": "user", "content": "?"}


@pytest.fixture
def script() -> Script:
    return ThinkingScript()


@pytest.fixture
def client(target: str) -> Iterator[openai.OpenAI]:
    with (
        gateway(target) as host,
        openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def says(script: Script, text: str, reasoning: str | None = None) -> None:
    begin = inference_pb2.Started(request_id="r1", prompt_tokens=3, reasoning=reasoning)
    end = finished(reason=inference_pb2.FINISH_REASON_STOP, usage=inference_pb2.Usage(completion_tokens=1))
    script.says(inference_pb2.GenerateResponse(started=begin), delta(text, 1), end)


def call(arguments: str | None = "{}") -> Any:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def sent(client: openai.OpenAI, script: Script, *messages: Any) -> list[inference_pb2.ChatMessage]:
    says(script, "five")
    client.chat.completions.create(model="m", messages=[USER, *messages])
    return list(script.requests[-1].chat.messages)[1:]


def test_a_missing_content_is_not_an_empty_one(client: openai.OpenAI, script: Script) -> None:
    histories: list[tuple[Any, str | None]] = [
        ({"content": None, "tool_calls": [call()]}, None),
        ({"tool_calls": [call()]}, None),
        ({"content": "", "tool_calls": [call()]}, ""),
        ({"content": [], "tool_calls": [call()]}, ""),
        ({"content": None, "reasoning_content": "hm"}, None),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "five", "refusal": None}, "five"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": None, "tool_calls": [{**call(), "type": None, "index": None}]}, None),
    ]
    for fields, content in histories:
        [found] = sent(client, script, {"role": "assistant", **fields})
        assert (found.content if found.HasField("content") else None) == content
        assert len(found.tool_calls) == len(fields.get("tool_calls", ()))


def test_optional_values_reach_the_router_as_they_are(client: openai.OpenAI, script: Script) -> None:
    names = ("name", "tool_call_id", "reasoning_content")
    given: list[Any] = [
        {"role": "user", "content": "", "name": ""},
        {"role": "assistant", "content": "x", "reasoning_content": "", "tool_calls": []},
        {"role": "assistant", "content": "x", "reasoning": "", "tool_calls": None},
        {"role": "tool", "content": "", "tool_call_id": ""},
        {"role": "user", "content": "x", "name": None},
    ]
    found = sent(client, script, *given)
    assert [[name for name in names if one.HasField(name)] for one in found] == [
        *(["name"], ["reasoning_content"], ["reasoning_content"], ["tool_call_id"], [])
    ]  # fmt: skip
    assert all(one.HasField("content") for one in found)
    assert not any(one.tool_calls for one in found)


@pytest.mark.parametrize(("given", "expected"), [("", ""), (None, ""), ('{"a": 1', '{"a": 1'), ("{}", "{}")])
def test_arguments_are_sent_as_they_are(
    client: openai.OpenAI, script: Script, given: str | None, expected: str
) -> None:
    [found] = sent(client, script, {"role": "assistant", "content": None, "tool_calls": [call(given)]})
    assert found.tool_calls[0].arguments == expected


def test_items_of_a_response_become_messages_without_loss(client: openai.OpenAI, script: Script) -> None:
    says(script, "five")
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items: Any = [
        USER,
        reasoning,
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": None},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 1'},
        {"type": "function_call_output", "call_id": "c1", "output": ""},
        {"type": "function_call_output", "call_id": "c2", "output": "5"},
        reasoning,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        USER,
    ]
    client.responses.create(model="m", input=items)
    messages = list(script.requests[-1].chat.messages)
    assert [one.role for one in messages] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    called = messages[1]
    assert not called.HasField("content")
    assert called.reasoning_content == "hm"
    assert [(one.id, one.arguments) for one in called.tool_calls] == [("c1", ""), ("c2", '{"a": 1')]
    assert messages[2].HasField("content")
    assert (messages[4].content, messages[4].reasoning_content) == ("no", "hm")


SUMMARY = [{"type": "summary_text", "text": "in short"}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "in short"), ([], "in short"), ([{"type": "reasoning_text", "text": "hm"}], "hm")],
)
def test_reasoning_may_be_a_summary_alone(
    client: openai.OpenAI, script: Script, content: list[Any] | None, expected: str
) -> None:
    says(script, "five")
    reasoning = {"type": "reasoning", "id": "rs", "summary": SUMMARY, "content": content}
    items: Any = [USER, reasoning, {"role": "assistant", "content": "5"}, USER]
    client.responses.create(model="m", input=items)
    assert script.requests[-1].chat.messages[1].reasoning_content == expected


ARGUMENTS = "chat.messages[1].tool_calls[1].function.arguments"


def rejects(script: Script, field: str) -> None:
    def play(request: inference_pb2.GenerateRequest, context: Any) -> Any:
        fail(context, InvalidRequest(field, "a cut text", "a JSON object"))
        yield inference_pb2.GenerateResponse()

    script.plays.append(play)


def test_an_error_names_the_message_and_the_call(client: openai.OpenAI, script: Script) -> None:
    cut: Any = {"role": "assistant", "content": None, "tool_calls": [call(), call('{"a')]}
    for field in (ARGUMENTS, "chat.messages[2]", "chat.messages"):
        rejects(script, field)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=[USER, cut, USER])
        assert caught.value.param == field.removeprefix("chat.")


def test_an_error_of_a_response_names_the_item(client: openai.OpenAI, script: Script) -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "add", "arguments": "{"} for name in ("a", "b")]
    items: Any = [USER, {"type": "reasoning", "id": "rs", "summary": []}, *calls, USER]
    for field, expected in (
        (ARGUMENTS, "input[3].arguments"),
        ("chat.messages[2]", "input[4]"),
        ("chat.messages[0]", "input[0]"),
        ("chat.messages", "input"),
    ):
        rejects(script, field)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input=items)
        assert caught.value.param == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input": "x"}, ["input"]),
        ({"input": "x", "instructions": "be brief"}, ["instructions", "input"]),
        ({"input": [USER, USER], "instructions": "be brief"}, ["instructions", "input[0]", "input[1]"]),
    ],
)
def test_an_error_of_a_text_names_its_field(
    client: openai.OpenAI, script: Script, fields: dict[str, Any], expected: list[str]
) -> None:
    for index, param in enumerate(expected):
        rejects(script, f"chat.messages[{index}]")
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", **fields)
        assert caught.value.param == param


# --- reasoning, by the end of the prompt


@pytest.mark.parametrize("form", ["tagged", "open", "special", "mistral"])
@pytest.mark.parametrize(
    ("reasoning", "text", "expected"),
    [
        ("open", "hm{close}five", ("five", "hm")),
        ("open", "hm", ("", "hm")),
        ("closed", "five", ("five", None)),
        ("closed", "{open}five", ("{open}five", None)),
        ("", "{open}hm{close}five", ("five", "hm")),
        ("", "five", ("five", None)),
    ],
)
def test_the_end_of_the_prompt_decides_what_is_reasoning(
    client: openai.OpenAI,
    script: ThinkingScript,
    form: str,
    reasoning: str,
    text: str,
    expected: tuple[str, str | None],
) -> None:
    script.reasoning_format = form
    marks = {"open": "[THINK]", "close": "[/THINK]"} if form == "mistral" else {"open": "<think>", "close": "</think>"}
    says(script, text.format(**marks), reasoning)
    message = client.chat.completions.create(model="m", messages=[USER]).choices[0].message
    assert script.requests[-1].sampling.HasField("skip_special_tokens") == (form in ("special", "mistral"))
    content = expected[0].format(**marks)
    assert (message.content, getattr(message, "reasoning_content", None)) == (content, expected[1])
    says(script, text.format(**marks), reasoning)
    assert client.responses.create(model="m", input="?").output_text == content


def test_switches_reach_the_router(client: openai.OpenAI, script: Script) -> None:
    says(script, "five")
    client.chat.completions.create(
        model="m",
        messages=[USER],
        reasoning_effort="high",
        stop="x",
        extra_body={"stop_in_reasoning": True, "allow_special_tokens": True},
    )
    request = script.requests[-1]
    assert (request.chat.reasoning_effort, request.chat.allow_special_tokens) == ("high", True)
    assert request.sampling.stop_in_reasoning
    says(script, "five")
    client.chat.completions.create(model="m", messages=[USER])
    chat = script.requests[-1].chat
    assert (chat.HasField("reasoning_effort"), chat.allow_special_tokens) == (False, False)
    says(script, "five")
    client.responses.create(model="m", input="?", reasoning={"effort": "high", "summary": "auto"})
    assert script.requests[-1].chat.reasoning_effort == "high"
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort"):
        client.responses.create(model="m", input="?", reasoning={"effort": "extreme"})  # type: ignore[typeddict-item]

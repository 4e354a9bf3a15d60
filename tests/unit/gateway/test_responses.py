"""/v1/responses through OpenAI's client: texts, tools, events, and every field of the request."""

from __future__ import annotations

import json
import typing
from typing import Any

import openai
import pytest
from openai.types.responses import response_create_params as params

from pdserve.core.errors import KvLost
from pdserve.gateway.api.field_support import IGNORED, MODELS, REJECTED
from tests.unit.client.conftest import Script, delta, started
from tests.unit.client.conftest import script as script
from tests.unit.client.conftest import target as target
from tests.unit.gateway.conftest import Served, gateway

INPUT = "add two numbers"
BASE = {"max_output_tokens": 16, "temperature": 0.8, "extra_body": {"seed": 5}}
SDK = {"max_tokens": 16, "temperature": 0.8, "seed": 5}
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def ask(served: Served, **fields: Any) -> Any:
    extra = {**BASE["extra_body"], **fields.pop("extra_body", {})}  # type: ignore[dict-item]
    given = {"model": served.model, "input": INPUT, **BASE, **fields, "extra_body": extra}
    return served.openai.responses.create(**given)


def test_a_response_matches_the_sdks_chat(bundled: Served) -> None:
    expected = bundled.sdk.generate([{"role": "user", "content": INPUT}], **SDK)
    found = ask(bundled)
    assert (found.output_text, found.status, found.object) == (expected.text, "incomplete", "response")
    assert found.incomplete_details.reason == "max_output_tokens"
    assert (found.usage.input_tokens, found.usage.output_tokens) == (expected.usage.prompt_tokens, 16)
    [item] = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")


def test_events_come_in_openai_s_order(bundled: Served) -> None:
    whole = ask(bundled)
    events = list(ask(bundled, stream=True))
    kinds = [one.type for one in events]
    texts = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * texts,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 16


def test_the_client_s_own_helper_reads_the_stream(bundled: Served) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    fields = {"model": bundled.model, "input": INPUT, **BASE, "max_output_tokens": 100, "text": {"format": form}}
    whole = bundled.openai.responses.create(**fields)
    with bundled.openai.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    assert whole.status == "completed"


def test_instructions_and_items_are_messages(bundled: Served) -> None:
    found = ask(
        bundled,
        instructions="Write Python.",
        input=[
            {"role": "user", "content": "one"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "three"}, {"type": "input_text", "text": "four"}],
            },
        ],
    )
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three\nfour"},
    ]
    assert found.output_text == bundled.sdk.generate(messages, **SDK).text
    assert found.instructions == "Write Python."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_required_calls_are_items(tooled: Served, is_streamed: bool) -> None:
    found = ask(
        tooled,
        tools=[ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        stream=is_streamed,
    )
    if is_streamed:
        events = list(found)
        kinds = [one.type for one in events]
        assert kinds[2] == "response.output_item.added"
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        parts = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
        found = events[-1].response
        assert "".join(parts) == found.output[0].arguments
    [call] = found.output
    assert (call.type, call.name, call.status, found.status) == ("function_call", "add", "completed", "completed")
    assert set(json.loads(call.arguments)) == {"a"}


def test_calls_and_results_come_back_as_items(tooled: Served) -> None:
    first = ask(tooled, tools=[ADD], tool_choice={"type": "function", "name": "add"}, max_output_tokens=200)
    [call] = first.output
    items = [
        {"role": "user", "content": INPUT},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
    ]
    found = ask(tooled, input=items, tools=[ADD])
    function = {"name": "add", "arguments": call.arguments}
    messages = [
        {"role": "user", "content": INPUT},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": call.call_id},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": ADD["parameters"]}}
    assert found.output_text == tooled.sdk.generate(messages, tools=[tool], **SDK).text


def test_a_schema_is_enforced(bundled: Served) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    found = ask(bundled, text={"format": form}, max_output_tokens=100)
    assert list(json.loads(found.output_text)) == ["ok"]
    assert found.text.format.type == "json_schema"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_are_included_where_asked(bundled: Served, is_streamed: bool) -> None:
    found = ask(bundled, include=["message.output_text.logprobs"], top_logprobs=2, stream=is_streamed)
    found = list(found)[-1].response if is_streamed else found
    scores = found.output[0].content[0].logprobs
    assert b"".join(bytes(one.bytes) for one in scores).decode() == found.output_text
    assert {len(one.top_logprobs) for one in scores} == {2}


def test_padded_deltas_are_multiples_of_64_bytes(bundled: Served) -> None:
    fields = {"model": bundled.model, "input": INPUT, **BASE, "stream_options": {"include_obfuscation": True}}
    fields["max_output_tokens"] = 128  # several messages, however fast the tokens come
    with bundled.openai.responses.with_streaming_response.create(stream=True, **fields) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ") and ".delta" in line]
    assert len(lines) > 1
    assert {(len(line.encode()) - len("data: ")) % 64 for line in lines} == {0}


def test_a_failure_after_the_first_token_is_an_event(script: Script, target: str) -> None:
    script.fails(KvLost("a worker crashed"), started(), delta("a", 1))
    with (
        gateway(target) as host,
        openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x", max_retries=0) as client,
    ):
        # The scripted model needs no chat template.
        *_, last = client.responses.create(model="m", input="hi", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error is not None
    assert last.response.error.message == "a worker crashed"


# --- fields -------------------------------------------------------------------------------------------------------


def test_no_field_of_openai_is_missing() -> None:
    theirs = set(typing.get_type_hints(params.ResponseCreateParamsStreaming))
    tables = (MODELS["responses"].model_fields, IGNORED["responses"], REJECTED["responses"])
    assert theirs <= set().union(*tables)
    assert len(set().union(*tables)) == sum(map(len, tables))


SUPPORTED = {
    "model": {},
    "input": {},
    "instructions": {"instructions": "x"},
    "max_output_tokens": {"max_output_tokens": 4},
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.5},
    "stream": {"stream": False},
    "stream_options": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "text": {"text": {"format": {"type": "json_object"}}},
    "tools": {"tools": [ADD]},
    "tool_choice": {"tools": [ADD], "tool_choice": "none"},
    "parallel_tool_calls": {"tools": [ADD], "parallel_tool_calls": False},
    "include": {"include": ["message.output_text.logprobs"]},
    "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "reasoning": {"reasoning": {"effort": "low", "summary": "auto"}},
    "chat_template_kwargs": {"extra_body": {"chat_template_kwargs": {"style": "x"}}},
    **{
        name: {"extra_body": {name: value}}
        for name, value in {
            "seed": 6,
            "cache_salt": "x",
            "stop": ["e"],
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "logit_bias": {"40": 60},
            "top_k": 2,
            "min_p": 0.5,
            "top_n_sigma": 1.0,
            "repetition_penalty": 2.0,
            "min_tokens": 4,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "bad_words": ["return"],
            "allowed_token_ids": [30, 40, 50],
            "truncate_prompt_tokens": 2,
            "priority": 3,
            "request_id": "mine",
        }.items()
    },
}


@pytest.mark.parametrize("name", MODELS["responses"].model_fields)
def test_a_supported_field_is_accepted_and_echoed(tooled: Served, name: str) -> None:
    fields = SUPPORTED[name]
    found = ask(tooled, **fields)
    found = list(found)[-1].response if fields.get("stream") else found
    for key in ("instructions", "max_output_tokens", "temperature", "top_p", "parallel_tool_calls", "tool_choice"):
        if key in fields:
            assert getattr(found, key) == fields[key]
    assert found.usage.output_tokens >= 1


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"stop": ["e"], "include_stop_str_in_output": True}, {"stop": ["e"], "include_stop_in_output": True}),
        ({"ignore_eos": True, "min_tokens": 16}, {"ignore_eos": True, "min_tokens": 16}),
        ({"top_k": 1}, {"top_k": 1}),
        ({"logit_bias": {"40": 60}}, {"logit_bias": {40: 60}}),
        ({"allowed_token_ids": [30, 40, 50]}, {"allowed_token_ids": [30, 40, 50]}),
        ({"repetition_penalty": 5.0}, {"repetition_penalty": 5.0}),
    ],
)
def test_sampling_fields_are_those_of_a_chat(bundled: Served, given: Any, options: Any) -> None:
    expected = bundled.sdk.generate([{"role": "user", "content": INPUT}], **SDK, **options)
    assert ask(bundled, extra_body=given).output_text == expected.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_has_no_effect_is_named_in_a_header(tooled: Served, is_streamed: bool) -> None:
    """As Codex, inspect-ai, litellm and aiperf send it."""
    given: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto", "more": 1},
        "text": {"verbosity": "low"},
        "tools": [
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "x", "description": "y", "tools": []},
            {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
            {**ADD, "defer_loading": True},
        ],
        "store": False,
        "extra_body": {"client_metadata": {"a": "b"}, "seed": 5},
        "stream": is_streamed,
    }
    if is_streamed:
        given["extra_body"]["stream_options"] = {"include_usage": True}
    base = {"model": tooled.model, "input": INPUT, "max_output_tokens": 16, "temperature": 0.8}
    raw = tooled.openai.responses.with_raw_response.create(**base, **given)
    ignored = "tools.custom, tools.namespace, tools.web_search, text.verbosity, reasoning.summary"
    assert raw.headers["x-pdserve-ignored"] == ignored
    found: Any = raw.parse()
    found = list(found)[-1].response if is_streamed else found
    tool = {"type": "function", "function": {"name": "add", "parameters": ADD["parameters"]}}
    assert found.output_text == tooled.sdk.generate([{"role": "user", "content": INPUT}], tools=[tool], **SDK).text
    assert [one.type for one in found.tools] == ["function"]
    plain = tooled.openai.responses.with_raw_response.create(**base, tools=[{"type": "web_search"}])
    assert plain.headers["x-pdserve-ignored"] == "tools.web_search"
    assert "x-pdserve-ignored" not in tooled.openai.responses.with_raw_response.create(**base).headers


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_beside_a_schema_call_or_answer(tooled: Served, is_streamed: bool) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    fields: dict[str, Any] = {"tools": [ADD], "text": form, "parallel_tool_calls": False, "stream": is_streamed}
    tokenize = tooled.sdk.tokenize
    marks = [str(one) for one in (tokenize("<tool_call>")[0], *tokenize("<"), *tokenize("<t"))]
    for choice, bias in (("required", 0), ("auto", 100), ("auto", -100)):
        extra = {"logit_bias": dict.fromkeys(marks, bias)}
        found = ask(tooled, tool_choice=choice, extra_body=extra, max_output_tokens=300, **fields)
        found = list(found)[-1].response if is_streamed else found
        if bias < 0:
            assert list(json.loads(found.output_text)) == ["ok"]
        else:
            assert {one.type for one in found.output} == {"function_call"}
            assert all(set(json.loads(one.arguments)) == {"a"} for one in found.output)


def test_the_client_s_parsed_output_is_input_again(tooled: Served) -> None:
    """The helper adds `parsed` and `parsed_arguments` to what it received."""
    add: Any = {**ADD, "strict": True}
    base: dict[str, Any] = {"model": tooled.model, "max_output_tokens": 300, "extra_body": {"seed": 5}}
    first = tooled.openai.responses.parse(
        input=INPUT, tools=[add], tool_choice="required", parallel_tool_calls=False, **base
    )
    [call] = first.output
    assert call.parsed_arguments  # type: ignore[union-attr]
    talk = [{"role": "user", "content": INPUT}, *(one.model_dump() for one in first.output)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5", "caller": None}  # type: ignore[union-attr]
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    second = tooled.openai.responses.parse(input=[*talk, result], text=form, **base)  # type: ignore[list-item]
    again = [*talk, result, *(one.model_dump() for one in second.output), {"role": "user", "content": "more"}]
    assert tooled.openai.responses.create(input=again, **base).status  # type: ignore[arg-type]


@pytest.mark.parametrize("name", IGNORED["responses"])
def test_an_ignored_field_changes_nothing(bundled: Served, name: str) -> None:
    assert ask(bundled, extra_body={name: "x"}).output_text == ask(bundled).output_text


@pytest.mark.parametrize("name", REJECTED["responses"])
def test_a_rejected_field_is_named_with_its_reason(bundled: Served, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=REJECTED["responses"][name].reason) as caught:
        ask(bundled, extra_body={name: {"no": "such value"}})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    for value in REJECTED["responses"][name].harmless:
        assert ask(bundled, extra_body={name: value}).output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
        ({"tools": [{"type": "web search"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"include": ["something.else"]}, "include"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"max_output_tokens": 0}, "max_"),
    ],
)
def test_a_wrong_value_names_its_field(bundled: Served, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(bundled, **fields)
    assert (caught.value.param or "").startswith(param)

"""Tools through OpenAI's client: calls that a grammar enforces, and messages that hold calls and results."""

from __future__ import annotations

import itertools
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.slow import slow_except
from tests.support.tooled_model import UNTOOLED, make_tooled_model
from tests.unit.gateway.conftest import Served, serve
from tests.unit.structured import schemas

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TALK = [{"role": "user", "content": "add 2 and 3"}]
SEEDED = {"max_tokens": 300, "temperature": 1.0, "seed": 5}
AT_A_TIME = 4


def ask(served: Served, **fields: Any) -> Any:
    return served.openai.chat.completions.create(**{"model": served.model, "messages": TALK, **SEEDED, **fields})


def check(arguments: str, tool: Any) -> None:
    schema = tool["function"].get("parameters") or {"type": "object", "maxProperties": 0}
    jsonschema.validate(json.loads(arguments), schema)


def test_a_named_function_is_called(tooled: Served) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    [answer] = ask(tooled, tools=[ADD, STOP], tool_choice=choice).choices
    [call] = answer.message.tool_calls
    assert (call.function.name, answer.finish_reason, answer.message.content) == ("add", "tool_calls", None)
    check(call.function.arguments, ADD)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_required_calls_validate(tooled: Served, is_streamed: bool) -> None:
    found = ask(tooled, tools=[ADD, STOP], tool_choice="required", stream=is_streamed, max_tokens=1000)
    calls: list[list[str]] = []
    finish = None
    if is_streamed:
        for chunk in found:
            [choice] = chunk.choices
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert part.index == len(calls)
                    calls.append([part.id, part.function.name, ""])
                calls[part.index][2] += part.function.arguments
    else:
        [choice] = found.choices
        finish = choice.finish_reason
        calls = [[one.id, one.function.name, one.function.arguments] for one in choice.message.tool_calls]
    assert finish == "tool_calls"
    assert len(calls) >= 1
    assert len({call_id for call_id, _, _ in calls}) == len(calls)
    for _, name, arguments in calls:
        check(arguments, {"add": ADD, "stop": STOP}[name])


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_streamed_call_begins_with_null_content(tooled: Served, logprobs: bool) -> None:
    def begins(**fields: Any) -> list[Any]:
        deltas = [
            chunk.choices[0].delta for chunk in ask(tooled, stream=True, logprobs=logprobs, max_tokens=12, **fields)
        ]
        assert [one.role for one in deltas] == ["assistant", *(None for _ in deltas[1:])]
        return [one.content for one in deltas if one.content is not None or one.role]

    assert begins(tools=[ADD], tool_choice="required") == [None]
    assert begins(tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}}) == [None]
    assert begins(response_format={"type": "json_object"})[0] == ""
    assert begins()[0] == ""
    if not logprobs:  # with logprobs, the first chunk may come before it is known whether the model calls
        assert begins(tools=[ADD])[0] == ""


UNTYPED: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"required": ["a"], "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}}},
    {"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "null"}]},
    {"type": ["null", "object"], "properties": {"a": {"type": "null"}}, "required": ["a"]},
]


SEEDS = 40  # The tokens of a seed depend on the processor, and a string may fill the whole answer.
MOST = 200  # tokens; most of these answers have 10 to 100


@pytest.mark.parametrize("parameters", UNTYPED)
def test_arguments_are_an_object_without_a_type_too(tooled: Served, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    fields: dict[str, Any] = {"tools": [tool], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answers = (
            ask(tooled, tool_choice=choice, seed=seed, max_tokens=MOST, **fields).choices[0] for seed in range(SEEDS)
        )
        whole = list(itertools.islice((one for one in answers if one.finish_reason != "length"), 2))
        assert len(whole) == 2
        for answer in whole:
            [call] = answer.message.tool_calls
            assert "a" in json.loads(call.function.arguments)
            check(call.function.arguments, tool)
    flat = {"type": "function", "name": "f", "parameters": parameters}
    given: Any = {"tools": [flat], "tool_choice": "required", "parallel_tool_calls": False, "model": tooled.model}
    given["max_output_tokens"] = MOST
    found = (
        tooled.openai.responses.create(input="add", extra_body={"seed": seed}, **given) for seed in range(5, SEEDS)
    )
    [item] = next(one for one in found if one.status == "completed").output
    assert "a" in json.loads(item.arguments)


RESULT = {
    "type": "object",
    "properties": {"total": {"type": "integer", "maximum": 99}},
    "required": ["total"],
    "additionalProperties": False,
}
TYPED = {"type": "json_schema", "json_schema": {"name": "result", "schema": RESULT}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_wins_over_a_schema(tooled: Served, choice: Any) -> None:
    [answer] = ask(tooled, tools=[ADD], tool_choice=choice, response_format=TYPED, max_tokens=1000).choices
    assert answer.message.content is None
    for call in answer.message.tool_calls:
        check(call.function.arguments, ADD)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_auto_with_a_schema_calls_or_answers_by_it(tooled: Served, is_streamed: bool) -> None:
    """A bias against the mark of a call makes the model answer."""
    mark = tooled.sdk.tokenize("<tool_call>")[0]
    marks = (mark, *tooled.sdk.tokenize("<"), *tooled.sdk.tokenize("<t"))
    kinds = set()
    for bias in (dict.fromkeys(map(str, marks), 100), dict.fromkeys(map(str, marks), -100)):
        for seed in range(3):
            found = ask(
                tooled,
                tools=[ADD, STOP],
                response_format=TYPED,
                logit_bias=bias,
                parallel_tool_calls=False,
                seed=seed,
                stream=is_streamed,
                max_tokens=1000,
            )
            if is_streamed:
                deltas = [one.choices[0].delta for one in found]
                content = "".join(one.content or "" for one in deltas)
                parts = [part for one in deltas for part in one.tool_calls or ()]
                names = [one.function.name for one in parts if one.id]
                values = "".join(one.function.arguments for one in parts if one.index == 0)
            else:
                message = found.choices[0].message
                content, calls = message.content or "", message.tool_calls or ()
                names = [one.function.name for one in calls]
                values = calls[0].function.arguments if calls else ""
            assert bool(content) != bool(names)
            if content:
                jsonschema.validate(json.loads(content), RESULT)
            else:
                check(values, {"add": ADD, "stop": STOP}[names[0]])
            kinds.add(bool(content))
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("form", "pattern"), [({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[ab]{3}/"}, "[ab]{3}/")]
)
def test_auto_with_a_choice_or_a_regex_calls_or_answers_by_it(tooled: Served, form: Any, pattern: str) -> None:
    firsts = [str(tooled.sdk.tokenize(text)[0]) for text in ("<tool_call>", "<", "<t")]
    for bias in (100, -100):
        fields: dict[str, Any] = {"extra_body": {"structured_outputs": form}, "logit_bias": dict.fromkeys(firsts, bias)}
        message = ask(tooled, tools=[ADD], max_tokens=1000, **fields).choices[0].message
        assert bool(message.tool_calls) == (bias > 0)
        for call in message.tool_calls or ():
            check(call.function.arguments, ADD)
        assert message.tool_calls or re.fullmatch(pattern, message.content)
    with pytest.raises(openai.BadRequestError, match="a JSON schema, a choice or a regex beside tools"):
        ask(tooled, tools=[ADD], extra_body={"structured_outputs": {"grammar": 'start: "a"'}})


def test_streamed_and_whole_calls_are_equal(tooled: Served) -> None:
    fields = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    [whole] = ask(tooled, **fields).choices[0].message.tool_calls
    with tooled.openai.chat.completions.stream(model=tooled.model, messages=TALK, **SEEDED, **fields) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (whole.function.name, whole.function.arguments)


def test_each_of_several_answers_has_its_calls(tooled: Served) -> None:
    found = ask(tooled, tools=[ADD], tool_choice="required", parallel_tool_calls=False, n=3)
    for choice in found.choices:
        [call] = choice.message.tool_calls
        check(call.function.arguments, ADD)


def test_auto_does_not_constrain_the_answer(tooled: Served) -> None:
    expected = tooled.sdk.generate(TALK, tools=[ADD], max_tokens=20, temperature=1.0, seed=5)
    [choice] = ask(tooled, tools=[ADD], max_tokens=20).choices
    assert (choice.message.content, choice.message.tool_calls) == (expected.text, None)
    chunks = ask(tooled, tools=[ADD], max_tokens=20, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected.text


def test_none_hides_the_tools(tooled: Served) -> None:
    expected = tooled.sdk.generate(TALK, max_tokens=20, temperature=1.0, seed=5)
    assert ask(tooled, tools=[ADD], tool_choice="none", max_tokens=20).choices[0].message.content == expected.text


def test_a_conversation_with_tool_results_continues(tooled: Served) -> None:
    """The answer's message is sent back as it came."""
    first = ask(tooled, tools=[ADD], tool_choice="required", parallel_tool_calls=False).choices[0].message
    [call] = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    found = ask(tooled, messages=[*TALK, first, result], tools=[ADD], max_tokens=8)
    talk = [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
        result,
    ]
    expected = tooled.sdk.generate(talk, tools=[ADD], max_tokens=8, temperature=1.0, seed=5)
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == len(tooled.sdk.tokenize(talk, tools=[ADD]))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_client_s_own_messages_are_sent_back(tooled: Served, is_streamed: bool) -> None:
    """OpenAI's helpers add `parsed`, `parsed_arguments` and, while streaming, `index` to what they received."""
    fields: Any = {"tools": [{**ADD, "function": {**ADD["function"], "strict": True}}], "tool_choice": "required"}
    base: Any = {"model": tooled.model, "parallel_tool_calls": False, **SEEDED}
    if is_streamed:
        with tooled.openai.chat.completions.stream(messages=TALK, **base, **fields) as stream:
            first = stream.get_final_completion().choices[0].message
    else:
        first = tooled.openai.chat.completions.parse(messages=TALK, **base, **fields).choices[0].message
    [call] = first.tool_calls or ()
    assert call.function.parsed_arguments
    sent = {**first.model_dump(), "annotations": [{"type": "url_citation"}], "provider_specific_fields": {}}
    result = {"role": "tool", "tool_call_id": call.id, "content": "5", "is_error": False}
    found = ask(tooled, messages=[*TALK, sent, result], tools=[ADD], max_tokens=8)
    bare = {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "type": "function"}]}
    bare["tool_calls"][0]["function"] = {"name": "add", "arguments": call.function.arguments}
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    again = ask(tooled, messages=[*TALK, bare, result], tools=[ADD], max_tokens=8)
    assert found.usage.prompt_tokens == again.usage.prompt_tokens


def test_a_stream_that_may_call_begins_without_text(tooled: Served) -> None:
    for fields, content in (({"tools": [ADD], "tool_choice": "required"}, None), ({}, "")):
        first = next(iter(ask(tooled, stream=True, **fields))).choices[0].delta
        assert (first.role, first.content) == ("assistant", content)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [ADD], "extra_body": {"structured_outputs": {"grammar": 'start: "a"'}}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        (
            {
                "tools": [ADD],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"x-guidance": {"lenient": True}}},
                },
            },
            "response_format",
        ),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "5", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
def test_wrong_tools_are_named(tooled: Served, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tooled, **fields)
    assert (caught.value.param or "").startswith(param)


def test_a_model_without_tools_in_its_template_rejects_them(tmp_path: Path) -> None:
    with serve(model=str(make_tooled_model(tmp_path, UNTOOLED, "untooled")), prefill=0) as untooled:
        for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
            with pytest.raises(openai.BadRequestError, match="this model's chat template takes no tools") as caught:
                ask(untooled, tools=[ADD], tool_choice=choice)
            assert caught.value.param == "tools"


#: The first example of OpenAI's guide to function calling, by chats and by responses.
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get current temperature for a given location.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia"}},
        "required": ["location"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION = "What is the weather like in Paris today?"
CALL_TOKENS, TEXT_TOKENS = 400, 40  # a call must end before its limit


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_the_first_example_of_a_tool_in_a_chat_works_with_the_bundled_model(bundled: Served, choice: Any) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    create = bundled.openai.chat.completions.create
    fields: Any = {"model": bundled.model, "tools": tools, "seed": 5}
    most = TEXT_TOKENS if choice == "auto" else CALL_TOKENS
    message = create(messages=messages, tool_choice=choice, max_tokens=most, **fields).choices[0].message
    if choice == "auto":  # it rarely calls, because it knows only Python
        assert message.content or message.tool_calls
    else:
        assert message.tool_calls
    messages.append(message)
    for call in message.tool_calls or ():
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert isinstance(json.loads(call.function.arguments)["location"], str)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 degrees"})
    answer = create(messages=messages, max_tokens=TEXT_TOKENS, **fields).choices[0].message
    assert answer.content or answer.tool_calls


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_first_example_of_a_tool_in_a_response_works_with_the_bundled_model(bundled: Served, choice: Any) -> None:
    tools: Any = [{"type": "function", **WEATHER}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {"model": bundled.model, "tools": tools, "extra_body": {"seed": 5}}
    most = TEXT_TOKENS if choice == "auto" else CALL_TOKENS
    first = bundled.openai.responses.create(input=items, tool_choice=choice, max_output_tokens=most, **fields)
    items += first.output
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls or choice == "auto"
    for call in calls:
        assert isinstance(json.loads(call.arguments)["location"], str)
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "14 degrees"})
    second = bundled.openai.responses.create(
        input=items, instructions="Answer by the result.", max_output_tokens=TEXT_TOKENS, **fields
    )
    assert second.output


def test_the_sdk_gives_the_bundled_model_tools(bundled: Served) -> None:
    """It sees the function's name and the result of a call. The SDK enforces a call by its own schema."""
    tools: Any = [{"type": "function", "function": WEATHER}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    done = bundled.sdk.generate(
        messages, tools=tools, json_schema=WEATHER["parameters"], seed=5, max_tokens=400, temperature=1.0
    )
    assert isinstance(json.loads(done.text)["location"], str)
    body = {"messages": messages, "tools": tools, "return_token_strs": True}
    status, text = bundled.post("/tokenize", body)
    assert status == 200
    assert "get_weather" in "".join(json.loads(text)["token_strs"])
    assert bundled.sdk.model().tool_format == "hermes"


def wrong_call(served: Served, number: int) -> str:
    """The error of a call of a random function; empty if it validates."""
    draw = random.Random(number)
    value, num_bytes = schemas.schema(draw)
    shared = value.pop("$defs")
    parameters = {
        "type": "object",
        "properties": {"value": value},
        "required": ["value"],
        "additionalProperties": False,
        "$defs": shared,
    }
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": f"f{number}"}}
    found = ask(
        served,
        tools=tools if draw.random() < 0.5 else [*tools, ADD],
        tool_choice=named if number % 2 else "required",
        parallel_tool_calls=False,
        max_tokens=num_bytes + 200,
        seed=number,
    ).choices[0]
    try:
        [call] = found.message.tool_calls
        check(call.function.arguments, ADD if call.function.name == "add" else tools[0])
    except Exception as error:  # Any exception counts as a wrong call.
        return f"call {number}: {type(error).__name__} {error}: {found}"
    return ""


@pytest.mark.parametrize("count", slow_except([16, 1000], 16))
@pytest.mark.timeout(3600)
def test_calls_of_random_functions_validate(tooled: Served, count: int) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        wrong = list(filter(None, threads.map(lambda number: wrong_call(tooled, number), range(count))))
    assert wrong == []

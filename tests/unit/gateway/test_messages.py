"""/v1/messages: texts, tools, thinking, events, errors, and every field of the request. The clients of Anthropic's API
run in tests/clients."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

import pytest

from pdserve.core.errors import KvLost
from pdserve.gateway.api.field_support import IGNORED, MODELS, REJECTED
from pdserve.gateway.api.response_models import CountAnswer, MessageAnswer, MessagesErrorAnswer
from tests.unit.client.conftest import Script, delta, finished, started
from tests.unit.client.conftest import script as script
from tests.unit.client.conftest import target as target
from tests.unit.gateway.conftest import Served, gateway, serve

USER = {"role": "user", "content": "add two numbers"}
BASE: Mapping[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "adds", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CHAT_ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}


def post(
    address: str,
    body: Mapping[str, Any],
    path: str = "/v1/messages",
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> tuple[int, Mapping[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=60.0)
    try:
        own = {"content-type": "application/json", "anthropic-version": "2023-06-01", **(headers or {})}
        connection.request(method, path, json.dumps(body), own)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    status, _, text = post(served.address, {"model": served.model, "messages": [USER], **BASE, **fields})
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    MessageAnswer.model_validate(found)
    return found


def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": served.model, "messages": [USER], **BASE, **fields, "stream": True}
    status, headers, text = post(served.address, body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), text
    return read_events(text)


def read_events(text: str) -> list[dict[str, Any]]:
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that the events add up to, as Anthropic's clients read them."""
    assert events[0]["type"] == "message_start"
    answer: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    is_open = False
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(answer["content"])
            answer["content"].append(event["content_block"])
            is_open = True
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == len(answer["content"]) - 1
            one, block = event["delta"], answer["content"][-1]
            if one["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + one["partial_json"]
            else:
                name = one["type"].removesuffix("_delta")
                block[name] += one[name]
        elif kind == "content_block_stop":
            is_open = False
        elif kind == "message_delta":
            answer |= event["delta"]
            answer["usage"] |= event["usage"]
    assert [one["type"] for one in events[-2:]] == ["message_delta", "message_stop"]
    for index, text in inputs.items():
        answer["content"][index]["input"] = json.loads(text or "{}")
    return answer


def without_id(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs in equal requests: ids, and what the earlier one left in the cache."""
    blocks = [{name: value for name, value in one.items() if name != "id"} for one in answer["content"]]
    return {
        "content": blocks,
        "stop": (answer["stop_reason"], answer["stop_sequence"]),
        "num_tokens": answer["usage"]["output_tokens"],
    }


def test_a_message_matches_the_sdks_chat(bundled: Served) -> None:
    expected = bundled.sdk.generate([USER], **BASE)
    found = ask(bundled)
    assert found["content"] == [{"type": "text", "text": expected.text}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", bundled.model)
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    used = found["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == expected.usage.prompt_tokens
    assert (used["output_tokens"], used["cache_creation_input_tokens"]) == (16, 0)
    events = events_of(bundled)
    kinds = [one["type"] for one in events]
    num_deltas = kinds.count("content_block_delta")
    deltas = ["content_block_delta"] * num_deltas
    assert kinds == [
        *("message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop")
    ]
    assert num_deltas > 0  # the tokens may all have come before the first message was written
    assert without_id(joined(events)) == without_id(found)


def test_an_answer_has_its_request_s_id(bundled: Served) -> None:
    body = {"model": bundled.model, "messages": [USER], **BASE, "request_id": "mine"}
    _, headers, text = post(bundled.address, body)
    assert (headers["request-id"], headers["x-request-id"], json.loads(text)["id"]) == ("mine", "mine", "msg_mine")


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"system": "Write Python."}, [{"role": "system", "content": "Write Python."}, USER]),
        (
            {
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
                    {"type": "text", "text": "Write", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "Python."},
                ]
            },
            [{"role": "system", "content": "Write\nPython."}, USER],
        ),
        ({"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]}, [USER]),
        (
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": one} for one in ("Write", "it.")]},
                    USER,
                ]
            },
            [{"role": "system", "content": "Write\nit."}, USER],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "user", "content": [{"type": "text", "text": "two"}]},
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                    {"role": "assistant", "content": "three"},
                    {"role": "assistant", "content": [{"type": "text", "text": "four"}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
                            {"type": "text", "text": "five"},
                        ],
                    },
                ]
            },
            [
                {"role": "user", "content": "one\ntwo"},
                {"role": "assistant", "content": "three\nfour"},
                {"role": "user", "content": "t\nd\nfive"},
            ],
        ),
    ],
)
def test_blocks_are_messages_of_a_chat(bundled: Served, given: Any, messages: Any) -> None:
    [block] = ask(bundled, **given)["content"]
    assert block["text"] == bundled.sdk.generate(messages, **BASE).text
    count = {"model": bundled.model, "messages": [USER], **given}
    status, _, text = post(bundled.address, count, "/v1/messages/count_tokens")
    CountAnswer.model_validate_json(text)
    assert (status, json.loads(text)) == (200, {"input_tokens": len(bundled.sdk.tokenize(messages))})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_required_calls_are_blocks(tooled: Served, choice: dict[str, str]) -> None:
    fields = {"tools": [ADD], "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 200}
    found = ask(tooled, **fields)
    [block] = found["content"]
    assert (block["type"], block["name"], set(block["input"]), found["stop_reason"]) == (
        *("tool_use", "add", {"a"}, "tool_use"),
    )
    assert without_id(joined(events_of(tooled, **fields))) == without_id(found)


def test_an_unfinished_call_has_the_arguments_so_far(tooled: Served) -> None:
    fields = {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = ask(tooled, **fields, max_tokens=200)
    inputs = []
    for most in range(1, whole["usage"]["output_tokens"]):
        found = ask(tooled, **fields, max_tokens=most)
        assert found["stop_reason"] == "max_tokens"
        inputs += [one["input"] for one in found["content"] if one["type"] == "tool_use"]
    assert {} in inputs
    assert all(one.keys() <= {"a"} for one in inputs)


def test_calls_and_results_come_back_as_blocks(tooled: Served) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 5}}
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "5"}],
            "is_error": False,
        },
        {"type": "text", "text": "and now?"},
    ]
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I add."}, call]},
        {"role": "user", "content": results},
    ]
    function = {"name": "add", "arguments": '{"a": 5}'}
    chat: list[dict[str, Any]] = [
        USER,
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "5"},
        {"role": "user", "content": "and now?"},
    ]
    expected = tooled.sdk.generate(chat, tools=[CHAT_ADD], **BASE)
    found = ask(tooled, messages=messages, tools=[ADD])
    assert "".join(one.get("text", "") for one in found["content"]) == expected.text


def test_a_tool_s_name_has_up_to_128_characters(tooled: Served) -> None:
    name = "mcp__" + "f" * 123
    fields = {"tools": [{**ADD, "name": name}], "tool_choice": {"type": "any"}, "max_tokens": 200}
    assert ask(tooled, **fields)["content"][0]["name"] == name


def test_a_stop_sequence_is_named(bundled: Served) -> None:
    text = ask(bundled, max_tokens=40)["content"][0]["text"]
    stop = text[4:7]
    for found in (
        ask(bundled, max_tokens=40, stop_sequences=[stop]),
        joined(events_of(bundled, max_tokens=40, stop_sequences=[stop])),
    ):
        assert found["content"][0]["text"] == text[: text.index(stop)]
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)


def test_a_schema_is_enforced(bundled: Served) -> None:
    found = ask(bundled, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=100)
    assert set(json.loads(found["content"][0]["text"])) == {"a"}
    assert found["stop_reason"] == "end_turn"


def test_more_tokens_than_the_server_s_limit_are_that_limit(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), finished())
    status, text = scripted(target, {"max_tokens": 64_000})
    assert status == 200, text
    assert script.requests[-1].sampling.max_tokens == 64


def test_no_tokens_fill_the_cache(bundled: Served) -> None:
    messages = [{"role": "user", "content": f"A text that no other test has. {'Again. ' * 30}"}]
    for found in (ask(bundled, messages=messages, max_tokens=0), joined(events_of(bundled, max_tokens=0))):
        assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert ask(bundled, messages=messages)["usage"]["cache_read_input_tokens"] > 0


def test_what_has_no_effect_is_named_in_a_header(tooled: Served) -> None:
    """As Claude Code sends it."""
    body = {
        "model": tooled.model,
        "messages": [USER],
        **BASE,
        "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{**ADD, "eager_input_streaming": True}, {"type": "web_search_20250305", "name": "web_search"}],
    }
    status, headers, text = post(tooled.address, body, "/v1/messages?beta=true")
    assert status == 200, text
    assert headers["x-pdserve-ignored"] == "tools.web_search_20250305, thinking.budget_tokens"


# --- thinking, with a scripted model ------------------------------------------------------------------------------


def scripted(target: str, body: Mapping[str, Any]) -> tuple[int, str]:
    with gateway(target) as host:
        status, _, text = post(host.address, {"model": "m", "max_tokens": 9, "messages": [USER], **body})
    return status, text


def test_a_failure_after_the_first_token_is_an_event(script: Script, target: str) -> None:
    script.fails(KvLost("a worker crashed"), started(), delta("a", 1))
    status, text = scripted(target, {"stream": True})
    *_, last = read_events(text)
    assert status == 200
    assert last == {"type": "error", "error": {"type": "api_error", "message": "a worker crashed"}}


@pytest.mark.parametrize(
    ("given", "effort"),
    [
        ({}, ""),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "max"),
    ],
)
def test_thinking_is_an_effort(script: Script, target: str, given: dict[str, Any], effort: str) -> None:
    script.says(started(), delta("a", 1), finished())
    status, text = scripted(target, given)
    assert status == 200, text
    assert script.requests[-1].chat.reasoning_effort == effort


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status", "kind", "place"),
    [
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "invalid_request_error", "messages[1].role"),
        ({"max_token": 3}, 400, "invalid_request_error", "did you mean max_tokens"),
        ({"temperature": 200}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            *(400, "invalid_request_error", "this server takes text only"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            *(400, "invalid_request_error", "messages[0].content[0].type: got a block tool_use of the role user"),
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        (
            {"tools": [{"type": "x_1"}, {"name": "f", "input_schema": {"type": "no"}}], "tool_choice": {"type": "any"}},
            *(400, "invalid_request_error", "tools"),
        ),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"output_config": {"effort": "huge"}}, 400, "invalid_request_error", "output_config.effort"),
        ({"container": "c"}, 400, "invalid_request_error", "container"),
        ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
    ],
)
def test_an_error_has_anthropic_s_form(tooled: Served, given: Any, status: int, kind: str, place: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and given.keys() & {"temperature", "stop_sequences", "max_tokens", "tools"}:
            continue  # which only the router or the SDK checks
        seen, _, text = post(tooled.address, {"model": tooled.model, "messages": [USER], **BASE, **given}, path)
        MessagesErrorAnswer.model_validate_json(text)
        error = json.loads(text)["error"]
        assert (seen, error["type"]) == (status, kind)
        assert place in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("PUT", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/", 307, None),
        ("POST", "/v1/messagesx", 404, None),
    ],
)
def test_other_methods_and_paths_have_the_form_of_their_beginning(
    bundled: Served, method: str, path: str, status: int, kind: str | None
) -> None:
    seen, _, text = post(bundled.address, {}, path, method=method)
    assert seen == status
    if kind is None:
        assert text == "" or "param" in json.loads(text)["error"]
    else:
        MessagesErrorAnswer.model_validate_json(text)
        assert json.loads(text)["error"]["type"] == kind


def test_threads_are_refused_as_clients_expect_it(tooled: Served) -> None:
    body = {"model": tooled.model, "messages": [USER], **BASE, "thread": {"type": "create"}}
    status, _, text = post(tooled.address, body)
    details = json.loads(text)["error"]["details"]
    assert (status, details["error_code"]) == (400, "thread_unsupported_request")


def test_either_header_gives_the_token() -> None:
    body = {"messages": [USER], "max_tokens": 4}
    with serve(token="secret") as served:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret", "x-api-key": "other"}, 200),
            ({"authorization": "Bearer", "x-api-key": "secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({"x-api-key": "é"}, 401),
            ({}, 401),
        ):
            seen, _, text = post(served.address, body, headers=headers)
            assert seen == status
            assert status == 200 or json.loads(text)["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "header",
    [
        "x-session-id",
        "x-claude-code-session-id",
        "session-id",
        "session_id",
        "x-session-affinity",
        "x-opencode-session",
    ],
)
def test_sessions_have_the_header_of_their_client(script: Script, target: str, header: str) -> None:
    script.says(started(), delta("a", 1), finished())
    with gateway(target) as host:
        status, _, text = post(host.address, {"messages": [USER], "max_tokens": 4}, headers={header: "s1"})
    assert status == 200, text
    assert script.requests[-1].session_id == "s1"


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, None),
        ({"cache_control": {"type": "ephemeral"}}, {}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, {}, 300.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, {"x-reuse-within-s": "0"}, 0.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "99y"}}, {}, None),
        ({"cache_control": {"ttl": ["5m"]}, "system": [{"type": "text", "text": "x", "cache_control": 7}]}, {}, None),
        (
            {
                "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
                "cache_control": {"type": "ephemeral", "ttl": "5m"},
            },
            {},
            3600.0,
        ),
    ],
)
def test_the_longest_ttl_is_a_hint(
    script: Script, target: str, fields: dict[str, Any], headers: dict[str, str], expected: float | None
) -> None:
    script.says(started(), delta("a", 1), finished())
    with gateway(target) as host:
        status, _, text = post(host.address, {"messages": [USER], "max_tokens": 4, **fields}, headers=headers)
    assert status == 200, text
    request = script.requests[-1]
    assert (request.reuse_within_s if request.HasField("reuse_within_s") else None) == expected


def test_a_ttl_may_be_of_a_block(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), finished())
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    with gateway(target) as host:
        status, _, text = post(host.address, {"messages": [{"role": "user", "content": [block]}], "max_tokens": 4})
    assert status == 200, text
    assert script.requests[-1].reuse_within_s == 3600.0


# --- fields -------------------------------------------------------------------------------------------------------

SUPPORTED: Mapping[str, dict[str, Any]] = {
    "model": {},
    "messages": {},
    "stream": {"stream": False},
    "max_tokens": {"max_tokens": 4},
    "system": {"system": "x"},
    "stop_sequences": {"stop_sequences": ["e"]},
    "tools": {"tools": [ADD]},
    "tool_choice": {"tools": [ADD], "tool_choice": {"type": "auto"}},
    "thinking": {"thinking": {"type": "disabled"}},
    "output_config": {"output_config": {"effort": "low"}},
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 2},
    "chat_template_kwargs": {"chat_template_kwargs": {"style": "x"}},
    "stop": {"stop": "e"},
    "seed": {"seed": 6},
    "cache_salt": {"cache_salt": "x"},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "logit_bias": {"logit_bias": {"40": 60}},
    "min_p": {"min_p": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "min_tokens": {"min_tokens": 4},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": [3]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "bad_words": {"bad_words": ["return"]},
    "allowed_token_ids": {"allowed_token_ids": [30, 40, 50]},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "priority": {"priority": 3},
    "request_id": {"request_id": "mine"},
}


@pytest.mark.parametrize("name", MODELS["messages"].model_fields)
def test_a_supported_field_is_accepted(tooled: Served, name: str) -> None:
    assert ask(tooled, **SUPPORTED[name])["usage"]["output_tokens"] >= 1


def test_fields_are_in_one_table() -> None:
    tables = (MODELS["messages"].model_fields, IGNORED["messages"], REJECTED["messages"])
    assert len(set().union(*tables)) == sum(map(len, tables))

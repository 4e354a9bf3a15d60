"""Calls in /v1/messages: arguments that are not JSON, and results of calls that failed. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.client.results import Choice, Completion, Model, Piece
from pdserve.core.errors import InvalidRequest
from pdserve.core.results import Timings, Usage
from pdserve.core.types import FinishReason
from pdserve.gateway.api import http_input
from pdserve.gateway.api.messages import MessagesWriter, messages_call
from pdserve.gateway.api.replies import Head
from tests.unit.gateway.test_messages import USER, joined, read_events, without_id

HERMES = Model(
    name="toy",
    max_context_tokens=512,
    max_new_tokens=64,
    vocab_size=256,
    eos_token_ids=(0,),
    has_chat_template=True,
    tool_format="hermes",
)


def writer(*, is_streamed: bool) -> MessagesWriter:
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"messages": [USER], "max_tokens": 64, "tools": tools, "stream": is_streamed}
    return MessagesWriter(Head(request_id="r", model="toy", created_s=0), messages_call(body, HERMES, {}), bytes)


def completion(text: str, reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> Completion:
    choice = Choice(index=0, text=text, token_ids=(), finish_reason=reason, stop=stop)
    used = Usage(prompt_tokens=1, completion_tokens=1, cached_prompt_tokens=0)
    return Completion(
        request_id="r",
        text=text,
        token_ids=(),
        finish_reason=reason,
        usage=used,
        timings=Timings(ttft_s=0.0, tpot_s=0.0, total_s=0.0),
        choices=(choice,),
        stop=stop,
    )


def called(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_control_characters_of_arguments_are_escaped(size: int) -> None:
    text = called('{"a":\n "x\ny\tz\\\n\x01\\"\n",\n "\n": "\\\\"}') + called('{"b": "\n"}')
    expected = [{"a": 'x\ny\tz\n\x01"\n', "\n": "\\"}, {"b": "\n"}]
    whole = writer(is_streamed=False).answer([completion(text)])
    assert [one["input"] for one in whole["content"]] == expected
    streaming = writer(is_streamed=True)
    pieces = [Piece(text=text[at : at + size], token_ids=()) for at in range(0, len(text), size)]
    frames = b"".join([*streaming.pieces(pieces, 1), *streaming.end([completion(text)])])
    assert without_id(joined(read_events(frames.decode()))) == without_id(whole)


@pytest.mark.parametrize("arguments", ['{"a": 1,}', "{'a': 1}", '{"a": "it\\\'s"}', "[1]", f'{{"a": {"1" * 301}}}'])
def test_a_call_without_json_is_text(arguments: str) -> None:
    text = {"type": "text", "text": f'{{"name": "add", "arguments": {arguments}}}'}
    found = writer(is_streamed=False).answer([completion(called(arguments))])
    assert (found["content"], found["stop_reason"]) == ([text], "end_turn")
    found = writer(is_streamed=False).answer([completion(called(arguments) + called('{"a": 1}'))])
    assert (found["content"][0], found["content"][1]["input"], found["stop_reason"]) == (text, {"a": 1}, "tool_use")


@pytest.mark.parametrize(("reason", "stop"), [(FinishReason.LENGTH, None), (FinishReason.STOP, "e")])
def test_only_the_last_call_of_a_cut_answer_may_be_incomplete(reason: FinishReason, stop: str | None) -> None:
    cut = called('{"a": 1, "b": "tw').removesuffix("}</tool_call>")
    found = writer(is_streamed=False).answer([completion(called('{"a": 1,}') + cut, reason, stop)])
    assert [one["type"] for one in found["content"]] == ["text", "tool_use"]
    assert found["content"][1]["input"] == {"a": 1, "b": "tw"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("no file", "Error: no file"),
        ("Error: no", "Error: no"),
        ([{"type": "text", "text": "x"}], "Error: x"),
        (None, "Error: "),
    ],
)
def test_the_result_of_a_failed_call_says_so(content: Any, text: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    [prompt] = messages_call({"messages": messages, "max_tokens": 4}, HERMES, {}).prompts
    assert prompt[-1]["content"] == text  # type: ignore[index]


def test_arguments_are_finite() -> None:
    call = b'{"type": "tool_use", "id": "t", "name": "add", "input": {"a": [1e999]}}'
    body = (
        b'{"max_tokens": 4, "messages": [{"role": "assistant", "content": [%b]}, {"role": "user", "content": ""}]}'
        % call
    )
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content\[0\]\.input: got a number that is not finite"):
        messages_call(http_input.parse(body), HERMES, {})

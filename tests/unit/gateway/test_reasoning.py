"""Reasoning between marks, which is separated from the answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from pdserve.gateway.tools.plan import ReasoningReader, TextReader
from pdserve.gateway.tools.readers import HermesReader
from pdserve.gateway.tools.reading import CallBegan, Event, Reasoning, Text, joined
from pdserve.text.chat import ChatTemplate, reasoning_format
from pdserve.v1 import inference_pb2
from tests.unit.client.conftest import Script, delta, finished, started
from tests.unit.client.conftest import target as target
from tests.unit.gateway.conftest import gateway

CASES: list[tuple[str, bool, list[Event]]] = [
    ("<think>\nlet me\nsee\n</think>\n\nfive", False, [Reasoning("let me\nsee"), Text("five")]),
    ("let me see</think>five", True, [Reasoning("let me see"), Text("five")]),
    ("five", False, [Text("five")]),
    (" \n five <think>", False, [Text(" \n five <think>")]),
    ("<think></think>five", False, [Text("five")]),
    ("<think>a < b </thin", False, [Reasoning("a < b </thin")]),
    ("<thi", False, [Text("<thi")]),
    ("<think>no end", False, [Reasoning("no end")]),
    ("no end", True, [Reasoning("no end")]),
    ("", True, []),
    ("<think>a</think> <think>b", False, [Reasoning("a"), Text("<think>b")]),
]


def read(pieces: list[str], is_open: bool, marks: tuple[str, str] = ("<think>", "</think>")) -> list[Event]:
    one = ReasoningReader(TextReader(), is_open=is_open, marks=marks)
    found = [event for piece in pieces for event in one.feed(piece)]
    return joined([*found, *one.end()])


@pytest.mark.parametrize(("text", "is_open", "events"), CASES)
def test_reasoning_is_read_the_same_at_every_split(text: str, is_open: bool, events: list[Event]) -> None:
    assert read([text], is_open) == read(list(text), is_open) == events
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert read([text[:first], text[first:second], text[second:]], is_open) == events


def test_mistral_s_marks_are_read_the_same_at_every_split() -> None:
    text, marks = "[THINK]a [THINK\nb[/THINK] [five]", ("[THINK]", "[/THINK]")
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert read(pieces, False, marks) == [Reasoning("a [THINK\nb"), Text("[five]")]


def test_calls_come_after_reasoning() -> None:
    one = ReasoningReader(HermesReader(), is_open=False)
    text = '<think>I call <tool_call></think><tool_call>{"name": "add"}</tool_call>'
    found = joined([*one.feed(text), *one.end()])
    assert found[:2] == [Reasoning("I call <tool_call>"), CallBegan("add")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", ""),
        ("{{ messages[0].content.split('</think>')[-1] }}<|assistant|>", "tagged"),
        ("{{ messages[0].content.split('</think>')[-1] }}<|assistant|><think>\n", "open"),
        ("{{ messages[0].content }}<|assistant|><think>\n", "open"),
        ("{{ messages[0].content }}{{ '<think>' if thinking }}", "tagged"),
        ("</think>{{ raise_exception('no') }}", "tagged"),
        ("{{ '[THINK]' + messages[0].content + '[/THINK]' }}", "mistral"),
        ("[INST]{{ messages[0].content }}[/INST][THINK]", "mistral"),
    ],
)
def test_the_template_shows_how_reasoning_is_marked(source: str, expected: str) -> None:
    assert reasoning_format(ChatTemplate(source)) == expected


class ThinkingScript(Script):
    reasoning_format = "tagged"
    tool_format = ""

    def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        found = super().GetModel(request, context)
        found.reasoning_format, found.tool_format = self.reasoning_format, self.tool_format
        return found


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


def think(script: Script) -> None:
    end = finished(
        reason=inference_pb2.FINISH_REASON_STOP, usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=3)
    )
    script.says(started(), delta("<think>hm", 1), delta("</thi", 2), delta("nk>\n\nfive", 3), end)


TALK: Any = [{"role": "user", "content": "2+3?"}]


def test_a_chat_returns_reasoning_separately(client: openai.OpenAI, script: Script) -> None:
    think(script)
    message = client.chat.completions.create(model="m", messages=TALK).choices[0].message
    assert (message.content, message.reasoning_content) == ("five", "hm")  # type: ignore[attr-defined]
    think(script)
    parts = [one.choices[0].delta for one in client.chat.completions.create(model="m", messages=TALK, stream=True)]
    assert "".join(one.content or "" for one in parts) == "five"
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in parts) == "hm"
    think(script)
    again: Any = [*TALK, message, *TALK]
    assert client.chat.completions.create(model="m", messages=again).choices[0].message.content == "five"
    sent = script.requests[-1].chat.messages
    assert [(one.content, one.reasoning_content) for one in sent] == [("2+3?", ""), ("five", "hm"), ("2+3?", "")]
    assert [one.HasField("reasoning_content") for one in sent] == [False, True, False]
    think(script)
    newer: Any = {"role": "assistant", "content": "five", "reasoning": "hm"}  # vLLM's name
    client.chat.completions.create(model="m", messages=[*TALK, newer, *TALK])
    assert script.requests[-1].chat.messages[1].reasoning_content == "hm"


def test_mistral_s_reasoning_is_between_special_tokens(client: openai.OpenAI, script: Script) -> None:
    script.reasoning_format = "mistral"  # type: ignore[attr-defined]
    end = finished(reason=inference_pb2.FINISH_REASON_STOP, usage=inference_pb2.Usage(completion_tokens=3))
    script.says(started(), delta("[THINK]hm", 1), delta("[/THINK]", 2), delta("five", 3), end)
    message = client.chat.completions.create(model="m", messages=TALK).choices[0].message
    assert (message.content, message.reasoning_content) == ("five", "hm")  # type: ignore[attr-defined]
    [request] = script.requests
    assert request.sampling.HasField("skip_special_tokens")
    assert not request.sampling.skip_special_tokens


def test_a_call_in_xml_comes_after_reasoning(client: openai.OpenAI, script: Script) -> None:
    script.tool_format = "qwen3_coder"  # type: ignore[attr-defined]
    end = finished(reason=inference_pb2.FINISH_REASON_STOP, usage=inference_pb2.Usage(completion_tokens=2))
    call = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
    script.says(started(), delta("<think>hm</think>\n\n" + call[:40], 1), delta(call[40:], 2), end)
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    [choice] = client.chat.completions.create(model="m", messages=TALK, tools=[tool]).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [found] = choice.message.tool_calls or ()
    assert (found.function.name, found.function.arguments) == ("add", '{"a": 2}')  # type: ignore[union-attr]


def test_reasoning_can_be_turned_off(client: openai.OpenAI, script: Script) -> None:
    """A template whose prompt ends with <think> then closes it in the prompt, so that the answer is only text."""
    script.reasoning_format = "open"  # type: ignore[attr-defined]
    end = finished(reason=inference_pb2.FINISH_REASON_STOP, usage=inference_pb2.Usage(completion_tokens=1))
    for switches, seen in (({"enable_thinking": False}, ("five", None)), ({}, ("", "five"))):
        script.says(started(), delta("five", 1), end)
        found = client.chat.completions.create(model="m", messages=TALK, extra_body={"chat_template_kwargs": switches})
        message = found.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == seen
    assert [one.chat.template_arguments for one in script.requests] == ['{"enable_thinking": false}', ""]


def test_a_response_has_an_item_of_reasoning(client: openai.OpenAI, script: Script) -> None:
    think(script)
    whole = client.responses.create(model="m", input="2+3?")
    assert [one.type for one in whole.output] == ["reasoning", "message"]
    assert whole.output_text == "five"
    think(script)
    events = list(client.responses.create(model="m", input="2+3?", stream=True))
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == "hm"
    assert events[-1].type == "response.completed"
    think(script)
    again: Any = [*TALK, *whole.output, *TALK]
    assert client.responses.create(model="m", input=again).output_text == "five"
    assert [one.content for one in script.requests[-1].chat.messages] == ["2+3?", "five", "2+3?"]

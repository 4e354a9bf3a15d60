"""What the router makes of a chat: token ids, how the prompt ends, and where stop strings apply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from pdserve.core.errors import InvalidRequest
from pdserve.core.types import MAX_CHAT_CALLS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOOLS_BYTES
from pdserve.text.chat import TemplateSources
from pdserve.text.tokenizer import HuggingFaceTokenizer
from pdserve.v1 import inference_pb2
from router.service.admission import Admission
from router.service.text.prompts import check_counts
from tests.unit.router_io.test_grammars import MODEL
from tests.unit.router_io.test_prompts import LIMITS
from tests.unit.text.conftest import byte_level

TEMPLATE = (
    "{% for m in messages %}{% if m.content is none %}null{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}<|end|>"
    "{% endfor %}{{ '<think>' if thinking else '</think>' }}{{ '' if tools else '' }}"
)


@pytest.fixture
async def admission(tmp_path: Path) -> AsyncIterator[Admission]:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<think>", "</think>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    one = Admission(HuggingFaceTokenizer(tmp_path), TemplateSources(TEMPLATE, None, {}), LIMITS)
    yield one
    await one.close()


def request(chat: dict[str, Any], **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(**chat), sampling=inference_pb2.SamplingParams(**sampling)
    )


def user(text: str) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role="user", content=text)


def called(arguments: str, **fields: Any) -> inference_pb2.ChatMessage:
    call = inference_pb2.ToolCall(id="c1", name="add", arguments=arguments)
    return inference_pb2.ChatMessage(role="assistant", tool_calls=[call], **fields)


async def prompt_of(admission: Admission, **chat: Any) -> str:
    prepared = await admission.prepare(request(chat), MODEL, None)
    return admission.tokenizer.decode(prepared.prompt_ids, has_special_tokens=True)


async def test_null_stays_null_and_calls_are_shown(admission: Admission) -> None:
    assert await prompt_of(admission, messages=[called('{"a":1}')]) == 'nulladd{"a":1}<|end|></think>'
    assert await prompt_of(admission, messages=[called("", content="")]) == "add{}<|end|></think>"
    old = inference_pb2.ChatMessage(role="user")  # an empty text, as clients of an earlier version send it
    assert await prompt_of(admission, messages=[old]) == "<|end|></think>"


@pytest.mark.parametrize(
    ("chat", "reasoning", "is_split"),
    [
        ({}, "closed", False),
        ({"reasoning_effort": "none"}, "closed", False),
        ({"reasoning_effort": "low"}, "open", True),
        ({"template_arguments": '{"thinking": true}'}, "open", True),
        ({"template_arguments": '{"thinking": false}', "reasoning_effort": "low"}, "closed", False),
    ],
)
async def test_the_prompt_of_each_request_decides(
    admission: Admission, chat: dict[str, Any], reasoning: str, is_split: bool
) -> None:
    prepared = await admission.prepare(request({"messages": [user("hi")], **chat}), MODEL, None)
    assert prepared.reasoning == reasoning
    assert (prepared.reasoning_split() is not None) == is_split
    whole = await admission.prepare(request({"messages": [user("hi")], **chat}, stop_in_reasoning=True), MODEL, None)
    assert whole.reasoning_split() is None


async def test_marks_that_are_special_tokens_are_known(tmp_path: Path) -> None:
    """They have no text by default. Then stop strings apply to the whole text, as its end cannot be found."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    one = Admission(HuggingFaceTokenizer(tmp_path), TemplateSources(TEMPLATE, None, {}), LIMITS)
    try:
        await one.load()
        assert one.reasoning_format == "special"
        chat = {"messages": [user("hi")], "reasoning_effort": "low"}
        for is_skipped in (True, False):
            prepared = await one.prepare(request(chat, skip_special_tokens=is_skipped), MODEL, None)
            assert (prepared.reasoning_split() is None) == is_skipped
    finally:
        await one.close()


async def test_names_of_control_tokens_are_text_unless_allowed(admission: Admission) -> None:
    end = admission.tokenizer.control_tokens("")["<|end|>"]
    for allowed, count in ((False, 1), (True, 2)):
        chat = {"messages": [user("a<|end|>b")], "allow_special_tokens": allowed}
        prepared = await admission.prepare(request(chat), MODEL, None)
        assert prepared.prompt_ids.count(end) == count
        ids = await admission.tokenize(inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(**chat)), MODEL)
        assert tuple(ids) == prepared.prompt_ids
        assert admission.tokenizer.decode(ids, has_special_tokens=True) == "a<|end|>b<|end|></think>"
    text = await admission.prepare(inference_pb2.GenerateRequest(text="a<|end|>b"), MODEL, None)
    assert end in text.prompt_ids


async def test_an_unknown_effort_is_rejected(admission: Admission) -> None:
    with pytest.raises(InvalidRequest, match="none, minimal, low"):
        await admission.prepare(request({"messages": [user("hi")], "reasoning_effort": "much"}), MODEL, None)


# --- token counts of chats ------------------------------------------------------------------------------------
# The counts of a chat are limited in calls over gRPC as they are over HTTP, before anything is converted.

CALL = inference_pb2.ToolCall()


def chat(messages: int, calls: int = 0, tools: int = 0, text: str = "{}") -> inference_pb2.ChatPrompt:
    message = inference_pb2.ChatMessage(tool_calls=[CALL] * calls)
    return inference_pb2.ChatPrompt(messages=[message] * messages, tools=[text] * tools)


@pytest.mark.parametrize(
    ("inside", "outside", "field"),
    [
        (chat(MAX_MESSAGES), chat(MAX_MESSAGES + 1), "chat.messages"),
        (chat(1, MAX_TOOL_CALLS), chat(1, MAX_TOOL_CALLS + 1), "chat.messages[0].tool_calls"),
        (chat(MAX_CHAT_CALLS // 64, 64), chat(MAX_CHAT_CALLS // 64 + 1, 64), "chat.messages"),
        (chat(1, 0, MAX_TOOLS), chat(1, 0, MAX_TOOLS + 1), "tools"),
        (chat(1, 0, 2, "x" * (MAX_TOOLS_BYTES // 2)), chat(1, 0, 2, "x" * (MAX_TOOLS_BYTES // 2 + 1)), "tools"),
    ],
    ids=["messages", "calls", "all calls", "tools", "characters"],
)
def test_a_count_is_limited(inside: inference_pb2.ChatPrompt, outside: inference_pb2.ChatPrompt, field: str) -> None:
    check_counts(inside)
    with pytest.raises(InvalidRequest, match="at most") as caught:
        check_counts(outside)
    assert caught.value.field == field

"""The counts of a chat are limited in calls over gRPC as they are over HTTP, before anything is converted."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.types import MAX_CHAT_CALLS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOOLS_BYTES
from pdserve.v1 import inference_pb2
from router.service.prompts import check_counts

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

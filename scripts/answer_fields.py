"""For every field of OpenAI's answers, when the gateway fills it, or why it never does.

A field that is not filled is null or absent. `choices.message.role` is the role in the message of each choice. The
reference of HTTP shows the tables, and tests/unit/gateway/test_response_fields.py compares them with what OpenAI's
client receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

#: chunk: of a streamed chat. text: whole or streamed. response: of /v1/responses.
AnswerKind = Literal["chat", "chunk", "text", "response"]

_ALWAYS: Final = "always"
_SCORED: Final = "with `logprobs`"
_CALLED: Final = "if the model calls a tool"
_STREAMED_USAGE: Final = "with `stream_options.include_usage`"


def _under(path: str, when: str, *names: str) -> dict[str, str]:
    """A field and its parts."""
    return {path: when, **{f"{path}.{name}": when for name in names}}


_HEAD: Final = dict.fromkeys(("id", "object", "created", "model", "choices", "choices.index"), _ALWAYS)
_TOKEN: Final = ("token", "bytes", "logprob")
_CHAT_LOGPROBS: Final = {
    **_under("choices.logprobs", _SCORED, "content"),
    **{f"choices.logprobs.content.{name}": _SCORED for name in _TOKEN},
    **_under("choices.logprobs.content.top_logprobs", "with `top_logprobs`", *_TOKEN),
}
_CALL: Final = ("id", "type", "function", "function.name", "function.arguments")
_USAGE: Final = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
_CACHED: Final = "prompt_tokens_details.cached_tokens"

FILLED: Final[Mapping[AnswerKind, Mapping[str, str]]] = {
    "chat": {
        **_HEAD,
        "choices.finish_reason": _ALWAYS,
        **_under("choices.message", _ALWAYS, "role"),
        "choices.message.content": "if there is text",
        **_under("choices.message.tool_calls", _CALLED, *_CALL),
        **_CHAT_LOGPROBS,
        **_under("usage", _ALWAYS, *_USAGE, _CACHED),
    },
    "chunk": {
        **_HEAD,
        "choices.finish_reason": "in the last chunk of a choice",
        "choices.delta": _ALWAYS,
        "choices.delta.role": "in the first chunk of a choice",
        "choices.delta.content": "if there is text",
        **_under("choices.delta.tool_calls", _CALLED, "index", *_CALL),
        **_CHAT_LOGPROBS,
        **_under("usage", _STREAMED_USAGE, *_USAGE, _CACHED),
        "obfuscation": "with `stream_options.include_obfuscation`",
    },
    "text": {
        **_HEAD,
        "choices.text": _ALWAYS,
        "choices.finish_reason": "in a whole answer, and in the last chunk of a choice",
        **_under("choices.logprobs", _SCORED, "tokens", "token_logprobs", "top_logprobs", "text_offset"),
        **_under("usage", f"in a whole answer, and {_STREAMED_USAGE}", *_USAGE, _CACHED),
    },
    "response": {
        **dict.fromkeys(("id", "object", "created_at", "model", "status"), _ALWAYS),
        "output": "items of the types `message`, `function_call` and `reasoning`",
        **_under("incomplete_details", "if a limit of tokens ended the answer", "reason"),
        **_under("error", "in `response.failed`", "code", "message"),
        **_under("usage", "at the end", "input_tokens", "output_tokens", "total_tokens"),
        **_under("usage.input_tokens_details", "at the end", "cached_tokens", "cache_write_tokens"),
        **_under("usage.output_tokens_details", "at the end", "reasoning_tokens"),
        **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p"), "if the request has it"),
        "top_logprobs": "if the request has it",
        **dict.fromkeys(("metadata", "parallel_tool_calls", "text", "tool_choice", "tools", "truncation"), _ALWAYS),
    },
}

_NO_TIERS: Final = "there are no tiers"
_NO_MODERATION: Final = "answers are not moderated"
_TEXT_ONLY: Final = "answers are text"
_NOT_STORED: Final = "nothing is stored"
_UNREFUSED: Final = "a refusal is text of the model"
_USAGE_EMPTY: Final = {
    "usage.completion_tokens_details": "tokens of reasoning are not counted separately",
    "usage.prompt_tokens_details.audio_tokens": "prompts are text",
    "usage.prompt_tokens_details.image_tokens": "prompts are text",
    "usage.prompt_tokens_details.text_tokens": "prompts are text: all of `prompt_tokens`",
    "usage.prompt_tokens_details.cache_write_tokens": "every prompt is cached while memory allows",
}
_COMMON_EMPTY: Final = {"system_fingerprint": "the id of a model is its name", **_USAGE_EMPTY}
_CHAT_EMPTY: Final = {
    **_COMMON_EMPTY,
    "service_tier": _NO_TIERS,
    "moderation": _NO_MODERATION,
    "choices.logprobs.refusal": _UNREFUSED,
}

EMPTY: Final[Mapping[AnswerKind, Mapping[str, str]]] = {
    "chat": {
        **_CHAT_EMPTY,
        "metadata": _NOT_STORED,
        "choices.message.refusal": _UNREFUSED,
        "choices.message.annotations": "there is no web search",
        "choices.message.audio": _TEXT_ONLY,
        "choices.message.function_call": "replaced by `tool_calls` in OpenAI's API",
        "choices.message.tool_calls.custom": "tools are functions",
    },
    "chunk": {
        **_CHAT_EMPTY,
        "choices.delta.refusal": _UNREFUSED,
        "choices.delta.audio": _TEXT_ONLY,
        "choices.delta.function_call": "replaced by `tool_calls` in OpenAI's API",
    },
    "text": _COMMON_EMPTY,
    "response": {
        "access_programs": "of OpenAI's accounts",
        "background": "an answer comes at once",
        "completed_at": "`created_at` and the end of the stream show it",
        "conversation": _NOT_STORED,
        **{f"error.{name}": "`code` and `message` contain it" for name in ("misalignment", "param", "type")},
        "image": _TEXT_ONLY,
        "input_transformations": "the input is used as it is",
        "max_tool_calls": "of OpenAI's own tools",
        "moderation": _NO_MODERATION,
        "previous_response_id": _NOT_STORED,
        "prompt": _NOT_STORED,
        "prompt_cache_diagnostics": "the usage has the number of cached tokens",
        "prompt_cache_key": "prefixes are found by their content",
        "prompt_cache_options": "prefixes are found by their content",
        "prompt_cache_retention": "cached prefixes stay while memory allows",
        "reasoning": "the chat template has no such switch",
        "safety_identifier": _NOT_STORED,
        "service_tier": _NO_TIERS,
        "tool_usage": "of OpenAI's own tools",
        "usage.input_tokens_details.cache_write_tokens_details": "every prompt is cached while memory allows",
        "user": "the caller's own label",
    },
}

_STOP_REASON: Final = {"choices.stop_reason": "vLLM's: the stop string or stop token that ended the answer"}
_TOKEN_IDS: Final = {"choices.token_ids": "with `return_token_ids`"}
#: Fields that OpenAI does not have.
ADDED: Final[Mapping[AnswerKind, Mapping[str, str]]] = {
    "chat": {
        **_STOP_REASON,
        **_TOKEN_IDS,
        "choices.message.reasoning_content": "reasoning, apart from the text",
        "prompt_logprobs": "with `prompt_logprobs`",
    },
    "chunk": {**_STOP_REASON, **_TOKEN_IDS, "choices.delta.reasoning_content": "reasoning, apart from the text"},
    "text": {**_STOP_REASON, **_TOKEN_IDS, "choices.prompt_logprobs": "with `prompt_logprobs`"},
    "response": {"store": "false: nothing is stored"},
}

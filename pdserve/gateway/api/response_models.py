"""The bodies of answers: pydantic models for the OpenAPI document. Pure.

The writers build answers as plain objects, because a model for each chunk of a stream would cost more than its text.
Tests compare their answers with these models. A field that is not named here may come beside them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "abort"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


class CachedTokens(Answer):
    cached_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None


class TokenScore(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentScore(TokenScore):
    top_logprobs: list[TokenScore]


class ChatScores(Answer):
    content: list[ContentScore] | None


class CalledFunctionAnswer(Answer):
    name: str
    arguments: str


class CallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CallAnswer] | None = None
    reasoning_content: str | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatScores | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class PromptTokenScore(Answer):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptScores = list[dict[str, PromptTokenScore] | None]


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptScores | None = None


class TextScores(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextScores | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptScores | None = None


class TextAnswer(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageAnswer


class OutputItem(Answer):
    """A message, a call of a function, or reasoning."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(Answer):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


class ContentBlock(Answer):
    """A text, a call of a function, or thinking."""

    type: Literal["text", "tool_use", "thinking"]


class MessageUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(Answer):
    input_tokens: int


class MessagesErrorDetail(Answer):
    type: str
    message: str


class MessagesErrorAnswer(Answer):
    type: Literal["error"]
    error: MessagesErrorDetail


class ModelAnswer(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_model_len: int


class ModelsAnswer(Answer):
    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: Literal[False]
    first_id: str
    last_id: str


class CachedPrefixAnswer(Answer):
    worker_id: str
    tokens: int


class ConversationAnswer(Answer):
    turns: int
    running: int
    prompt_tokens: int
    growth_tokens: float
    used_at_s: float
    until_s: float | None
    is_over: bool
    is_cached_known: bool
    cached: list[CachedPrefixAnswer]


class TaskAnswer(Answer):
    state: str
    began_at_s: float
    due_at_s: float
    turns: int
    turns_left: float | None
    ttft_s: float
    tpot_s: float


class SessionAnswer(Answer):
    object: Literal["session"]
    session_id: str
    tenant: str
    is_named: bool
    turns: int
    began_at_s: float
    used_at_s: float
    conversations: list[ConversationAnswer]
    cursor: int
    task: TaskAnswer | None
    router_id: str


class SessionsAnswer(Answer):
    object: Literal["list"]
    data: list[SessionAnswer]
    has_more: bool
    is_partial: bool


class SessionEndedAnswer(Answer):
    object: Literal["session"]
    session_id: str
    is_over: Literal[True]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    prompt: str


class HealthAnswer(Answer):
    status: Literal["ok", "unavailable"]


class VersionAnswer(Answer):
    version: str


class LoadAnswer(Answer):
    server_load: int

"""Converts a prompt (text, chat messages or token ids) to the token ids of a request.

A prompt that cannot fit is rejected by its size, before it is tokenized. If it will be truncated, only its tail is
tokenized; pdserve/text/text_bounds.py has the bound, and explains why the tail has the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from pdserve.core.errors import ContextLengthExceeded, InvalidRequest
from pdserve.core.types import (
    MAX_CHAT_CALLS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    require_at_most,
)
from pdserve.text.chat import TemplateSources
from pdserve.text.chat_encoder import EncodedChat
from pdserve.text.stops import ReasoningState
from pdserve.text.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2
from router.service.model import ModelFacts
from router.service.text.fair_queue import ANONYMOUS, ClientKey
from router.service.text.tokenizing import GivenChat, TextChildren, TokenizerThreads

_NO_TEMPLATE: Final = (
    "text or token_ids (over HTTP: /v1/completions), because this model has no chat template; "
    "chat_template.jinja in its folder would be one"
)
# Shorter texts are tokenized on the event loop. Most take less time than a thread's start and end, and the slowest take
# 2 ms, because only tokenizers whose time is in proportion to the text encode in this process.
QUICK_CHARS: Final = 2048
MAX_CHARS_WITHOUT_MODEL: Final = 65_536  # limit of Tokenize before the first worker has reported its context length


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    reasoning: ReasoningState = ReasoningState.UNMARKED  # of a chat


@final
class PromptReader:
    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: TemplateSources | None,
        threads: TokenizerThreads,
        children: TextChildren,
    ) -> None:
        self._tokenizer = tokenizer
        self._has_template = templates is not None
        self._threads = threads
        self._children = children

    async def read(
        self,
        request: inference_pb2.GenerateRequest,
        model: ModelFacts,
        client: ClientKey = ANONYMOUS,
        salt: bytes | None = None,
    ) -> Prompt:
        """`salt` is that of the prompt's block hashes. Raises InvalidRequest with the field and its limit, and
        Overloaded if too many texts wait for a thread."""
        keep = _truncation(request, model)
        kind = request.WhichOneof("prompt")
        num_bytes = request.ByteSize()
        reasoning = ReasoningState.UNMARKED
        if kind == "token_ids":
            given = request.token_ids.ids
            if keep is None:
                _check_tokens(len(given), model)
            ids = list(given[-keep:] if keep else given)
        elif kind == "text":
            ids = await self._text(request.text, keep, model, num_bytes, client, salt=salt)
        elif kind == "chat":
            chat = await self._chat(request.chat, keep, model, num_bytes, client, salt=salt)
            ids, reasoning = chat.token_ids, chat.reasoning
        else:
            raise InvalidRequest("prompt", "nothing", "text, token_ids or chat")
        if not ids:
            raise InvalidRequest("prompt", "an empty prompt", "at least one token")
        # Also checked for text: a tokenizer may have tokens that the model lacks.
        if max(ids) >= model.vocab_size:
            raise InvalidRequest(kind, f"token id {max(ids)}", f"ids below {model.vocab_size}")
        _check_tokens(len(ids), model)
        return Prompt(tuple(ids), reasoning)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, model: ModelFacts | None, client: ClientKey = ANONYMOUS
    ) -> list[int]:
        """Tokenizes a text. The limit is a prompt's number of characters, not of tokens."""
        kind = request.WhichOneof("prompt")
        has_special = request.add_special_tokens if request.HasField("add_special_tokens") else kind == "text"
        begins_answer = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        if kind == "text":
            size = request.ByteSize()
            return await self._text(request.text, None, model, size, client, has_special_tokens=has_special)
        if kind == "chat":
            chat = await self._chat(
                request.chat,
                None,
                model,
                request.ByteSize(),
                client,
                has_special_tokens=has_special,
                add_generation_prompt=begins_answer,
            )
            return chat.token_ids
        raise InvalidRequest("prompt", "nothing", "text or chat")

    async def _text(
        self,
        text: str,
        keep: int | None,
        model: ModelFacts | None,
        num_bytes: int,
        client: ClientKey,
        *,
        has_special_tokens: bool = True,
        salt: bytes | None = None,
    ) -> list[int]:
        if not text:
            raise InvalidRequest("prompt", "an empty text", "at least one character")
        if keep is None:
            self._check_chars(len(text), model)
        if not self._tokenizer.is_linear:
            return await self._children.encode_text(
                text, keep, num_bytes, client, has_special_tokens=has_special_tokens
            )

        def work() -> list[int]:
            if keep is not None:
                return self._tokenizer.encode_tail(text, keep)
            return self._tokenizer.encode(text, has_special_tokens=has_special_tokens, salt=salt)

        if len(text) <= QUICK_CHARS:
            return work()
        return await self._threads.run(len(text), num_bytes, work, client)

    async def _chat(
        self,
        chat: inference_pb2.ChatPrompt,
        keep: int | None,
        model: ModelFacts | None,
        num_bytes: int,
        client: ClientKey,
        *,
        has_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        salt: bytes | None = None,
    ) -> EncodedChat:
        if not self._has_template:
            raise InvalidRequest("chat", "messages", _NO_TEMPLATE)
        check_counts(chat)
        given = GivenChat(chat, has_special_tokens, add_generation_prompt)
        if not self._tokenizer.is_linear:
            most = None if keep is not None else self._max_chars(model)
            found = await self._children.encode_chat(given, keep, most, num_bytes, client)
            if isinstance(found, EncodedChat):
                return found
            self._check_chars(found, model)
            raise AssertionError("a text was too long for one process, and not for another")
        rendered = await self._children.render(given, num_bytes, client)

        def work() -> EncodedChat:
            # The size is checked after rendering, because a template may omit content.
            return self._children.tokens.encode(
                rendered,
                keep,
                lambda num_chars: self._check_chars(num_chars, model),
                allows_special_tokens=chat.allow_special_tokens,
                has_special_tokens=has_special_tokens,
                salt=salt,
            )

        if len(rendered.marked) <= QUICK_CHARS:
            return work()
        return await self._threads.run(len(rendered.marked), num_bytes, work, client)

    def _max_chars(self, model: ModelFacts | None) -> int | None:
        return MAX_CHARS_WITHOUT_MODEL if model is None else self._tokenizer.bounds.max_chars(model.max_prompt_tokens)

    def _check_chars(self, num_chars: int, model: ModelFacts | None) -> None:
        if model is None:
            if num_chars > MAX_CHARS_WITHOUT_MODEL:
                most = f"at most {MAX_CHARS_WITHOUT_MODEL} characters until the first worker has started"
                raise InvalidRequest("prompt", f"{num_chars} characters", most)
            return
        max_chars = self._max_chars(model)
        if max_chars is not None and num_chars > max_chars:
            raise _too_long(f"{num_chars} characters", f"{max_chars} characters", model)


def check_counts(chat: inference_pb2.ChatPrompt) -> None:
    """Before anything is converted. Raises InvalidRequest."""
    require_at_most("chat.messages", "messages", len(chat.messages), MAX_MESSAGES)
    require_at_most("tools", "tools", len(chat.tools), MAX_TOOLS)
    require_at_most("tools", "characters", sum(map(len, chat.tools)), MAX_TOOLS_BYTES)
    num_calls = 0
    for index, message in enumerate(chat.messages):
        count = len(message.tool_calls)
        require_at_most(f"chat.messages[{index}].tool_calls", "calls", count, MAX_TOOL_CALLS)
        num_calls += count
    require_at_most("chat.messages", "tool calls", num_calls, MAX_CHAT_CALLS)


def _check_tokens(num_tokens: int, model: ModelFacts) -> None:
    if num_tokens > model.max_prompt_tokens:
        raise _too_long(f"{num_tokens} tokens", f"{model.max_prompt_tokens} tokens", model)


def _too_long(seen: str, most: str, model: ModelFacts) -> ContextLengthExceeded:
    # Some clients do not read the code. litellm and langchain-openai recognize the error by "prompt is too long", older
    # ones by "this model's maximum context length is".
    return ContextLengthExceeded(
        "prompt",
        seen,
        f"at most {most}; the prompt is too long, because this model's maximum context length is "
        f"{model.max_context_tokens} tokens; truncate_prompt_tokens keeps the last ones",
    )


def _truncation(request: inference_pb2.GenerateRequest, model: ModelFacts) -> int | None:
    if not request.HasField("truncate_prompt_tokens"):
        return None
    count = request.truncate_prompt_tokens
    if not 1 <= count <= model.max_prompt_tokens:
        raise InvalidRequest("truncate_prompt_tokens", count, f"between 1 and {model.max_prompt_tokens}")
    return int(count)

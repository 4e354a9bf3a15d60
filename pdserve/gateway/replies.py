"""Answers in OpenAI's form: whole, or as the chunks of a stream. Pure.

A writer belongs to one request. It receives the SDK's pieces with the number of their answer over all prompts, and at
the end one completion for each prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from pdserve.client.results import Choice, Completion, Piece, TokenLogprob
from pdserve.core.results import Usage
from pdserve.core.types import FinishReason
from pdserve.gateway import logprobs, sse
from pdserve.gateway.errors import ErrorReply
from pdserve.gateway.logprobs import BytesOf
from pdserve.gateway.sdk_call import SdkCall
from pdserve.gateway.tools.answer_tools import AnswerTools, message


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that each chunk of an answer repeats."""

    request_id: str
    model: str
    created_s: int
    eos_token_ids: tuple[int, ...] = ()


class Writer(ABC):
    """`bytes_of` has an entry for every token whose logprob is written."""

    @abstractmethod
    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> bytes:
        """The frames of some pieces; may be empty, because a piece may have no text yet."""

    @abstractmethod
    def end(self, completions: Sequence[Completion]) -> bytes:
        """The frames after the last piece."""

    @abstractmethod
    def error(self, reply: ErrorReply) -> bytes:
        """The last frame of a stream that failed."""


class ReplyWriter(Writer):
    """Chats and texts."""

    prefix: ClassVar[str]  # of the answer's id
    whole: ClassVar[str]  # `object` of a whole answer
    part: ClassVar[str]  # of a chunk

    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        self._head, self._bytes_of = head, bytes_of
        self._shown, self._answers_each, self._plan = call.shown, call.answers_each, call.tools
        self._frame = sse.padded_frame if call.shown.is_padded else sse.frame
        self._tokens: dict[int, int] = {}  # streamed so far, by answer

    # --- a whole answer

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        reply = self._base(self.whole)
        reply["choices"] = [
            self._choice(choice, self._index(prompt, choice.index))
            for prompt, completion in enumerate(completions)
            for choice in completion.choices
        ]
        reply["usage"] = usage(completions)
        if any(one.prompt_logprobs for one in completions):
            self._add_prompt_logprobs(reply, completions)
        return reply

    # --- a stream

    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> bytes:
        return b"".join(self._piece(one, prompt_tokens) for one in pieces)

    def error(self, reply: ErrorReply) -> bytes:
        """No [DONE] follows: the answer is not complete."""
        return sse.frame(reply.body)

    def end(self, completions: Sequence[Completion]) -> bytes:
        frames: list[bytes] = []
        for prompt, completion in enumerate(completions):
            for choice in completion.choices:
                index = self._index(prompt, choice.index)
                frames += [
                    self._chunk({"index": index, **last}, completion.usage.prompt_tokens)
                    for last in self._last(choice, index)
                ]
        if self._shown.has_usage:
            frames.append(self._frame({**self._base(self.part), "choices": [], "usage": usage(completions)}))
        return b"".join([*frames, sse.DONE])

    # ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _choice(self, choice: Choice, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _parts(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of a piece's chunks, without their index."""

    @abstractmethod
    def _last(self, choice: Choice, index: int) -> list[dict[str, Any]]:
        """The choices of an answer's last chunks, without their index."""

    @abstractmethod
    def _add_prompt_logprobs(self, reply: dict[str, Any], completions: Sequence[Completion]) -> None: ...

    def _piece(self, piece: Piece, prompt_tokens: int) -> bytes:
        self._tokens[piece.index] = self._tokens.get(piece.index, 0) + len(piece.token_ids)
        if not (piece.text or piece.logprobs or self._shown.has_token_ids):
            return b""
        parts = self._parts(piece)
        if parts and self._shown.has_token_ids:
            parts[0]["token_ids"] = list(piece.token_ids)
        chunks = [{"index": piece.index, **part, "finish_reason": None} for part in parts]
        return b"".join(self._chunk(one, prompt_tokens) for one in chunks)

    def _chunk(self, choice: dict[str, Any], prompt_tokens: int) -> bytes:
        chunk = {**self._base(self.part), "choices": [choice]}
        if self._shown.has_running_usage:
            chunk["usage"] = _usage(prompt_tokens, self._tokens.get(choice["index"], 0), None)
        elif self._shown.has_usage:
            chunk["usage"] = None
        return self._frame(chunk)

    def _base(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{self.prefix}-{head.request_id}",
            "object": kind,
            "created": head.created_s,
            "model": head.model,
        }

    def _index(self, prompt: int, index: int) -> int:
        return prompt * self._answers_each + index

    def _ended(self, choice: Choice) -> dict[str, Any]:
        """`stop_reason` is vLLM's: the stop string or token; null for the end of sequence."""
        token_id = choice.stop_token_id
        is_asked = token_id is not None and token_id not in self._head.eos_token_ids
        return {
            "finish_reason": choice.finish_reason.value,
            "stop_reason": choice.stop if choice.stop is not None else token_id if is_asked else None,
        }

    def _with_ids(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": list(choice.token_ids)} if self._shown.has_token_ids else {}


@final
class ChatWriter(ReplyWriter):
    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        super().__init__(head, call, bytes_of)
        self._tools: dict[int, AnswerTools] = {}  # by answer, while streaming

    def _choice(self, choice: Choice, index: int) -> dict[str, Any]:
        found = {"role": "assistant", "content": choice.text, "refusal": None}
        num_calls = 0
        if self._plan is not None:
            tools = AnswerTools(self._plan)
            found = message([*tools.feed(choice.text), *tools.end()])
            num_calls = tools.num_calls
        return {
            "index": index,
            "message": found,
            "logprobs": self._logprobs(choice.logprobs),
            **self._ended_with(choice, num_calls),
            **self._with_ids(choice),
        }

    def _piece(self, piece: Piece, prompt_tokens: int) -> bytes:
        is_first = piece.index not in self._tokens
        rest = super()._piece(piece, prompt_tokens)
        return self._role(piece.index, prompt_tokens) + rest if is_first else rest

    def _role(self, index: int, prompt_tokens: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, prompt_tokens)

    def _parts(self, piece: Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"content": piece.text}]
        if self._plan is not None:
            deltas = self._tools_of(piece.index).feed(piece.text)
        if not deltas and (piece.logprobs or self._shown.has_token_ids):
            deltas = [{}]
        # A piece has logprobs for its tokens, so only one of its chunks contains them.
        scores = [self._logprobs(piece.logprobs), *(None for _ in deltas[1:])]
        return [{"delta": delta, "logprobs": score} for delta, score in zip(deltas, scores, strict=False)]

    def _last(self, choice: Choice, index: int) -> list[dict[str, Any]]:
        tools = None if self._plan is None else self._tools_of(index)
        held = [] if tools is None else tools.end()
        ended = self._ended_with(choice, 0 if tools is None else tools.num_calls)
        parts = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in held]
        return [*parts, {"delta": {}, "logprobs": None, **ended}]

    def _tools_of(self, index: int) -> AnswerTools:
        assert self._plan is not None
        if index not in self._tools:
            self._tools[index] = AnswerTools(self._plan)
        return self._tools[index]

    def _ended_with(self, choice: Choice, num_calls: int) -> dict[str, Any]:
        ended = self._ended(choice)
        if num_calls and choice.finish_reason is FinishReason.STOP:
            ended["finish_reason"] = "tool_calls"
        return ended

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        most = self._shown.logprobs
        return None if most is None else logprobs.chat_logprobs(scored, most, self._bytes_of)

    def _add_prompt_logprobs(self, reply: dict[str, Any], completions: Sequence[Completion]) -> None:
        reply["prompt_logprobs"] = logprobs.prompt_logprobs(completions[0].prompt_logprobs, self._bytes_of)


@final
class TextWriter(ReplyWriter):
    prefix = "cmpl"
    whole = part = "text_completion"

    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        super().__init__(head, call, bytes_of)
        self._offsets: dict[int, int] = {}  # characters of the scored tokens so far, by answer

    def _choice(self, choice: Choice, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.logprobs, index),
            **self._ended(choice),
            **self._with_ids(choice),
        }

    def _parts(self, piece: Piece) -> list[dict[str, Any]]:
        return [{"text": piece.text, "logprobs": self._logprobs(piece.logprobs, piece.index)}]

    def _last(self, choice: Choice, index: int) -> list[dict[str, Any]]:
        return [{"text": "", "logprobs": None, **self._ended(choice)}]

    def _logprobs(self, scored: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        most = self._shown.logprobs
        if most is None:
            return None
        offset = self._offsets.get(index, 0)
        found = logprobs.text_logprobs(scored, most, offset, self._bytes_of)
        self._offsets[index] = offset + sum(map(len, found["tokens"]))
        return found

    def _add_prompt_logprobs(self, reply: dict[str, Any], completions: Sequence[Completion]) -> None:
        """The prompt's logprobs and token ids, in each choice as in vLLM, because a request may have several
        prompts."""
        for choice in reply["choices"]:
            scored = completions[choice["index"] // self._answers_each].prompt_logprobs
            choice["prompt_logprobs"] = logprobs.prompt_logprobs(scored, self._bytes_of)


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """The sum over the prompts."""
    found: list[Usage] = [one.usage for one in completions]
    return _usage(
        sum(one.prompt_tokens for one in found),
        sum(one.completion_tokens for one in found),
        sum(one.cached_prompt_tokens for one in found),
    )


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


def models(name: str, max_context_tokens: int, created_s: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, max_context_tokens, created_s)]}


def model(name: str, max_context_tokens: int, created_s: int) -> dict[str, Any]:
    """`max_model_len` is vLLM's."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "pdserve",
        "root": name,
        "parent": None,
        "max_model_len": max_context_tokens,
    }

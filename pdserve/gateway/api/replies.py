"""Answers in OpenAI's form: whole, or as the chunks of a stream. Pure.

A writer belongs to one request. It receives the SDK's pieces with the number of their answer over all prompts, and at
the end one completion for each prompt.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, final

from pdserve.client.results import Choice, Completion, Model, Piece, TokenLogprob
from pdserve.core.results import Usage
from pdserve.core.types import CHAT_ID_PREFIX, TEXT_ID_PREFIX, FinishReason
from pdserve.gateway.api import logprobs, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.logprobs import BytesOf, EchoedPrompt, TextOffsets, Tokens
from pdserve.gateway.api.sdk_call import SdkCall
from pdserve.gateway.api.sse import FrameTemplate
from pdserve.gateway.tools.plan import AnswerTools, message


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that each chunk of an answer repeats."""

    request_id: str
    model: str
    created_s: int
    eos_token_ids: tuple[int, ...] = ()
    reasoning: str | None = None  # how the prompt of a chat ends; None: the router does not say


class Writer(ABC):
    """`bytes_of` has an entry for every token whose logprob is written."""

    @abstractmethod
    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer. Its long arrays may be iterators, which are read while it is encoded."""

    @abstractmethod
    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> Iterable[bytes]:
        """The frames of some pieces, made while they are read; none if no piece has text yet. Long ones are in pieces
        of some KiB, except a prompt that is repeated."""

    @abstractmethod
    def end(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        """The frames after the last piece, in pieces of some KiB. The completions have no text and no tokens."""

    def repeat(self, prompt: int, echoed: EchoedPrompt) -> None:
        """Gives prompt number `prompt`, which stands before each of its answers. Before the first piece of these."""
        raise AssertionError("only texts are repeated")

    @abstractmethod
    def error(self, reply: ErrorReply) -> Iterable[bytes]:
        """The last frame of a stream that failed, in pieces. The reply has the form of the endpoint's errors."""


class ReplyWriter(Writer):
    """Chats and texts."""

    prefix: ClassVar[str]  # of the answer's id
    whole: ClassVar[str]  # `object` of a whole answer
    part: ClassVar[str]  # of a chunk
    #: Each choice has the prompt's logprobs, as in vLLM, because a request may have several prompts.
    scores_choices: ClassVar[bool] = False

    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        self._head, self._bytes_of = head, bytes_of
        self._shown, self._answers_each, self._plan = call.shown, call.answers_each, call.tools
        self._frame = sse.padded_frame if call.shown.is_padded else sse.frame
        self._tokens: dict[int, int] = {}  # streamed so far, by answer
        shown = call.shown
        # Without these, the chunks of an answer differ in their text only.
        self._is_plain = not (shown.has_token_ids or shown.has_running_usage or call.tools is not None) and (
            shown.logprobs is None
        )
        self._templates: dict[int, FrameTemplate] = {}  # by answer

    # --- a whole answer

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        reply = self._base(self.whole)
        is_scored = self._shown.prompt_logprobs is not None and any(one.prompt_logprobs for one in completions)
        reply["choices"] = self._choices(completions, is_scored=is_scored and self.scores_choices)
        reply["usage"] = self._usage(completions)
        if is_scored and not self.scores_choices:
            reply["prompt_logprobs"] = self._scores(completions[0])
        return reply

    def _choices(self, completions: Sequence[Completion], *, is_scored: bool) -> Iterator[dict[str, Any]]:
        for prompt, completion in enumerate(completions):
            for choice in completion.choices:
                found = self._choice(choice, self._index(prompt, choice.index))
                yield {**found, "prompt_logprobs": self._scores(completion)} if is_scored else found

    # --- a stream

    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> Iterable[bytes]:
        return (self._piece(one, prompt_tokens) for one in pieces)

    def error(self, reply: ErrorReply) -> Iterable[bytes]:
        """No [DONE] follows: the answer is not complete."""
        return [sse.frame(reply.body)]

    def end(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        for prompt, completion in enumerate(completions):
            for choice in completion.choices:
                index = self._index(prompt, choice.index)
                for last in self._last(choice, index):
                    yield self._chunk({"index": index, **last}, completion.usage.prompt_tokens)
        if self._shown.has_usage:
            yield self._frame({**self._base(self.part), "choices": [], "usage": self._usage(completions)})
        yield sse.DONE

    # ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _choice(self, choice: Choice, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _parts(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of a piece's chunks, without their index."""

    @abstractmethod
    def _last(self, choice: Choice, index: int) -> list[dict[str, Any]]:
        """The choices of an answer's last chunks, without their index."""

    def _piece(self, piece: Piece, prompt_tokens: int) -> bytes:
        self._tokens[piece.index] = self._tokens.get(piece.index, 0) + len(piece.token_ids)
        if not (piece.text or piece.logprobs or self._shown.has_token_ids):
            return b""
        if self._is_plain:
            found = self._template(piece.index).frame(piece.text)
            return sse.padded(found) if self._shown.is_padded else found
        parts = self._parts(piece)
        if parts and self._shown.has_token_ids:
            parts[0]["token_ids"] = list(piece.token_ids)
        chunks = [{"index": piece.index, **part, "finish_reason": None} for part in parts]
        return b"".join(self._chunk(one, prompt_tokens) for one in chunks)

    def _template(self, index: int) -> FrameTemplate:
        found = self._templates.get(index)
        if found is None:
            [part] = self._parts(Piece(text="", token_ids=(), index=index))
            empty = self._fields_of({"index": index, **part, "finish_reason": None}, 0)
            found = self._templates[index] = FrameTemplate(sse.frame(empty))
        return found

    def _chunk(self, choice: dict[str, Any], prompt_tokens: int, *, is_long: bool = False) -> bytes:
        return self._frame(self._fields_of(choice, prompt_tokens), is_long=is_long)

    def _fields_of(self, choice: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
        chunk = {**self._base(self.part), "choices": [choice]}
        if self._shown.has_running_usage:
            chunk["usage"] = _usage(prompt_tokens, self._tokens.get(choice["index"], 0), None)
        elif self._shown.has_usage:
            chunk["usage"] = None
        return chunk

    def _base(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{self.prefix}{head.request_id}",
            "object": kind,
            "created": head.created_s,
            "model": head.model,
        }

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return usage(completions)

    def _scores(self, completion: Completion) -> Iterator[dict[str, Any] | None]:
        return logprobs.prompt_logprobs(completion.prompt_logprobs, self._shown.prompt_logprobs or 0, self._bytes_of)

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
    prefix = CHAT_ID_PREFIX
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        super().__init__(head, call, bytes_of)
        self._tools: dict[int, AnswerTools] = {}  # by answer, while streaming
        self._begun: set[int] = set()  # answers whose role was sent

    def _choice(self, choice: Choice, index: int) -> dict[str, Any]:
        found = {"role": "assistant", "content": choice.text, "refusal": None}
        num_calls = 0
        if self._plan is not None:
            tools = AnswerTools(self._plan, self._head.reasoning)
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
        """The role comes first. If the answer may begin with a call, the role waits for the first delta."""
        index, begun = piece.index, b""
        if index not in self._begun and not self._may_call:
            begun = self._chunk(self._role(index, {"content": ""}), prompt_tokens)
        return begun + super()._piece(piece, prompt_tokens)

    @property
    def _may_call(self) -> bool:
        return self._plan is not None and bool(self._plan.tools)

    def _role(self, index: int, first: dict[str, Any]) -> dict[str, Any]:
        """As in OpenAI's streams, `content` is null unless the answer begins with text: with the delta `first`."""
        self._begun.add(index)
        delta = {"role": "assistant", "content": "" if "content" in first else None, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _parts(self, piece: Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"content": piece.text}]
        if self._plan is not None:
            deltas = self._tools_of(piece.index).feed(piece.text)
        if not deltas and (piece.logprobs or self._shown.has_token_ids):
            deltas = [{}]
        # A piece has logprobs for its tokens, so only one of its chunks contains them.
        scores = [self._logprobs(piece.logprobs), *(None for _ in deltas[1:])]
        parts = [{"delta": delta, "logprobs": score} for delta, score in zip(deltas, scores, strict=False)]
        return self._with_role(piece.index, parts)

    def _with_role(self, index: int, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if index in self._begun or not parts:
            return parts
        return [self._role(index, parts[0]["delta"]), *parts]

    def _last(self, choice: Choice, index: int) -> list[dict[str, Any]]:
        tools = None if self._plan is None else self._tools_of(index)
        held = [] if tools is None else tools.end()
        ended = self._ended_with(choice, 0 if tools is None else tools.num_calls)
        parts = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in held]
        return self._with_role(index, [*parts, {"delta": {}, "logprobs": None, **ended}])

    def _tools_of(self, index: int) -> AnswerTools:
        assert self._plan is not None
        if index not in self._tools:
            self._tools[index] = AnswerTools(self._plan, self._head.reasoning)
        return self._tools[index]

    def _ended_with(self, choice: Choice, num_calls: int) -> dict[str, Any]:
        ended = self._ended(choice)
        if num_calls and choice.finish_reason is FinishReason.STOP:
            ended["finish_reason"] = "tool_calls"
        return ended

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        most = self._shown.logprobs
        return None if most is None else logprobs.chat_logprobs(scored, most, self._bytes_of)


@final
class TextWriter(ReplyWriter):
    prefix = TEXT_ID_PREFIX
    whole = part = "text_completion"
    scores_choices = True

    def __init__(self, head: Head, call: SdkCall, tokens: Tokens) -> None:
        super().__init__(head, call, tokens)
        self._all_tokens, self._shows_special_tokens = tokens, call.shows_special_tokens
        self._echoes: dict[int, EchoedPrompt] = {}  # by prompt
        self._offsets: dict[int, TextOffsets] = {}  # by answer

    def repeat(self, prompt: int, echoed: EchoedPrompt) -> None:
        self._echoes[prompt] = echoed

    def _choice(self, choice: Choice, index: int) -> dict[str, Any]:
        echoed, text = self._echo_of(index), choice.text
        scores = self._logprobs(choice.logprobs, index)
        if self._shown.is_only_scored:
            text, scores = "", self._logprobs((), index)
        if echoed is not None:
            text = echoed.text + text
            before = self._echoed_logprobs(echoed)
            if scores is not None and before is not None:
                top = itertools.chain(before.pop("top_logprobs"), scores.pop("top_logprobs"))
                scores = {name: before[name] + scores[name] for name in scores} | {"top_logprobs": top}
        if scores is not None:  # tokens of a stop string begin behind the text's end
            scores["text_offset"] = [min(offset, len(text)) for offset in scores["text_offset"]]
        return {
            "index": index,
            "text": text,
            "logprobs": scores,
            **self._ended(choice),
            **self._with_ids(choice),
        }

    def _piece(self, piece: Piece, prompt_tokens: int) -> bytes:
        echoed, frames = self._echo_of(piece.index), b""
        if echoed is not None and piece.index not in self._tokens:
            first = {
                "text": echoed.text,
                "logprobs": self._echoed_logprobs(echoed),
                "finish_reason": None,
            }
            frames = self._chunk({"index": piece.index, **first}, prompt_tokens, is_long=True)
        if self._shown.is_only_scored:
            self._tokens[piece.index] = 0
            return frames
        return frames + super()._piece(piece, prompt_tokens)

    def _parts(self, piece: Piece) -> list[dict[str, Any]]:
        return [{"text": piece.text, "logprobs": self._logprobs(piece.logprobs, piece.index)}]

    def _last(self, choice: Choice, index: int) -> list[dict[str, Any]]:
        return [{"text": "", "logprobs": None, **self._ended(choice)}]

    def _ended(self, choice: Choice) -> dict[str, Any]:
        if self._shown.is_only_scored:
            return {"finish_reason": FinishReason.LENGTH.value, "stop_reason": None}
        return super()._ended(choice)

    def _with_ids(self, choice: Choice) -> dict[str, Any]:
        found = super()._with_ids(choice)
        return {name: [] for name in found} if self._shown.is_only_scored else found

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        found = super()._usage(completions)
        if self._shown.is_only_scored:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def _echo_of(self, index: int) -> EchoedPrompt | None:
        return self._echoes.get(index // self._answers_each)

    def _logprobs(self, scored: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        most = self._shown.logprobs
        if most is None:
            return None
        if index not in self._offsets:
            echoed = self._echo_of(index)
            begin = 0 if echoed is None else len(echoed.text)
            self._offsets[index] = TextOffsets(self._all_tokens, begin, has_special_tokens=self._shows_special_tokens)
        ids = [one.token_id for one in scored]
        offsets = self._offsets[index].take(ids)
        return logprobs.text_logprobs(ids, scored, offsets, most, self._bytes_of)

    def _echoed_logprobs(self, echoed: EchoedPrompt) -> dict[str, Any] | None:
        most = self._shown.logprobs
        if most is None:
            return None
        offsets = logprobs.prompt_offsets(echoed.text, echoed.token_ids, self._all_tokens)
        ids, scored = echoed.token_ids, echoed.scored
        return logprobs.text_logprobs(ids, scored, offsets, most, self._bytes_of)


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


def models(served: Model, created_s: int) -> dict[str, Any]:
    """In OpenAI's and Anthropic's forms at once."""
    names = served.names
    data = [model(name, served, created_s) for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model(name: str, served: Model, created_s: int) -> dict[str, Any]:
    """`name` is one of the model's or of an adapter. `max_model_len`, `root` and `parent` are vLLM's, and `type`,
    `display_name` and `created_at` are Anthropic's; the folder of an adapter is not shown."""
    is_adapter = name in served.adapters
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "pdserve",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat(),
        "root": name if is_adapter else served.name,
        "parent": served.name if is_adapter else None,
        "max_model_len": served.max_context_tokens,
        "sampling_defaults": served.sampling_defaults.given(),
    }

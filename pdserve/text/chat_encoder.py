"""Converts a chat to token ids, and finds whether the answer begins within the model's reasoning.

ChatRenderer runs the template, and only a child process may do that. ChatTokens reads the text that it has written.

The text is that of the chat template. Control tokens in it come from the template alone: a request's own text is
encoded as text, even where it contains the name of a control token (pdserve/text/control_tokens.py).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.text.chat import ChatTemplate, Message, ToolCall
from pdserve.text.control_tokens import SecretNames, any_of, rewritten
from pdserve.text.stops import MISTRAL_MARKS, THINK_MARKS, ReasoningState
from pdserve.text.template_forms import PROBE_TOOL
from pdserve.text.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Chat:
    messages: Sequence[Message]
    tools: Sequence[str] = ()  # JSON objects
    template_arguments: str = ""  # a JSON object; empty: none
    effort: str | None = None
    allows_special_tokens: bool = False  # names of control tokens in the request's text become these tokens
    has_special_tokens: bool = False  # the tokenizer puts its own around the text too
    add_generation_prompt: bool = True

    def strings(self) -> Iterator[str]:
        for one in self.messages:
            calls = (text for call in one.tool_calls for text in (call.id, call.name, _unescaped(call.arguments)))
            texts = (one.role, one.content, one.tool_call_id, one.name, one.reasoning_content, *calls)
            yield from (text for text in texts if text)
        yield from map(_unescaped, self.tools)
        yield _unescaped(self.template_arguments)


def _unescaped(text: str) -> str:
    """JSON, as a template would write it."""
    if "\\" not in text:
        return text
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def chat_of(
    prompt: inference_pb2.ChatPrompt, *, has_special_tokens: bool = False, add_generation_prompt: bool = True
) -> Chat:
    return Chat(
        [_message(one) for one in prompt.messages],
        list(prompt.tools),
        prompt.template_arguments,
        prompt.reasoning_effort if prompt.HasField("reasoning_effort") else None,
        prompt.allow_special_tokens,
        has_special_tokens,
        add_generation_prompt,
    )


def _message(one: inference_pb2.ChatMessage) -> Message:
    # Only an assistant's content may be null. Clients of an earlier version do not send an empty text.
    is_null = not one.HasField("content") and one.role == "assistant"
    return Message(
        one.role,
        None if is_null else one.content,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in one.tool_calls),
        tool_call_id=one.tool_call_id if one.HasField("tool_call_id") else None,
        name=one.name if one.HasField("name") else None,
        reasoning_content=one.reasoning_content if one.HasField("reasoning_content") else None,
    )


@dataclass(frozen=True, slots=True)
class EncodedChat:
    token_ids: list[int]
    reasoning: ReasoningState


@dataclass(frozen=True, slots=True)
class RenderedChat:
    marked: str  # with a secret name in place of each control token that the template has written
    reasoning: ReasoningState


@final
class ChatTokens:
    """Converts rendered chats to token ids. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, sources: Sequence[str]) -> None:
        """`sources` are the templates."""
        self.tokenizer = tokenizer
        self.control_tokens = tokenizer.control_tokens("\n".join(sources))
        self._control_ids = frozenset(self.control_tokens.values())
        self.names = secret_names(self.control_tokens)
        self._lock = threading.Lock()
        self._renamed: Callable[[str], list[int]] | None = None

    def encode(
        self,
        rendered: RenderedChat,
        keep: int | None,
        check_chars: Callable[[int], None],
        *,
        allows_special_tokens: bool,
        has_special_tokens: bool,
        salt: bytes | None = None,
    ) -> EncodedChat:
        """`keep`: only the last tokens are needed. `check_chars` is called with the size of the text if all are.
        `salt` is that of Tokenizer.encode().

        Raises InvalidRequest.
        """
        marked = rendered.marked
        text = self.names.shown(marked)
        if keep is None:
            check_chars(len(text))
        start = 0 if keep is None else self.tokenizer.tail_start(text, keep)
        ids = self.tokenizer.encode(text[start:], has_special_tokens=False, salt=salt if keep is None else None)
        if not allows_special_tokens:
            written = [
                self.control_tokens[mark]
                for at, mark in self.names.found(marked)
                if at >= start and mark in self.control_tokens
            ]
            if list(filter(self._control_ids.__contains__, ids)) != written:
                tail = marked[self.names.position(marked, start) :]
                ids = self._encode_names(self.names.shown(tail, but=self.control_tokens))
        if has_special_tokens and keep is None:
            ids = self._surrounded(text, ids)
        return EncodedChat(ids if keep is None else ids[-keep:], rendered.reasoning)

    def _surrounded(self, text: str, ids: list[int]) -> list[int]:
        """With the tokens that the tokenizer puts before and after a text."""
        inner = self.tokenizer.encode(text, has_special_tokens=False)
        whole = self.tokenizer.encode(text)
        num_added = len(whole) - len(inner)
        before = next((at for at in range(num_added + 1) if whole[at : at + len(inner)] == inner), num_added)
        return [*whole[:before], *ids, *whole[before + len(inner) :]]

    def _encode_names(self, text: str) -> list[int]:
        with self._lock:
            if self._renamed is None:
                names = {mark: name for mark, name in self.names.of.items() if mark in self.control_tokens}
                self._renamed = self.tokenizer.with_names(names)
        return self._renamed(text)


def secret_names(control_tokens: Iterable[str], nonce: str = "") -> SecretNames:
    """`nonce` is that of the names of another process."""
    return SecretNames([*control_tokens, *THINK_MARKS, *MISTRAL_MARKS], nonce)


@final
class ChatRenderer:
    """Runs a template, and tells its control tokens from equal text of the request."""

    def __init__(self, template: ChatTemplate, control_tokens: Collection[str], names: SecretNames) -> None:
        both = (template,) if template.tool_use is None else (template, template.tool_use)
        self._pattern = any_of(control_tokens)
        self._names = names
        self._programs = [_Program(one, names, self._pattern) for one in both]

    def render(self, chat: Chat) -> RenderedChat:
        """Raises InvalidRequest and ModelError."""
        program = self._programs[-1 if chat.tools else 0]
        safe = chat if chat.allows_special_tokens else program.guarded(chat)
        marked = self._render(program, chat, safe)
        text = self._names.shown(marked)
        has_control = any(self._pattern.search(one) or self._names.broken in one for one in safe.strings())
        if has_control or not text or not program.is_exact or self._names.has_part(text):
            plain = program.plain(chat)
            if plain != text:
                if has_control and not chat.allows_special_tokens:
                    raise InvalidRequest(
                        "chat.messages",
                        "the name of a control token where the chat template examines it",
                        "other text, or allow_special_tokens",
                    )
                # Without such a name in the request, every name in the text is the template's. A normalizer may still
                # make others of the request's text, so the ids are compared as ever.
                marked, safe = self._names.hidden(plain), chat
        return RenderedChat(marked, self._reasoning(program, chat, safe, marked))

    def _render(self, program: _Program, chat: Chat, safe: Chat) -> str:
        """Empty if only the program with secret names fails. Its error could tell a name, so the template itself
        reports the error."""
        try:
            return program.render(safe)
        except (InvalidRequest, ModelError):
            program.plain(chat)
            return ""

    def _reasoning(self, program: _Program, chat: Chat, safe: Chat, marked: str) -> ReasoningState:
        mark = program.template.reasoning_mark
        if mark is None:
            return ReasoningState.UNMARKED
        marks = MISTRAL_MARKS if mark == MISTRAL_MARKS[1] else THINK_MARKS
        opened, closed = (self._names.of[one] for one in marks)
        end = marked.rstrip()
        if end.endswith(opened):
            return ReasoningState.OPEN
        if end.endswith(closed):
            return ReasoningState.CLOSED
        last = marked.rfind(opened)
        if last <= marked.rfind(closed):
            return ReasoningState.UNMARKED
        # The template may have written the mark as an instruction, or at the beginning of the answer.
        without = self._render(program, chat, replace(safe, add_generation_prompt=False))
        return ReasoningState.OPEN if marked[: last + 1] != without[: last + 1] else ReasoningState.UNMARKED


@final
class ChatEncoder:
    """Both, where the tokenizer's patterns have no end that is known either."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        both = (template,) if template.tool_use is None else (template, template.tool_use)
        self.tokens = ChatTokens(tokenizer, [one.source for one in both])
        self.tokenizer, self.control_tokens = tokenizer, self.tokens.control_tokens
        self.takes_tools = both[-1].takes_tools
        self._renderer = ChatRenderer(template, self.control_tokens, self.tokens.names)

    def encode(self, chat: Chat, keep: int | None, check_chars: Callable[[int], None]) -> EncodedChat:
        """Raises InvalidRequest and ModelError."""
        return self.tokens.encode(
            self._renderer.render(chat),
            keep,
            check_chars,
            allows_special_tokens=chat.allows_special_tokens,
            has_special_tokens=chat.has_special_tokens,
        )


@final
class _Program:
    """A template, and its program that writes names."""

    def __init__(self, template: ChatTemplate, names: SecretNames, pattern: re.Pattern[str]) -> None:
        self.template = template
        self._names = names
        self._program = template.rewritten(lambda parsed: rewritten(parsed, names, template.named_tokens))
        self.is_exact = True  # the program writes the template's text, for usual chats
        self._joined: frozenset[str] = frozenset()  # control tokens that the template joins from parts
        joined: set[str] = set()
        for chat in _PROBES:
            if chat.tools and not template.takes_tools:
                continue
            plain, marked = _probed(template, chat), _probed(self._program, chat)
            if plain is None:
                continue
            if marked is None:
                self.is_exact = False
                continue
            self.is_exact &= names.shown(marked) == plain
            joined.update(set(pattern.findall(names.shown(marked, but=names.of))))
        self._joined = frozenset(joined)

    def plain(self, chat: Chat) -> str:
        """The template's own text."""
        return _rendered(self.template, chat)

    def render(self, chat: Chat) -> str:
        """With a name for each control token and mark that the template writes."""
        text = _rendered(self._program, chat)
        for mark in sorted(self._joined, key=len, reverse=True):
            text = text.replace(mark, self._names.of[mark])
        return text

    def guarded(self, chat: Chat) -> Chat:
        """With text of which no token that the template joins from parts can be made, so that each of them in the
        prompt is the template's. SecretNames.shown() restores the text."""
        if not self._joined:
            return chat

        def broken(text: str) -> str:
            return self._names.without_marks(text, self._joined)

        def guarded(text: str) -> str:
            core = text.strip()
            if not core or not any(_may_join(core, token) for token in self._joined):
                return broken(text)
            start = text.index(core)
            edge = self._names.broken
            return text[:start] + edge + broken(core) + edge + text[start + len(core) :]

        def optional(text: str | None) -> str | None:
            return None if text is None else guarded(text)

        def json_text(text: str) -> str:
            try:
                return broken(json.dumps(json.loads(text), ensure_ascii=False))
            except (ValueError, RecursionError):
                return broken(text)

        messages = [
            replace(
                one,
                role=one.role if re.fullmatch(r"[A-Za-z0-9_]+", one.role) else guarded(one.role),
                content=optional(one.content),
                name=optional(one.name),
                tool_call_id=optional(one.tool_call_id),
                reasoning_content=optional(one.reasoning_content),
                tool_calls=tuple(
                    ToolCall(guarded(call.id), guarded(call.name), json_text(call.arguments)) for call in one.tool_calls
                ),
            )
            for one in chat.messages
        ]
        arguments = json_text(chat.template_arguments) if chat.template_arguments else ""
        return replace(chat, messages=messages, tools=list(map(json_text, chat.tools)), template_arguments=arguments)


def _rendered(template: ChatTemplate, chat: Chat) -> str:
    return template.render(
        chat.messages,
        chat.tools,
        chat.template_arguments,
        chat.effort,
        add_generation_prompt=chat.add_generation_prompt,
    )


def _probed(template: ChatTemplate, chat: Chat) -> str | None:
    try:
        return template.probe(lambda: _rendered(template, chat))
    except (InvalidRequest, ModelError):
        return None


def _may_join(text: str, token: str) -> bool:
    """Whether `text` and text beside it may be `token`."""
    return text in token or any(
        text.endswith(token[:size]) or text.startswith(token[size:]) for size in range(1, len(token))
    )


_TOOL: Final = json.dumps(PROBE_TOOL)
_CALLING: Final = Message("assistant", None, (ToolCall("probe0001", "probe_call", '{"probe_key": "probe"}'),))
_RESULT: Final = Message("tool", "result", tool_call_id="probe0001", name="probe_call")
_PROBES: Final = (
    Chat([Message("user", "probe")]),
    Chat([Message("system", "probe"), Message("user", "probe")]),
    Chat([Message("user", "probe"), Message("assistant", "answer", reasoning_content="hm"), Message("user", "probe")]),
    Chat([Message("user", "probe")], [_TOOL]),
    Chat([Message("user", "probe"), _CALLING, _RESULT], [_TOOL]),
    Chat([Message("user", "probe"), _CALLING, _RESULT, Message("assistant", "answer"), Message("user", "x")], [_TOOL]),
)

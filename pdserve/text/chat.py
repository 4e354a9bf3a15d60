"""Converts chat messages to a prompt by the chat template in the model's folder.

A template is a program written by the model's author. It runs in jinja2's immutable sandbox, with the helpers of
Hugging Face templates, and with limits on its time and the size of its output. Templates never come from a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import jinja2
import jinja2.meta

from pdserve.core.errors import InvalidRequest, ModelError, shortened
from pdserve.text.chat_sandbox import CLOCK, RenderClock, TemplateRefusal, sandbox
from pdserve.text.tokenizer import NAMED_TOKENS, named_token, read_tokenizer_config
from pdserve.text.tool_format import tool_format

RENDER_S: Final = 1.0
MAX_RENDERED_CHARS: Final = 16 * 2**20
MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128
MAX_ARGUMENTS_CHARS: Final = 4096
_OWN: Final = ("messages", "add_generation_prompt", "tools", "documents")  # what render() gives to every template


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str | None = None  # of a tool's result
    name: str | None = None
    reasoning_content: str | None = None  # of an assistant


@final
class ChatTemplate:
    """Thread-safe: each rendering has its own environment overlay and clock."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str] | None = None,
        *,
        render_s: float = RENDER_S,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Raises ModelError when the template does not parse."""
        self._named_tokens = dict(named_tokens or {})
        self._render_s, self._max_chars = render_s, max_chars
        self._environment = sandbox()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError("chat_template", f"line {error.lineno}: {error.message}", "a jinja template") from error
        read = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        self._takes_tools = "tools" in read
        self._arguments = read.difference(_OWN, self._named_tokens, self._environment.globals)
        self.tool_format = tool_format(source) if self._takes_tools else ""
        self.reasoning_mark = next((mark for mark in ("[/THINK]", "</think>") if mark in source), None)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        arguments: str = "",
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """`tools` are JSON objects. So is `arguments`, with values for names that the template reads.

        Raises InvalidRequest if the template rejects the messages, and ModelError if it exceeds a limit.
        """
        if not messages:
            raise InvalidRequest("chat.messages", "no message", "at least one message")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("chat.messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES} messages")
        for message in messages:
            if not message.role:
                raise InvalidRequest("chat.messages.role", "an empty role", "a role such as user")
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS} tools")
        if tools and not self._takes_tools:
            raise InvalidRequest("tools", f"{len(tools)} tools", "none: this model's chat template takes no tools")
        given = self._checked(arguments) if arguments else {}
        plain = [_plain(message) for message in messages]
        clock = RenderClock(self._render_s)
        chunks: list[str] = []
        num_chars = 0
        try:
            for chunk in self._template.generate(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=[_object("tools", one) for one in tools] or None,
                documents=None,
                **given,
                **self._named_tokens,
                **{CLOCK: clock},
            ):
                num_chars += len(chunk)
                if num_chars > self._max_chars:
                    raise ModelError("chat_template", "over that", f"at most {self._max_chars} characters of prompt")
                clock.check()
                chunks.append(chunk)
        except TemplateRefusal as error:
            raise InvalidRequest(
                "chat.messages", "these messages", f"what the chat template takes: {shortened(error)}"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                "chat.messages", "these messages", f"what the chat template takes: {shortened(error)}"
            ) from error
        except (MemoryError, RecursionError) as error:
            raise ModelError("chat_template", type(error).__name__, "a template that ends") from error
        return "".join(chunks)

    def _checked(self, arguments: str) -> dict[str, Any]:
        """Raises InvalidRequest: a name that the template does not read would change nothing."""
        field = "chat_template_kwargs"
        if len(arguments) > MAX_ARGUMENTS_CHARS:
            raise InvalidRequest(field, f"{len(arguments)} characters", f"at most {MAX_ARGUMENTS_CHARS} characters")
        found = _object(field, arguments)
        for name, value in found.items():
            if name not in self._arguments:
                known = ", ".join(sorted(self._arguments)) or "no name"
                raise InvalidRequest(field, repr(name), f"what this model's chat template reads: {known}")
            if not isinstance(value, (str, bool, int, float)):
                raise InvalidRequest(field, f"another value of {name!r}", "a text, a number or a boolean")
        return found


def reasoning_format(template: ChatTemplate) -> str:
    """How the model marks its reasoning: mistral, tagged, open (its prompt ends with <think>), or empty: no marks."""
    if template.reasoning_mark is None:
        return ""
    if template.reasoning_mark == "[/THINK]":
        return "mistral"
    try:
        prompt = template.render([Message("user", "x")])
    except (InvalidRequest, ModelError):
        return "tagged"
    return "open" if prompt.rstrip().endswith("<think>") else "tagged"


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """chat_template.jinja, otherwise `chat_template` of tokenizer_config.json; None if the model has neither."""
    config = read_tokenizer_config(folder)
    path = folder / "chat_template.jinja"
    if path.is_file():
        source: Any = path.read_text(encoding="utf-8")
    else:
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError("chat_template", type(source).__name__, "text")
    named = {name: named_token(config, name) for name in NAMED_TOKENS}
    return ChatTemplate(source, {name: token for name, token in named.items() if token is not None})


def _plain(message: Message) -> dict[str, Any]:
    """As templates of Hugging Face read it; arguments of calls are objects there, not text."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object("chat.messages.tool_calls", call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    return found


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "a text that is no JSON object", "a JSON object")
    return value

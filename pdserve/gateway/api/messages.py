"""/v1/messages, Anthropic's API: a request becomes that of a chat, and its answer is written whole or as the events of
a stream. Pure.

As in /v1/responses, nothing is stored, so the messages hold the whole conversation.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast, final

import jiter

from pdserve.client.options import Options
from pdserve.client.results import Completion, Model, Piece
from pdserve.core.errors import InvalidRequest
from pdserve.core.results import Usage
from pdserve.core.types import MESSAGE_ID_PREFIX, FinishReason
from pdserve.gateway.api import http_input, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.field_support import supported
from pdserve.gateway.api.logprobs import BytesOf
from pdserve.gateway.api.message_models import (
    CustomTool,
    DocumentBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    TurnMessage,
)
from pdserve.gateway.api.replies import Head, Writer
from pdserve.gateway.api.request_models import SamplingFields
from pdserve.gateway.api.sdk_call import SdkCall, chat_call_as, check_model, ignored_tools, text_of, validated
from pdserve.gateway.api.sse import FrameTemplate
from pdserve.gateway.tools.plan import AnswerTools

#: Begins a block that Claude Code adds to its system message. It differs in each request, so behind it no prefix would
#: ever be found in the cache.
BILLING: Final = "x-anthropic-billing-header:"
ERROR: Final = "Error: "  # begins the result of a call that failed
#: Of `cache_control`, which says that a prefix will be used again: its `ttl`, in seconds.
TTLS: Final = {"5m": 300.0, "1h": 3600.0}
DEFAULT_EFFORT: Final = "high"  # Anthropic's, of a request that asks for thinking
#: Clients require a signature. It is not checked: what a client sends back is text of a conversation like any other.
SIGNATURE: Final = "unsigned"
#: The name that a chat's field has here.
_NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def messages_call(given: Mapping[str, Any], model: Model, headers: Options) -> SdkCall:
    """Raises InvalidRequest and UnknownModel."""
    check_model(given.get("model"), model)
    request = validated(MessagesRequest, supported("messages", given))
    if request.messages and request.messages[-1].role == "assistant":
        place = f"messages[{len(request.messages) - 1}].role"
        raise InvalidRequest(place, "assistant", "another role: an answer does not continue a given beginning")
    messages, places = _messages(request)
    numbered = [(at, one) for at, one in enumerate(request.tools or ()) if isinstance(one, CustomTool)]
    for index, (at, _) in enumerate(numbered):
        places[f"tools[{index}].function"] = f"tools[{at}]"
        places[f"tools[{index}].function.parameters"] = f"tools[{at}].input_schema"
    most = request.max_tokens
    chat = {
        **{name: getattr(request, name) for name in SamplingFields.model_fields},
        "messages": messages,
        # Clients must name a limit, and name the largest of Anthropic's models. The cluster always samples a token,
        # which is not shown if none was asked for.
        "max_tokens": None if most is None else 1 if most == 0 else min(most, model.max_new_tokens),
        "stop": _stops(request),
        "reasoning_effort": _effort(request),
        "chat_template_kwargs": request.chat_template_kwargs,
        "response_format": _format(request),
        "tools": [_tool(one) for _, one in numbered] or None,
        **_choice(request),
    }
    if (reuse_within_s := _reuse_within_s(given)) is not None:
        headers = cast(Options, {"reuse_within_s": reuse_within_s, **headers})
    call = chat_call_as(chat, model, headers, _NAMES | places, _ignored(request))
    return replace(call, shown=replace(call.shown, is_only_scored=most == 0))


def _reuse_within_s(given: Mapping[str, Any]) -> float | None:
    """The longest `ttl` of a request whose fields are valid, of itself and of its blocks and tools. One without a `ttl`
    says nothing about the time."""
    blocks = [given]
    for name in ("system", "tools", "messages"):
        parts = given.get(name)
        blocks += parts if isinstance(parts, list) else ()
    for message in given["messages"]:
        parts = message["content"]
        blocks += parts if isinstance(parts, list) else ()
    found = []
    for block in blocks:
        control = block.get("cache_control")
        ttl = control.get("ttl") if isinstance(control, dict) else None
        if isinstance(ttl, str) and ttl in TTLS:
            found.append(TTLS[ttl])
    return max(found, default=None)


def _messages(request: MessagesRequest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Those of a chat, and the place in the request that each message or call comes from. Messages of the same role
    that follow each other are one turn."""
    found: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    system = [request.system] if isinstance(request.system, str) else [one.text for one in request.system or ()]
    texts = [one for one in system if not one.startswith(BILLING)]
    if texts:
        found.append({"role": "system", "content": texts})
        places["messages[0]"] = "system"
    for index, message in enumerate(request.messages):
        place = f"messages[{index}]"
        add = _add_assistant if message.role == "assistant" else _add
        for at, added in add(found, message, place).items():
            places.setdefault(at, place + added)
    for turn in found:
        for name in ("content", "reasoning_content"):
            if isinstance(turn.get(name), list):
                turn[name] = "\n".join(turn[name])
    return found, places


def _add(found: list[dict[str, Any]], message: TurnMessage, place: str) -> dict[str, str]:
    """A message of the user or the system. Results of calls are messages of their own. A later message of the system is
    text of the user's turn: the chat templates of many models take only one, at the beginning."""
    role = "user" if found else message.role
    if isinstance(message.content, str):
        _add_text(found, role, message.content)
        return {f"messages[{len(found) - 1}]": ""}
    places: dict[str, str] = {}
    for number, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block)})
        elif isinstance(block, (TextBlock, DocumentBlock)):
            _add_text(found, role, block.text)
        else:
            raise _misplaced(f"{place}.content[{number}]", block.type, message.role)
        places.setdefault(f"messages[{len(found) - 1}]", f".content[{number}]")
    if not message.content:
        _add_text(found, role, "")
    return places


def _add_text(found: list[dict[str, Any]], role: str, text: str) -> None:
    if found and found[-1]["role"] == role:
        found[-1]["content"].append(text)
    else:
        found.append({"role": role, "content": [text]})


def _add_assistant(found: list[dict[str, Any]], message: TurnMessage, place: str) -> dict[str, str]:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    turn, at = found[-1], f"messages[{len(found) - 1}]"
    places = {at: ""}
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            turn["content"] = turn["content"] or []
            turn["content"].append(block.text)
        elif isinstance(block, ThinkingBlock):
            turn.setdefault("reasoning_content", []).append(block.thinking)
        elif isinstance(block, (DocumentBlock, ToolResultBlock)):
            raise _misplaced(f"{place}.content[{number}]", block.type, message.role)
        elif not isinstance(block, RedactedThinkingBlock):
            calls = turn.setdefault("tool_calls", [])
            arguments = _written(block.input, f"{place}.content[{number}].input")
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
            places[f"{at}.tool_calls[{len(calls) - 1}].function"] = f".content[{number}]"
    if turn["content"] is None and not turn.keys() & {"tool_calls", "reasoning_content"}:
        turn["content"] = ""  # nothing but encrypted thinking
    return places


def _misplaced(place: str, kind: str, role: str) -> InvalidRequest:
    return InvalidRequest(f"{place}.type", f"a block {kind} of the role {role}", "blocks that this role may have")


def _written(arguments: Mapping[str, Any], place: str) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(place, "a number that is not finite", "finite numbers") from None


def _text(block: ToolResultBlock) -> str:
    """Chat templates have no field for `is_error`."""
    text = text_of(block.content or "")
    return f"{ERROR}{text}" if block.is_error and not text.startswith(ERROR.strip()) else text


def _stops(request: MessagesRequest) -> list[str] | None:
    given = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return [*given, *(request.stop_sequences or ())] or None


def _effort(request: MessagesRequest) -> str | None:
    effort = None if request.output_config is None else request.output_config.effort
    if request.thinking is None:
        return effort
    return "none" if request.thinking.type == "disabled" else effort or DEFAULT_EFFORT


def _format(request: MessagesRequest) -> dict[str, Any] | None:
    form = None if request.output_config is None else request.output_config.format
    return None if form is None else {"type": "json_schema", "json_schema": {"schema": form.schema_}}


def _tool(one: CustomTool) -> dict[str, Any]:
    function = {"name": one.name, "description": one.description, "parameters": one.input_schema, "strict": one.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(request: MessagesRequest) -> dict[str, Any]:
    asked = request.tool_choice
    if asked is None:
        return {}
    if (asked.name is None) == (asked.type == "tool"):
        expected = "a name beside the type tool, and beside no other"
        raise InvalidRequest("tool_choice.name", "no value" if asked.name is None else "a value", expected)
    choice: Any = _CHOICES.get(asked.type) or {"type": "function", "function": {"name": asked.name}}
    return {"tool_choice": choice, "parallel_tool_calls": False if asked.disable_parallel_tool_use else None}


def _ignored(request: MessagesRequest) -> list[str]:
    """What the request asks for, and the answer lacks."""
    found = ignored_tools(request.tools)
    if request.thinking is not None:
        found += [f"thinking.{name}" for name in ("budget_tokens", "display") if getattr(request.thinking, name)]
    return found


# --- answer ---------------------------------------------------------------------------------------------------

_Event = dict[str, Any]


@final
class MessagesWriter(Writer):
    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        self._head = head
        self._is_hidden = call.shown.is_only_scored
        self._tools = None if call.tools is None else AnswerTools(call.tools, head.reasoning)
        self._blocks: list[dict[str, Any]] = []  # without their texts, if the answer is streamed
        self._control = _ControlEscaper()  # of the last call
        self._template: FrameTemplate | None = None  # of the deltas of the last block; None: no block is open
        self._keeps_text = not call.shown.is_streamed
        self._has_begun = False

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        [one] = completions
        list(self._feed(one.text))
        list(self._rest())
        is_cut = one.finish_reason is not FinishReason.STOP or one.choices[0].stop is not None
        last = len(self._blocks) - 1
        self._blocks = [_finished(block, is_cut and at == last) for at, block in enumerate(self._blocks)]
        return {**self._base(), "content": self._blocks, **self._stop(one), "usage": self._usage(one.usage)}

    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> Iterable[bytes]:
        yield from self._begin(prompt_tokens)
        for piece in pieces:
            yield from self._feed(piece.text)

    def end(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        [one] = completions
        yield from self._begin(one.usage.prompt_tokens)
        yield from self._rest()
        yield _frame({"type": "message_delta", "delta": self._stop(one), "usage": self._usage(one.usage)})
        yield _frame({"type": "message_stop"})

    def error(self, reply: ErrorReply) -> Iterable[bytes]:
        return [_frame(reply.body)]

    # ------------------------------------------------------------------------------------------------------------

    def _begin(self, prompt_tokens: int) -> Iterable[bytes]:
        if not self._has_begun:
            self._has_begun = True
            usage = self._usage(Usage(prompt_tokens=prompt_tokens, completion_tokens=0, cached_prompt_tokens=0))
            stop = {"stop_reason": None, "stop_sequence": None}
            yield _frame({"type": "message_start", "message": {**self._base(), "content": [], **stop, "usage": usage}})

    def _feed(self, text: str) -> Iterable[bytes]:
        if self._is_hidden:
            return ()
        return self._add([{"content": text}] if self._tools is None else self._tools.feed(text))

    def _rest(self) -> Iterable[bytes]:
        if self._tools is not None and not self._is_hidden:
            yield from self._add(self._tools.end())
        yield from self._close()

    def _add(self, deltas: Iterable[dict[str, Any]]) -> Iterable[bytes]:
        for delta in deltas:
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    self._control = _ControlEscaper()
                    yield from self._open({"type": "tool_use", "id": part["id"], "name": part["function"]["name"]})
                yield from self._add_text("input", self._control.escaped(part["function"]["arguments"]))
            if reasoning := delta.get("reasoning_content"):
                if self._kind != "thinking":
                    yield from self._open({"type": "thinking", "signature": ""})
                yield from self._add_text("thinking", reasoning)
            if text := delta.get("content"):
                if self._kind != "text":
                    yield from self._open({"type": "text"})
                yield from self._add_text("text", text)

    @property
    def _kind(self) -> str | None:
        """Of the open block."""
        return None if self._template is None else self._blocks[-1]["type"]

    def _add_text(self, field: str, text: str) -> Iterable[bytes]:
        if self._keeps_text:
            self._blocks[-1][field] += text
        elif text and self._template is not None:
            yield self._template.frame(text)

    def _open(self, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close()
        kind, index = block["type"], len(self._blocks)
        field, delta = _DELTAS[kind]
        self._blocks.append({**block, field: ""})
        empty = {} if kind == "tool_use" else ""
        yield _frame({"type": "content_block_start", "index": index, "content_block": {**block, field: empty}})
        self._template = FrameTemplate(_frame({"type": "content_block_delta", "index": index, "delta": delta}))

    def _close(self) -> Iterable[bytes]:
        """Ends the block that is open, if one is."""
        if self._template is None:
            return
        self._template, index = None, len(self._blocks) - 1
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = SIGNATURE
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield _frame({"type": "content_block_delta", "index": index, "delta": signed})
        yield _frame({"type": "content_block_stop", "index": index})

    def _base(self) -> dict[str, Any]:
        name = f"{MESSAGE_ID_PREFIX}{self._head.request_id}"
        return {"id": name, "type": "message", "role": "assistant", "model": self._head.model}

    def _stop(self, one: Completion) -> dict[str, Any]:
        [choice] = one.choices
        if self._is_hidden or one.finish_reason is not FinishReason.STOP:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if choice.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

    def _usage(self, used: Usage) -> dict[str, Any]:
        """Anthropic's `input_tokens` are those that were not read from the cache."""
        cached = used.cached_prompt_tokens
        return {
            "input_tokens": used.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if self._is_hidden else used.completion_tokens,
        }


#: The field of a block that its deltas add to, and an empty delta.
_DELTAS: Final[Mapping[str, tuple[str, _Event]]] = {
    "text": ("text", {"type": "text_delta", "text": ""}),
    "thinking": ("thinking", {"type": "thinking_delta", "thinking": ""}),
    "tool_use": ("input", {"type": "input_json_delta", "partial_json": ""}),
}


def _frame(event: Mapping[str, Any]) -> bytes:
    return sse.event_line(event) + sse.frame(event)


@final
class _ControlEscaper:
    """Escapes the control characters within the strings of JSON that comes in pieces: models write raw line ends, which
    JSON does not allow."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False  # a backslash was the last character

    def escaped(self, text: str) -> str:
        return "".join(map(self._escaped, text))

    def _escaped(self, char: str) -> str:
        was_escaped, self._is_escaped = self._is_escaped, False
        if not self._is_in_string:
            self._is_in_string = char == '"'
        elif char < " ":
            return json.dumps(char)[1 + was_escaped : -1]  # without a backslash that is there already
        elif char == "\\":
            self._is_escaped = not was_escaped
        elif char == '"':
            self._is_in_string = was_escaped
        return char


def _finished(block: dict[str, Any], is_cut: bool) -> dict[str, Any]:
    """A block of a whole answer. A call whose arguments are not an object in JSON is text, so that nothing of it is
    lost. `is_cut`: `max_tokens` or a stop sequence may have ended the block."""
    if block["type"] != "tool_use":
        return block
    arguments = _arguments(block["input"], is_cut)
    if arguments is not None:
        return {**block, "input": arguments}
    return {"type": "text", "text": f'{{"name": {json.dumps(block["name"])}, "arguments": {block["input"]}}}'}


def _arguments(text: str, is_cut: bool) -> dict[str, Any] | None:
    """Those of a call, if it is cut as far as they were generated. None if they are not an object."""
    data, found = text.encode() or b"{}", None
    if not http_input.has_long_number(data):
        with contextlib.suppress(ValueError, RecursionError):
            mode: Any = "trailing-strings" if is_cut else False
            found = jiter.from_json(data, allow_inf_nan=False, partial_mode=mode)
    return found if isinstance(found, dict) else {} if is_cut else None

"""/v1/responses: a request becomes that of a chat, and its answer is written whole or as the events of a stream. Pure.

Unless responses are stored (pdserve/gateway/stored.py), the input holds the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

from pdserve.client.options import Options
from pdserve.client.results import Completion, Model, Piece, TokenLogprob
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import RESPONSE_ID_PREFIX, FinishReason
from pdserve.gateway.api import logprobs, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.field_support import supported
from pdserve.gateway.api.logprobs import BytesOf
from pdserve.gateway.api.replies import Head, Writer
from pdserve.gateway.api.request_models import (
    ITEMS,
    LOGPROBS,
    FunctionChoice,
    FunctionTool,
    InputCall,
    InputReasoning,
    InputResult,
    ResponsesRequest,
    SamplingFields,
    SchemaFormat,
    TextOptions,
)
from pdserve.gateway.api.sdk_call import SdkCall, chat_call_as, check_model, ignored_tools, text_of, validated
from pdserve.gateway.tools.plan import AnswerTools

#: The name that a chat's field has here.
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def responses_call(
    given: Mapping[str, Any],
    model: Model,
    headers: Options,
    *,
    history: Sequence[dict[str, Any]] = (),
    stored: Mapping[str, Any] | None = None,
) -> SdkCall:
    """`history`: the stored items before the input. `stored`: what the answer says about storing. Raises
    InvalidRequest and UnknownModel."""
    check_model(given.get("model"), model)
    request = validated(ResponsesRequest, supported("responses", given))
    source = "conversation" if stored and stored["conversation"] else "previous_response_id"
    messages, places = _messages(request, f"{source}.items", history)
    is_scored = LOGPROBS in (request.include or ())
    numbered = [(at, one) for at, one in enumerate(request.tools or ()) if isinstance(one, FunctionTool)]
    functions = [one for _, one in numbered]
    places |= {f"tools[{index}].function": f"tools[{at}]" for index, (at, _) in enumerate(numbered)}
    chat = {
        **{name: getattr(request, name) for name in SamplingFields.model_fields},
        "messages": messages,
        "max_tokens": request.max_output_tokens,
        "stream_options": _stream_options(request),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "chat_template_kwargs": request.chat_template_kwargs,
        "response_format": _format(request.text),
        "tools": [_tool(one) for one in functions] or None,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "logprobs": is_scored or None,
        "top_logprobs": request.top_logprobs if is_scored else None,
    }
    call = chat_call_as(chat, model, headers, _NAMES | places, _ignored(request))
    echoed = {**_echoed(request, functions), **(stored or {})}
    return replace(call, shown=replace(call.shown, is_repeated=True), echoed=echoed)


def _messages(
    request: ResponsesRequest, before: str, history: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages, and the item that each message or call comes from: of the input, or of `history`, which is called
    `before`."""
    messages: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    if request.instructions is not None:
        places["messages[0]"] = "instructions"
        messages.append({"role": "system", "content": request.instructions})
    _add_all(messages, places, before, history)
    if isinstance(request.input, str):
        places[f"messages[{len(messages)}]"] = "input"
        messages.append({"role": "user", "content": request.input})
    elif not request.input:
        raise InvalidRequest("input", "no item", "at least one item")
    else:
        _add_all(messages, places, "input", request.input)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return messages, places


def check_items(field: str, items: Sequence[dict[str, Any]]) -> None:
    """Raises InvalidRequest about the first item of `field` that cannot be part of a chat."""
    _add_all([], {}, field, items)


def _add_all(
    messages: list[dict[str, Any]], places: dict[str, str], field: str, items: Sequence[dict[str, Any]]
) -> None:
    for index, item in enumerate(items):
        given = {name: value for name, value in item.items() if value is not None}
        if added := _add(messages, place := f"{field}[{index}]", given):
            places.setdefault(f"messages[{len(messages) - 1}]", place)
            places[added] = place


def _add(messages: list[dict[str, Any]], place: str, item: dict[str, Any]) -> str:
    """Returns the place of the message or call among the messages; empty if nothing was added."""
    kind = item.get("type", "message")
    model = ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidRequest(f"{place}.type", "another value", f"one of {', '.join(ITEMS)}")
    try:
        one: Any = validated(model, item)
    except InvalidRequest as error:
        raise error.renamed(f"{place}.{error.field}") from None
    if isinstance(one, InputCall):
        calls = _assistant(messages).setdefault("tool_calls", [])
        call = {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        calls.append(call)
        return f"messages[{len(messages) - 1}].tool_calls[{len(calls) - 1}].function"
    if isinstance(one, InputReasoning):
        text = _reasoning(one)
        if not text:
            return ""
        _assistant(messages).setdefault("reasoning_content", []).append(text)
    elif isinstance(one, InputResult):
        messages.append({"role": "tool", "tool_call_id": one.call_id, "content": text_of(one.output)})
    elif one.role == "assistant" and messages and messages[-1]["role"] == "assistant" and _is_bare(messages[-1]):
        messages[-1]["content"] = text_of(one.content)
    else:
        messages.append({"role": one.role, "content": text_of(one.content)})
    return f"messages[{len(messages) - 1}]"


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is the assistant's, otherwise a new one without content."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _is_bare(message: dict[str, Any]) -> bool:
    """It has only reasoning so far."""
    return message["content"] is None and "tool_calls" not in message


def _reasoning(item: InputReasoning) -> str:
    """Our answers have reasoning as `content`, in parts of the type `reasoning_text`. Those of other servers may have
    a summary alone."""
    for parts in (item.content, item.summary):
        texts = [one["text"] for one in parts or () if isinstance(one, dict) and isinstance(one.get("text"), str)]
        if any(texts):
            return "\n".join(texts)
    return ""


def _stream_options(request: ResponsesRequest) -> dict[str, Any] | None:
    asked = request.stream_options
    return {"include_obfuscation": asked.include_obfuscation} if asked is not None and request.stream else None


def _ignored(request: ResponsesRequest) -> list[str]:
    """What the request asks for, and the answer lacks."""
    found = ignored_tools(request.tools)
    if request.text is not None and request.text.verbosity in ("low", "high"):
        found.append("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary not in (None, "none"):
        found.append("reasoning.summary")
    return found


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if isinstance(form, SchemaFormat):
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
    return None if form is None else {"type": form.type}


def _tool(one: FunctionTool) -> dict[str, Any]:
    function = one.model_dump(exclude_none=True)
    del function["type"]
    return {"type": "function", "function": function}


def _choice(choice: str | FunctionChoice | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FunctionChoice) else choice


def _echoed(request: ResponsesRequest, functions: Sequence[FunctionTool]) -> dict[str, Any]:
    """The fields of a request that its answer repeats."""
    form = None if request.text is None else request.text.format
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": (
            request.tool_choice.model_dump() if isinstance(request.tool_choice, FunctionChoice) else request.tool_choice
        )
        or "auto",
        "tools": [{"parameters": None, "strict": None, **one.model_dump(exclude_none=True)} for one in functions],
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs,
        "previous_response_id": None,
        "metadata": {},
        "store": False,
        "truncation": "disabled",
    }


# --- answer ---------------------------------------------------------------------------------------------------

_Event = dict[str, Any]


@final
class ResponsesWriter(Writer):
    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        self._head, self._call = head, call
        self._output = _Output(head.request_id, call.shown.logprobs, bytes_of)
        self._tools = None if call.tools is None else AnswerTools(call.tools, head.reasoning)
        self._sequence = 0
        self._has_begun = False
        self.is_stored = bool(call.echoed.get("store"))

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        [one] = completions
        list(self._feed(one.text, one.logprobs))
        list(self._close(one.finish_reason))
        return self.response(completions)

    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> Iterable[bytes]:
        yield from self._begin()
        for piece in pieces:
            for event in self._feed(piece.text, piece.logprobs):
                yield from self._frame(event)

    def end(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        yield from self.close(completions)
        yield from self.last(completions)

    def close(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        """The frames of `end` before the last one. After them, `response` is complete."""
        [one] = completions
        yield from self._begin()
        for event in self._close(one.finish_reason):
            yield from self._frame(event)

    def last(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        response = self.response(completions)
        yield from self._frame({"type": f"response.{response['status']}", "response": response})

    def response(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer, after its parts have been written."""
        [one] = completions
        return self._response(one)

    def error(self, reply: ErrorReply) -> Iterable[bytes]:
        failed = {
            **self._base("failed"),
            "error": {"code": "server_error", "message": reply.body["error"]["message"]},
            "output": self._output.shown(),
        }
        return self._frame({"type": "response.failed", "response": failed})

    # ------------------------------------------------------------------------------------------------------------

    def _begin(self) -> Iterable[bytes]:
        if not self._has_begun:
            self._has_begun = True
            for kind in ("response.created", "response.in_progress"):
                yield from self._frame({"type": kind, "response": {**self._base("in_progress"), "output": []}})

    def _feed(self, text: str, scored: Sequence[TokenLogprob]) -> Iterable[_Event]:
        deltas = [{"content": text}] if self._tools is None else self._tools.feed(text)
        for delta in deltas:
            yield from self._output.add(delta, scored)
            scored = ()

    def _close(self, reason: FinishReason) -> Iterable[_Event]:
        for delta in () if self._tools is None else self._tools.end():
            yield from self._output.add(delta, ())
        yield from self._output.close("completed" if reason is FinishReason.STOP else "incomplete")

    def _response(self, one: Completion) -> dict[str, Any]:
        is_whole = one.finish_reason is FinishReason.STOP
        used = one.usage
        return {
            **self._base("completed" if is_whole else "incomplete"),
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._output.shown(),
            "usage": {
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": {"cached_tokens": used.cached_prompt_tokens, "cache_write_tokens": 0},
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used.total_tokens,
            },
        }

    def _base(self, status: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{RESPONSE_ID_PREFIX}{head.request_id}",
            "object": "response",
            "created_at": head.created_s,
            "model": head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._call.echoed,
            "store": self.is_stored,
        }

    def _frame(self, event: _Event) -> Iterable[bytes]:
        """Whole if it is a delta. Others may have the logprobs of the whole answer, and come in pieces."""
        if event["type"].endswith(".delta"):
            make = sse.padded_frame if self._call.shown.is_padded else sse.frame
            yield sse.event_line(event) + make(self._numbered(event))
        else:
            yield sse.event_line(event)
            yield from sse.frame_pieces(self._numbered(event))

    def _numbered(self, event: _Event) -> _Event:
        self._sequence += 1
        return {**event, "sequence_number": self._sequence - 1}


@final
class _Output:
    """The items of an answer, and the events of their changes."""

    def __init__(self, request_id: str, most: int | None, bytes_of: BytesOf) -> None:
        """`most` as in logprobs.chat_content; None: no logprobs are shown."""
        self._items: list[dict[str, Any]] = []  # with logprobs as in the pieces, which take less memory than as JSON
        self._request_id, self._most, self._bytes_of = request_id, most, bytes_of
        self._is_open = False  # the last item

    def shown(self) -> list[dict[str, Any]]:
        return list(map(self._shown, self._items))

    def add(self, delta: dict[str, Any], scored: Sequence[TokenLogprob]) -> Iterable[_Event]:
        if "content" in delta:
            yield from self._add_text(delta["content"], () if self._most is None else scored)
            return
        if "reasoning_content" in delta:
            yield from self._add_reasoning(delta["reasoning_content"])
            return
        for part in delta["tool_calls"]:
            function = part["function"]
            if "id" in part:
                yield from self.close("completed")
                yield from self._open(
                    {
                        "type": "function_call",
                        "id": f"fc_{self._request_id}_{len(self._items)}",
                        "call_id": part["id"],
                        "name": function["name"],
                        "arguments": "",
                        "status": "in_progress",
                    }
                )
            else:
                self._items[-1]["arguments"] += function["arguments"]
                yield self._event("response.function_call_arguments.delta", delta=function["arguments"])

    def close(self, status: str) -> Iterable[_Event]:
        """Ends the item that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            text = {"text": part["text"], "logprobs": self._scores(part["logprobs"])}
            yield self._event("response.output_text.done", content_index=0, **text)
            yield self._event("response.content_part.done", content_index=0, part=self._shown(part))
        elif item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": self._shown(item)}

    # ------------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str, scored: Sequence[TokenLogprob]) -> Iterable[_Event]:
        if not (text or scored):
            return
        if not self._is_open or self._items[-1]["type"] != "message":
            yield from self.close("completed")
            message = {"type": "message", "id": f"msg_{self._request_id}_{len(self._items)}", "role": "assistant"}
            yield from self._open({**message, "status": "in_progress", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part=self._shown(part))
        [part] = self._items[-1]["content"]
        part["text"] += text
        part["logprobs"] += scored
        fields = {"delta": text, "logprobs": self._scores(scored)}
        yield self._event("response.output_text.delta", content_index=0, **fields)

    def _add_reasoning(self, text: str) -> Iterable[_Event]:
        if not self._is_open or self._items[-1]["type"] != "reasoning":
            yield from self.close("completed")
            item = {"type": "reasoning", "id": f"rs_{self._request_id}_{len(self._items)}", "summary": []}
            yield from self._open(
                {**item, "content": [{"type": "reasoning_text", "text": ""}], "status": "in_progress"}
            )
        self._items[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _open(self, item: dict[str, Any]) -> Iterable[_Event]:
        self._items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": self._shown(item)}

    def _event(self, kind: str, **fields: Any) -> _Event:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}

    def _scores(self, scored: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        return logprobs.chat_content(scored, self._most or 0, self._bytes_of)

    def _shown(self, value: dict[str, Any]) -> dict[str, Any]:
        """A copy, whose logprobs are read while it is encoded."""
        return {
            name: self._scores(one)
            if name == "logprobs"
            else [self._shown(part) for part in one]
            if isinstance(one, list)
            else one
            for name, one in value.items()
        }

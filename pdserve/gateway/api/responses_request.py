"""OpenAI's requests to /v1/responses, converted to those of a chat. Pure.

A response is not stored, so the input holds the whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pdserve.client.options import Options
from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest
from pdserve.gateway.api.field_support import supported
from pdserve.gateway.api.request_models import RefusalPart, SamplingFields
from pdserve.gateway.api.responses_models import (
    ITEMS,
    LOGPROBS,
    FunctionChoice,
    FunctionTool,
    InputCall,
    InputPart,
    InputReasoning,
    InputResult,
    OtherTool,
    ResponsesRequest,
    SchemaFormat,
    TextOptions,
)
from pdserve.gateway.api.sdk_call import SdkCall, chat_call, check_model, renamed_place, validated

MAX_NAMED: Final = 8  # types of ignored tools in the answer's header
#: The name that a chat's field has here.
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def responses_call(given: Mapping[str, Any], model: Model, headers: Options) -> SdkCall:
    """Raises InvalidRequest and UnknownModel."""
    check_model(given.get("model"), model)
    request = validated(ResponsesRequest, supported("responses", given))
    begin = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    messages, places = _messages(begin, request.input)
    if request.instructions is not None:
        places["messages[0]"] = "instructions"
    is_scored = LOGPROBS in (request.include or ())
    numbered = [(at, one) for at, one in enumerate(request.tools or ()) if isinstance(one, FunctionTool)]
    functions = [one for _, one in numbered]
    places |= {f"tools[{index}].function": f"tools[{at}]" for index, (at, _) in enumerate(numbered)}
    chat = {
        **{name: getattr(request, name) for name in SamplingFields.model_fields if name != "model"},
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
    try:
        call = chat_call({name: value for name, value in chat.items() if value is not None}, model, headers)
    except InvalidRequest as error:
        raise error.renamed(renamed_place(error.field, _NAMES | places)) from None
    names = {theirs: _NAMES.get(ours, ours) for theirs, ours in call.names.items()} | _NAMES | places
    shown = replace(call.shown, is_repeated=True)
    return replace(call, shown=shown, names=names, echoed=_echoed(request, functions), ignored=_ignored(request))


def _messages(
    messages: list[dict[str, Any]], found: str | list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages and those of the input, and the item of the input that each message or call comes from."""
    if isinstance(found, str):
        return [*messages, {"role": "user", "content": found}], {f"messages[{len(messages)}]": "input"}
    if not found:
        raise InvalidRequest("input", "no item", "at least one item")
    places: dict[str, str] = {}
    for index, item in enumerate(found):
        given = {name: value for name, value in item.items() if value is not None}
        if added := _add(messages, place := f"input[{index}]", given):
            places[added] = place
    return messages, places


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
        message = _assistant(messages)
        earlier = message.get("reasoning_content")
        message["reasoning_content"] = text if earlier is None else f"{earlier}\n{text}"
    elif isinstance(one, InputResult):
        messages.append({"role": "tool", "tool_call_id": one.call_id, "content": _text(one.output)})
    elif one.role == "assistant" and messages and messages[-1]["role"] == "assistant" and _is_bare(messages[-1]):
        messages[-1]["content"] = _text(one.content)
    else:
        messages.append({"role": one.role, "content": _text(one.content)})
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


def _text(content: str | Sequence[InputPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _stream_options(request: ResponsesRequest) -> dict[str, Any] | None:
    asked = request.stream_options
    return {"include_obfuscation": asked.include_obfuscation} if asked is not None and request.stream else None


def _ignored(request: ResponsesRequest) -> tuple[str, ...]:
    """What the request asks for, and the answer lacks."""
    kinds = sorted({one.type for one in request.tools or () if isinstance(one, OtherTool)})
    found = [f"tools.{kind}" for kind in kinds[:MAX_NAMED]]
    if request.text is not None and request.text.verbosity in ("low", "high"):
        found.append("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary not in (None, "none"):
        found.append("reasoning.summary")
    return tuple(found)


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

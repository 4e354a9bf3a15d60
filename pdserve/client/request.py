"""The messages of calls, built from Python values whose types are checked. No I/O.

A wrong type raises TypeError and names the argument. The server checks the values, once for every client; only values
that a message cannot contain are rejected here.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from pdserve.client.options import Options
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import Role, Sampling, Slo
from pdserve.telemetry import trace_context
from pdserve.v1 import cluster_pb2, inference_pb2
from pdserve.wire.convert import role_to_proto

LEAST_FLOAT32: Final = 2.0**-149
MAX_TIMEOUT_S: Final = 1e9  # gRPC turns much larger ones into past times
MAX_TOKENS_PER_CALL: Final = 8192  # whose bytes are asked for

_OF_REQUEST: Final = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
_OF_SAMPLING: Final = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_OF_OUTPUT: Final = inference_pb2.StructuredOutput.DESCRIPTOR.fields_by_name
_TEXTS: Final = ("role", "content", "tool_call_id", "name", "reasoning_content")  # of a message
_OPTIONAL: Final = ("tool_calls", *_TEXTS[2:])
_TARGETS: Final = tuple(inference_pb2.Slo.DESCRIPTOR.fields_by_name)
_SAMPLING: Final = frozenset(one.name for one in fields(Sampling))
_WHOLE: Final = {
    FieldDescriptor.CPPTYPE_INT32: f"{-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"0 to {2**64 - 1}",
}

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


def generate_request(
    prompt: Prompt, options: Mapping[str, Any], call: str = "generate"
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        setter = _SETTERS.get(name)
        if setter is None:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if value is not None:
            setter(request, name, value)
    return request


def tokenize_request(
    prompt: str | Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_special_tokens: bool | None = None,
    add_generation_prompt: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    of_chats = (tools, add_generation_prompt, reasoning_effort, chat_template_kwargs or None)
    is_chat_option = any(one is not None for one in of_chats)
    if isinstance(prompt, str) and not is_chat_option:
        request.text = _utf8("prompt", prompt)
    elif _is_list(prompt):
        request.chat.CopyFrom(_chat(prompt))
        request.chat.tools.extend(_tools("tools", () if tools is None else tools))
        if chat_template_kwargs:
            _set_template_arguments(request, "chat_template_kwargs", chat_template_kwargs)
        if reasoning_effort is not None:
            _set_of_chat(request, "reasoning_effort", reasoning_effort)
        if add_generation_prompt is not None:
            request.add_generation_prompt = add_generation_prompt
    else:
        raise _wrong("prompt", "a list of messages" if is_chat_option else "str or a list of messages", prompt)
    return request


def detokenize_request(token_ids: Sequence[int], prompt: Sequence[int] = ()) -> inference_pb2.DetokenizeRequest:
    for name, given in (("token_ids", token_ids), ("prompt", prompt)):
        if not _is_list(given):
            raise _wrong(name, "a list of int", given)
    return inference_pb2.DetokenizeRequest(
        token_ids=_token_ids("token_ids", token_ids), prompt_token_ids=_token_ids("prompt", prompt)
    )


def token_bytes_request(token_ids: Sequence[int]) -> inference_pb2.GetTokenBytesRequest:
    if not _is_list(token_ids):
        raise _wrong("token_ids", "a list of int", token_ids)
    return inference_pb2.GetTokenBytesRequest(token_ids=_token_ids("token_ids", token_ids))


def token_ids_of(prompt: Any) -> list[int] | None:
    """None for text and messages, which the server tokenises."""
    is_ids = _is_list(prompt) and (len(prompt) == 0 or _is_whole(prompt[0]))
    return _token_ids("prompt", prompt) if is_ids else None


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, str):
        request.text = _utf8("prompt", prompt)
    elif not _is_list(prompt):
        raise _wrong("prompt", "str, a list of token ids or a list of messages", prompt)
    elif len(prompt) > 0 and not _is_whole(prompt[0]):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids("prompt", prompt))


def _chat(messages: Sequence[Any]) -> inference_pb2.ChatPrompt:
    chat = inference_pb2.ChatPrompt()
    for index, message in enumerate(messages):
        name = f"prompt[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(name, "a dict with role and content (or an int, in a list of ints)", message)
        message = {key: value for key, value in message.items() if value is not None or key not in _OPTIONAL}
        if message.get("role") == "assistant" and not {"tool_calls", "reasoning_content"}.isdisjoint(message):
            message.setdefault("content", None)
        if not {"role", "content"} <= set(message) <= {"role", "content", *_OPTIONAL}:
            raise TypeError(
                f"{name} must have the keys role and content, and may have {', '.join(_OPTIONAL)}, "
                f"not {sorted(map(str, message))}"
            )
        texts = {key: message[key] for key in _TEXTS if key in message}
        if texts["content"] is None and message["role"] == "assistant":
            del texts["content"]  # absent in the message, which is not the same as an empty text
        for key, value in texts.items():
            if not isinstance(value, str):
                raise _wrong(f"{name}[{key!r}]", "str", value)
        added = chat.messages.add(**{key: _utf8(f"{name}[{key!r}]", value) for key, value in texts.items()})
        if "tool_calls" in message:
            added.tool_calls.extend(_tool_calls(f"{name}['tool_calls']", message["tool_calls"]))
    return chat


def _tool_calls(name: str, calls: Any) -> list[inference_pb2.ToolCall]:
    """In OpenAI's form: {"id": .., "type": "function", "function": {"name": .., "arguments": JSON as text}}."""
    if not _is_list(calls):
        raise _wrong(name, "a list of tool calls", calls)
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _wrong(f"{name}[{index}]", "a dict with id, type and function", call)
        # Some models' calls have no arguments, and clients send that back as null.
        arguments = "" if function.get("arguments") is None else function["arguments"]
        texts = {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}
        for key, value in texts.items():
            if not isinstance(value, str):
                raise _wrong(f"{name}[{index}] {key}", "str", value)
        found.append(inference_pb2.ToolCall(**{key: _utf8(f"{name}[{index}]", value) for key, value in texts.items()}))
    return found


def _set_tools(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    texts = _tools(name, value)
    if texts and not request.HasField("chat"):
        raise InvalidRequest(name, f"{len(texts)} tools", "messages as the prompt")
    if texts:
        request.chat.tools.extend(texts)


def _set_template_arguments(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, name: str, value: Any
) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(name, "a dict", value)
    if not request.HasField("chat"):
        raise InvalidRequest(name, "a dict", "messages as the prompt")
    if value:
        request.chat.template_arguments = _utf8(name, json.dumps(dict(value), ensure_ascii=False))


def _set_of_chat(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, name: str, value: Any) -> None:
    kind = bool if name == "allow_special_tokens" else str
    if not isinstance(value, kind):
        raise _wrong(name, kind.__name__, value)
    if not request.HasField("chat"):
        raise InvalidRequest(name, "a value", "messages as the prompt")
    setattr(request.chat, name, _utf8(name, value) if isinstance(value, str) else value)


def _tools(name: str, tools: Any) -> list[str]:
    if not _is_list(tools) or not all(isinstance(one, Mapping) for one in tools):
        raise _wrong(name, "a list of dict", tools)
    return [_utf8(name, json.dumps(one, ensure_ascii=False)) for one in tools]


def _set_whole(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not _is_whole(value):
        raise _wrong(name, "int", value)
    try:
        setattr(_holder(request, name), name, int(value))
    except ValueError:
        if name in _SAMPLING:
            values: dict[str, Any] = {name: int(value)}
            Sampling(**values)  # raises the server's error, if the value is outside its range too
        field = (_OF_REQUEST if name in _OF_REQUEST else _OF_SAMPLING)[name]
        raise InvalidRequest(name, value, _WHOLE[field.cpp_type]) from None


def _set_real(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _wrong(name, "float", value)
    holder = _holder(request, name)
    setattr(holder, name, float(value))
    if value and not getattr(holder, name):  # too small for the message; zero means something else
        setattr(holder, name, LEAST_FLOAT32)


def _set_flag(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, "bool", value)
    setattr(_holder(request, name), name, value)


def _set_text(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(name, "str", value)
    setattr(_holder(request, name), name, _utf8(name, value))


def _set_texts(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not _is_list(words) or not all(isinstance(word, str) for word in words):
        raise _wrong(name, "str or a list of str", value)
    getattr(_holder(request, name), name).extend(_utf8(name, word) for word in words)


def _set_token_ids(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not _is_list(value):
        raise _wrong(name, "a list of int", value)
    getattr(_holder(request, name), name).extend(_token_ids(name, value))


def _set_allowed(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    _set_token_ids(request, name, value)
    if len(value) == 0:
        # In the message, an empty list means any token.
        raise InvalidRequest(name, "an empty list", "at least one token id, or None for any")


def _set_logit_bias(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(name, "a dict of token id to number", value)
    for token_id, bias in zip(_token_ids(name, list(value)), value.values(), strict=True):
        if not isinstance(bias, Real) or isinstance(bias, bool):
            raise _wrong(f"{name}[{token_id}]", "float", bias)
        request.sampling.logit_bias[token_id] = float(bias)


def _set_structured(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    output = request.sampling.structured_output
    held = output.WhichOneof("kind")
    if held is not None:
        raise InvalidRequest(name, f"also {held}", "one of json_schema, json_object, regex, choice and grammar")
    if name == "json_object":
        if not isinstance(value, bool):
            raise _wrong(name, "bool", value)
        if value:
            output.json_object = True
    elif name == "choice":
        if not _is_list(value) or not all(isinstance(one, str) for one in value):
            raise _wrong(name, "a list of str", value)
        output.choice.strings.extend(_utf8(name, one) for one in value)
        output.choice.SetInParent()
    elif name == "json_schema" and isinstance(value, Mapping | bool):
        output.json_schema = _utf8(name, json.dumps(value, ensure_ascii=False))
    elif isinstance(value, str):
        setattr(output, name, _utf8(name, value))
    else:
        raise _wrong(name, "dict or str" if name == "json_schema" else "str", value)


def _set_slo(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if isinstance(value, Slo):
        value = {one: getattr(value, one) for one in _TARGETS if getattr(value, one) is not None}
    if not isinstance(value, Mapping):
        raise _wrong(name, "pdserve.Slo or a dict of targets", value)
    for target, seconds in value.items():
        if target not in _TARGETS:
            raise TypeError(f"{name} must have the keys {', '.join(_TARGETS)}, not {target!r}")
        if not isinstance(seconds, Real) or isinstance(seconds, bool):
            raise _wrong(f"{name}[{target!r}]", "float", seconds)
        setattr(request.slo, target, float(seconds))


def _check_traceparent(_request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(name, "str", value)
    if trace_context.parse(value) is None:
        raise InvalidRequest(name, "another value", "a W3C traceparent, such as 00-<32 hex>-<16 hex>-01")


def _check_timeout(_request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    checked_timeout_s(name, value)


def checked_timeout_s(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _wrong(name, "float", value)
    if not 0 < float(value) <= MAX_TIMEOUT_S:
        raise InvalidRequest(name, value, f"a positive number of seconds, at most {MAX_TIMEOUT_S:g}")
    return float(value)


_Setter = Callable[[inference_pb2.GenerateRequest, str, Any], None]
_BY_NAME: Final[Mapping[str, _Setter]] = {
    "allow_special_tokens": _set_of_chat,
    "allowed_token_ids": _set_allowed,
    "chat_template_kwargs": _set_template_arguments,
    "logit_bias": _set_logit_bias,
    "reasoning_effort": _set_of_chat,
    **dict.fromkeys(_OF_OUTPUT, _set_structured),
    "slo": _set_slo,
    "timeout_s": _check_timeout,
    "tools": _set_tools,
    "traceparent": _check_traceparent,
}
_BY_TYPE: Final[Mapping[Any, _Setter]] = {
    int | None: _set_whole,
    float | None: _set_real,
    bool | None: _set_flag,
    str | None: _set_text,
    str | Sequence[str] | None: _set_texts,
    Sequence[int] | None: _set_token_ids,
}


def _holder(request: inference_pb2.GenerateRequest, name: str) -> Any:
    """The message with the option's field."""
    return request if name in _OF_REQUEST else request.sampling


def _setters() -> dict[str, _Setter]:
    """One setter for each option, by its type unless its name has one. Raises TypeError on an option without a
    field."""
    found: dict[str, _Setter] = {}
    for name, hint in typing.get_type_hints(Options).items():
        if name not in _BY_NAME and name not in _OF_REQUEST and name not in _OF_SAMPLING:
            raise TypeError(f"the option {name} has no field of its name in inference.proto")
        found[name] = _BY_NAME[name] if name in _BY_NAME else _BY_TYPE[hint]
    return found


_SETTERS: Final = _setters()


def _token_ids(name: str, values: Sequence[Any]) -> list[int]:
    is_plain = set(map(type, values)) <= {int}  # one pass in C for the usual list of ints
    if not is_plain:
        for index, value in enumerate(values):
            if not _is_whole(value):
                raise _wrong(f"{name}[{index}]", "int", value)
    if len(values) > 0 and not (min(values) >= 0 and max(values) < 2**32):
        index = next(index for index, value in enumerate(values) if not 0 <= value < 2**32)
        raise InvalidRequest(f"{name}[{index}]", values[index], "a token id, 0 to 4294967295")
    return list(values) if is_plain else [int(value) for value in values]


def _utf8(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(name, f"a lone surrogate at {error.start}", "text that UTF-8 can carry") from None
    return text


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _wrong(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, not {type(value).__name__}")


def scale_request(prefill: int | None, decode: int | None) -> cluster_pb2.ChangeWorkersRequest:
    for name, count in (("prefill", prefill), ("decode", decode)):
        if count is not None:
            _check_unsigned(name, count)
    return cluster_pb2.ChangeWorkersRequest(scale=cluster_pb2.ScaleWorkers(prefill=prefill, decode=decode))


def roll_request(
    workers: Sequence[str], surge: int, settings: str, model: str, *, is_undo: bool
) -> cluster_pb2.ChangeWorkersRequest:
    _check_unsigned("surge", surge)
    request = cluster_pb2.RollWorkers(worker_ids=workers, surge=surge, settings=settings, is_undo=is_undo, model=model)
    return cluster_pb2.ChangeWorkersRequest(roll=request)


def _check_unsigned(name: str, value: int) -> None:
    if not 0 <= value < 2**32:
        raise InvalidRequest(name, value, "a number of workers")


def role_request(worker_id: str, role: Role) -> cluster_pb2.ChangeWorkersRequest:
    request = cluster_pb2.SetWorkerRole(worker_id=worker_id, role=role_to_proto(Role(role)))
    return cluster_pb2.ChangeWorkersRequest(role=request)

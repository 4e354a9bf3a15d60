"""Builds the messages of a call from Python values, and checks types while it does. No I/O.

A wrong type raises TypeError at once and names the argument. What values mean and which are allowed is the
server's to say, once for every client; only what the wire itself cannot carry is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, TypedDict

from pdserve.core.errors import InvalidRequest
from pdserve.core.types import Slo
from pdserve.v1 import inference_pb2

MAX_TIMEOUT_S: Final = 1e9  # gRPC turns much larger ones into the past

_WHOLE_OF_REQUEST: Final = ("priority", "truncate_prompt_tokens", "n", "best_of")

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Options(TypedDict, total=False):
    """Keyword arguments of generate() and stream(). Absent (or None) is not zero: the server's default holds.

    The server checks the ranges. docs/sampling.md tells in which order they are applied.
    """

    max_tokens: int | None  # 1 to the server's limit
    min_tokens: int | None  # 0 to max_tokens; neither end of sequence nor stop counts before
    temperature: float | None  # 0 (greedy) to 100
    top_k: int | None  # 0 keeps every token
    top_p: float | None  # above 0, to 1
    min_p: float | None  # 0 to 1
    repetition_penalty: float | None  # 0.01 to 100; over prompt and output
    presence_penalty: float | None  # -2 to 2; over the output
    frequency_penalty: float | None  # -2 to 2; over the output
    seed: int | None  # unsigned, 64 bits; drawn where absent
    stop: str | Sequence[str] | None  # at most 16 strings of 1 to 256 characters
    stop_token_ids: Sequence[int] | None  # at most 64
    ignore_eos: bool | None
    logprobs: int | None  # 0: of the drawn token; k, at most 64: and of the k most likely ones
    include_stop_in_output: bool | None
    skip_special_tokens: bool | None  # False spells them out in the text
    logit_bias: Mapping[int, float] | None  # token id to -100 to 100, added to its logit; at most 1024
    allowed_token_ids: Sequence[int] | None  # no other token is drawn; 1 to 8192
    bad_words: str | Sequence[str] | None  # texts that are not written; at most 128, of 1 to 256 characters
    prompt_logprobs: int | None  # as logprobs, of the prompt's own tokens; 0 to 20
    json_schema: Mapping[str, Any] | bool | str | None  # the answer is a document of it; docs/structured-output.md
    json_object: bool | None  # the answer is any JSON object
    regex: str | None  # the whole answer matches it
    choice: Sequence[str] | None  # the answer is one of them
    grammar: str | None  # Lark; of these five at most one
    n: int | None  # answers, 1 to 16; over 1 only with a temperature
    best_of: int | None  # n to 16: draws so many and gives the n likeliest per token, at the end
    slo: Slo | None
    timeout_s: float | None  # of the whole call, its retries included
    request_id: str | None
    priority: int | None  # larger goes first among requests of equal slack
    truncate_prompt_tokens: int | None  # keeps the last so many prompt tokens


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


def tokenize_request(prompt: str | Sequence[Mapping[str, str]]) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest()
    if isinstance(prompt, str):
        request.text = _utf8("prompt", prompt)
    elif _is_list(prompt):
        request.chat.CopyFrom(_chat(prompt))
    else:
        raise _wrong("prompt", "str or a list of messages", prompt)
    return request


def detokenize_request(token_ids: Sequence[int], prompt: Sequence[int] = ()) -> inference_pb2.DetokenizeRequest:
    for name, given in (("token_ids", token_ids), ("prompt", prompt)):
        if not _is_list(given):
            raise _wrong(name, "a list of int", given)
    return inference_pb2.DetokenizeRequest(
        token_ids=_token_ids("token_ids", token_ids), prompt_token_ids=_token_ids("prompt", prompt)
    )


def token_ids_of(prompt: Any) -> list[int] | None:
    """None of a text or of messages, which the server tokenises."""
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
        if set(message) != {"role", "content"}:
            raise TypeError(f"{name} must have exactly the keys role and content, not {sorted(map(str, message))}")
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise _wrong(f"{name}[{key!r}]", "str", message[key])
        chat.messages.add(
            role=_utf8(f"{name}['role']", message["role"]), content=_utf8(f"{name}['content']", message["content"])
        )
    return chat


def _set_whole(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not _is_whole(value):
        raise _wrong(name, "int", value)
    target = request if name in _WHOLE_OF_REQUEST else request.sampling
    try:
        setattr(target, name, int(value))
    except ValueError:
        bits = 64 if name == "seed" else 32
        expected = "a signed 32-bit integer" if name == "priority" else f"an unsigned {bits}-bit integer"
        raise InvalidRequest(name, value, expected) from None


def _set_real(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _wrong(name, "float", value)
    setattr(request.sampling, name, float(value))


def _set_flag(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, "bool", value)
    setattr(request.sampling, name, value)


def _set_texts(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not _is_list(words) or not all(isinstance(word, str) for word in words):
        raise _wrong(name, "str or a list of str", value)
    getattr(request.sampling, name).extend(_utf8(name, word) for word in words)


def _set_token_ids(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not _is_list(value):
        raise _wrong(name, "a list of int", value)
    getattr(request.sampling, name).extend(_token_ids(name, value))


def _set_allowed(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    _set_token_ids(request, name, value)
    if len(value) == 0:
        # On the wire none means any.
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
    if not isinstance(value, Slo):
        raise _wrong(name, "pdserve.Slo", value)
    request.slo.ttft_s = value.ttft_s
    request.slo.tpot_s = value.tpot_s


def _set_request_id(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(name, "str", value)
    request.request_id = _utf8(name, value)


def _check_timeout(_request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    checked_timeout_s(name, value)


def checked_timeout_s(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _wrong(name, "float", value)
    if not 0 < float(value) <= MAX_TIMEOUT_S:
        raise InvalidRequest(name, value, f"a positive number of seconds, at most {MAX_TIMEOUT_S:g}")
    return float(value)


_Setter = Callable[[inference_pb2.GenerateRequest, str, Any], None]
_SETTERS: Final[dict[str, _Setter]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), _set_whole),
    **dict.fromkeys(_WHOLE_OF_REQUEST, _set_whole),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _set_real),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _set_real),
    **dict.fromkeys(("ignore_eos", "include_stop_in_output", "skip_special_tokens"), _set_flag),
    **dict.fromkeys(("stop", "bad_words"), _set_texts),
    "stop_token_ids": _set_token_ids,
    "allowed_token_ids": _set_allowed,
    "logit_bias": _set_logit_bias,
    **dict.fromkeys(("json_schema", "json_object", "regex", "choice", "grammar"), _set_structured),
    "slo": _set_slo,
    "timeout_s": _check_timeout,
    "request_id": _set_request_id,
}


def _token_ids(name: str, values: Sequence[Any]) -> list[int]:
    if set(map(type, values)) - {int}:  # one pass in C for the usual list of ints
        for index, value in enumerate(values):
            if not _is_whole(value):
                raise _wrong(f"{name}[{index}]", "int", value)
    if len(values) > 0 and not (min(values) >= 0 and max(values) < 2**32):
        index = next(index for index, value in enumerate(values) if not 0 <= value < 2**32)
        raise InvalidRequest(f"{name}[{index}]", values[index], "a token id, which is an unsigned 32-bit integer")
    return [int(value) for value in values]


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

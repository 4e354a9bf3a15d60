"""Converts a request to the arguments of the SDK's calls. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ValidationError

from pdserve.client.options import Options
from pdserve.client.request import Prompt
from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest, UnknownModel
from pdserve.core.grammar import Grammar, GrammarKind, choice
from pdserve.core.setting import did_you_mean
from pdserve.core.types import MAX_DELTA_TOKENS, MAX_PROMPT_LOGPROBS, MAX_SEED
from pdserve.gateway.api.field_support import Endpoint, meant_field, supported
from pdserve.gateway.api.http_input import summarised
from pdserve.gateway.api.request_models import (
    TOO_MANY,
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    OtherTool,
    SamplingRequest,
    StreamOptions,
    TextRequest,
)
from pdserve.gateway.tools.grammars import terminal
from pdserve.gateway.tools.plan import ToolPlan, plan_tools

_STRUCTURES: Final = {one.value for one in GrammarKind}
_MESSAGES: Final = ("prompt", "chat", "messages")
MAX_IGNORED_TOOLS: Final = 8  # types of tools in the header of an answer
_PARTS: Final = ("'refusal'", "'document'")  # a union with one of these types is that of the parts of a content
MAX_KIND_CHARS: Final = 32  # of a text in an error, in place of one of a few names
_EMBEDDED: Final = "%json"  # begins a schema in a Lark grammar
_OPTIONS: Final = "x-guidance"  # llguidance's, of a schema within a grammar
_SENT_BACK: Final = ("assistant", "tool")  # clients add fields to these messages; they are ignored
TOKEN_BYTES: Final = 16  # of an answer: text and id of a token
SCORE_BYTES: Final = 128  # of a token with its logprob
# A piece of a stream takes this many times the memory of its tokens while it is written: as objects, as JSON, and as
# bytes that wait in the connection.
WRITTEN_TIMES: Final = 6
DEFAULT_TEXT_TOKENS: Final = 16  # OpenAI's, of /v1/completions
_PASSED: Final = (  # under the same name
    "temperature",
    "top_p",
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "cache_salt",
    "request_id",
)
AnyModel = TypeVar("AnyModel", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The optional parts of an answer that the caller requested."""

    is_streamed: bool = False
    is_repeated: bool = False  # the end of a stream repeats the whole answer
    has_usage: bool = False  # in a last chunk
    has_running_usage: bool = False  # in each chunk
    is_padded: bool = False  # each chunk to a multiple of some bytes
    has_token_ids: bool = False
    logprobs: int | None = None  # most likely tokens beside each one
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, in a field of their own
    has_echo: bool = False  # the prompt is repeated before its answers
    is_only_scored: bool = False  # no token was asked for, and the one that was sampled is not shown


@dataclass(frozen=True, slots=True, kw_only=True)
class SdkCall:
    """One call of AsyncClient.stream for each prompt, with the same options."""

    prompts: Sequence[Prompt]
    options: Options
    answers_each: int
    shown: Shown
    tools: ToolPlan | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # from an option of the SDK to the field of the request
    echoed: Mapping[str, Any] = field(default_factory=dict)  # fields that an answer of /v1/responses repeats
    ignored: tuple[str, ...] = ()  # parts of the request without effect, named in a header of the answer

    @property
    def shows_special_tokens(self) -> bool:
        return self.options.get("skip_special_tokens") is False

    def answer_bytes(self, model: Model) -> int:
        """The most that the answer takes in memory, before any of it exists; of a stream, at a time."""
        shown, each = self.shown, self.answers_each
        generated = 0  # A text alone is small, and clients name a large `max_tokens` that they never use.
        if shown.logprobs is not None:
            generated = (self.options.get("max_tokens") or 0) * _bytes_of_token(shown.logprobs)
        if shown.is_streamed:
            return self._streamed_bytes(each * generated, model)
        if not shown.has_echo and shown.prompt_logprobs is None:
            return each * generated * len(self.prompts)
        return sum(each * (generated + one) for one in self._prompt_bytes(model))

    def _streamed_bytes(self, generated: int, model: Model) -> int:
        """`generated`: all answers to a prompt. One piece of each prompt's answers waits until it is written."""
        shown, num_prompts = self.shown, len(self.prompts)
        piece = min(generated, MAX_DELTA_TOKENS * _bytes_of_token(shown.logprobs))
        waiting = generated if shown.is_repeated else 0
        echoed = self._prompt_bytes(model) if shown.has_echo else [0]
        return num_prompts * (waiting + piece) + WRITTEN_TIMES * piece + sum(echoed) + max(echoed)

    def _prompt_bytes(self, model: Model) -> list[int]:
        """Of each prompt, as often as it is shown in each of its answers."""
        shown, found = self.shown, []
        for prompt in self.prompts:
            num_tokens = model.max_context_tokens
            if isinstance(prompt, str):
                num_tokens = min(num_tokens, len(prompt.encode("utf-8", "surrogatepass")))
            elif prompt and isinstance(prompt[0], int):
                num_tokens = min(num_tokens, len(prompt))
            if (kept := self.options.get("truncate_prompt_tokens")) is not None:
                num_tokens = min(num_tokens, kept)
            echoed = num_tokens * _bytes_of_token(shown.logprobs) if shown.has_echo else 0
            scored = 0 if shown.prompt_logprobs is None else num_tokens * _bytes_of_token(shown.prompt_logprobs)
            found.append(echoed + scored)
        return found

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The error about a field of the SDK's call, as one about the request's field."""
        return error.renamed(renamed_place(error.field.removeprefix("chat."), self.names))


def renamed_place(place: str, names: Mapping[str, str]) -> str:
    """The longest known beginning has another name: `messages[3].content` may be `input[5].content`."""
    known = [one for one in names if place.startswith(one) and place[len(one) : len(one) + 1] in ("", ".", "[")]
    longest = max(known, key=len, default=None)
    return place if longest is None else names[longest] + place[len(longest) :]


def _bytes_of_token(logprobs: int | None) -> int:
    return TOKEN_BYTES if logprobs is None else TOKEN_BYTES + (1 + logprobs) * SCORE_BYTES


def chat_call(given: Mapping[str, Any], model: Model, headers: Options) -> SdkCall:
    """Raises InvalidRequest and UnknownModel. `headers` are the options that came in headers."""
    request = validated(ChatRequest, _checked("chat", given, model))
    if not request.messages:
        raise InvalidRequest("messages", "no message", "at least one message")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequest("max_tokens", request.max_tokens, "no value beside max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs", request.top_logprobs, "logprobs to be true beside it")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    most = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    options = _options(request, model, default_tokens(model) if most is None else most, logprobs)
    switches = request.chat_template_kwargs or {}
    if switches:
        options["chat_template_kwargs"] = switches
    for name in ("reasoning_effort", "stop_in_reasoning", "allow_special_tokens"):
        if getattr(request, name) is not None:
            options[name] = getattr(request, name)
    structure: dict[str, Any] = {name: options.pop(name) for name in _STRUCTURES if name in options}
    is_auto = bool(request.tools) and request.tool_choice in (None, "auto")
    plan = plan_tools(
        request.tools or (),
        request.tool_choice,
        model,
        is_parallel=request.parallel_tool_calls is not False,
        is_thinking=switches.get("enable_thinking") is not False,
        answer=_answer_form(structure) if is_auto and structure else None,
    )
    if structure and not (plan is not None and plan.tools):
        options |= structure
        plan = None  # a grammar does not allow the marks of reasoning
    if plan is not None:
        options |= {**plan.options, "tools": plan.tools}
    names = dict.fromkeys(_MESSAGES, "messages") | ({"logprobs": "top_logprobs"} if logprobs else {})
    if plan is not None and plan.tools:
        names |= dict.fromkeys(_STRUCTURES, "tools")
    return _call(request, [sdk_messages(request.messages)], {**options, **headers}, logprobs, names, plan)


def chat_call_as(
    chat: Mapping[str, Any], model: Model, headers: Options, names: Mapping[str, str], ignored: Sequence[str]
) -> SdkCall:
    """That of a chat which was made from another request. `chat` may have None for absent fields. `names`: what the
    chat's fields are called in the request. Raises InvalidRequest and UnknownModel."""
    try:
        call = chat_call({name: value for name, value in chat.items() if value is not None}, model, headers)
    except InvalidRequest as error:
        raise error.renamed(renamed_place(error.field, names)) from None
    own = {theirs: names.get(ours, ours) for theirs, ours in call.names.items()}
    return dataclasses.replace(call, names=own | dict(names), ignored=tuple(ignored))


def ignored_tools(tools: Sequence[Any] | None) -> list[str]:
    """Names for the answer's header."""
    kinds = sorted({one.type for one in tools or () if isinstance(one, OtherTool)})
    return [f"tools.{kind}" for kind in kinds[:MAX_IGNORED_TOOLS]]


def _answer_form(structure: Mapping[str, Any]) -> dict[str, Any] | str:
    """Of an answer that may be calls instead: a schema, or a terminal of Lark. Raises InvalidRequest."""
    if "json_object" in structure:
        return {"type": "object"}
    try:
        for name, make in (("choice", choice), ("regex", partial(Grammar, GrammarKind.REGEX))):
            if name in structure and _EMBEDDED not in (found := terminal(make(structure[name]))):
                return found
    except InvalidRequest as error:
        raise error.renamed("structured_outputs") from None
    schema = structure.get("json_schema")
    if schema is True:
        return {}
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest("structured_outputs", "a text that does not parse", "a JSON schema") from None
    if not isinstance(schema, dict):
        expected = "a JSON schema, a choice or a regex beside tools, or the tool_choice none, required or a function"
        raise InvalidRequest("structured_outputs", ", ".join(structure), expected)
    if _OPTIONS in schema:  # would change how the whole grammar is compiled
        raise InvalidRequest("response_format", f"a schema with {_OPTIONS}", "a schema without it")
    return schema


def text_call(given: Mapping[str, Any], model: Model, headers: Options) -> SdkCall:
    """Raises InvalidRequest and UnknownModel."""
    request = validated(TextRequest, _checked("text", given, model))
    default = min(DEFAULT_TEXT_TOKENS, default_tokens(model))
    is_only_scored = request.max_tokens == 0
    if is_only_scored and request.min_tokens:
        raise InvalidRequest("min_tokens", request.min_tokens, "0 beside max_tokens 0")
    # The cluster always samples a token, which is not shown.
    most = 1 if is_only_scored else default if request.max_tokens is None else request.max_tokens
    options, logprobs = _options(request, model, most, request.logprobs), request.logprobs
    names = {} if isinstance(request.prompt, str) else {"token_ids": "prompt"}
    if request.echo and logprobs is not None:
        if logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest("logprobs", logprobs, f"0 to {MAX_PROMPT_LOGPROBS} beside echo")
        options["prompt_logprobs"] = max(logprobs, request.prompt_logprobs or 0)
        names |= {} if request.prompt_logprobs else {"prompt_logprobs": "logprobs"}
    if request.best_of is not None:
        options["best_of"] = request.best_of
    prompts = _prompts(request.prompt)
    call = _call(request, prompts, {**options, **headers}, logprobs, names)
    shown = dataclasses.replace(call.shown, has_echo=bool(request.echo), is_only_scored=is_only_scored)
    return dataclasses.replace(call, shown=shown)


def default_tokens(model: Model) -> int:
    """Of an answer whose request gives no limit: the model's own default, up to the server's limit."""
    asked = model.sampling_defaults.max_tokens
    return model.max_new_tokens if asked is None else min(asked, model.max_new_tokens)


def validated(kind: type[AnyModel], given: Mapping[str, Any]) -> AnyModel:
    """Raises InvalidRequest, naming the first wrong field; the message does not repeat a text."""
    try:
        return cast(AnyModel, kind.model_validate(given))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A union has errors of all its alternatives, of which this one says most.
        first = next((one for one in errors if one["type"] in (TOO_MANY, "union_tag_invalid")), None)
        if first is None:  # that parts are no text says nothing about what is wrong in them
            first = next((one for one in errors if not _is_parts_for_text(one)), errors[0])
        parts = _parts(first["loc"], given, is_missing=first["type"] == "missing")
        place = "".join(parts).removeprefix(".")
        if first["type"] == "missing":
            raise InvalidRequest(place, "no value", "a value, because the field is required") from None
        if first["type"] == "extra_forbidden":
            meant = did_you_mean(meant_field(kind, first["loc"]))
            raise InvalidRequest(place, "an unknown field", f"no such field{meant}") from None
        if first["type"] == TOO_MANY:
            raise InvalidRequest(
                place or "body", f"{first['ctx']['seen']} {first['ctx']['noun']}", first["msg"]
            ) from None
        field = kind.model_fields.get(str(first["loc"][0])) if first["loc"] else None
        about = None if field is None else field.description
        kind_error = _wrong_kind(place, first)
        if kind_error is not None:
            raise kind_error from None
        is_union = first["type"] == "union_tag_invalid" or len(parts) < len(first["loc"])
        # pydantic's message about an unknown tag repeats it.
        message = f"one of {first['ctx']['expected_tags']}" if first["type"] == "union_tag_invalid" else first["msg"]
        expected = message.removeprefix("Input should be ").removeprefix("Value error, ")
        expected = expected.replace("String should match pattern", "a text that matches")
        raise InvalidRequest(
            place or "body", summarised(first["input"]), about if is_union and about else expected
        ) from None


def _is_parts_for_text(error: Any) -> bool:
    given = error["input"]
    return error["type"] == "string_type" and isinstance(given, list) and bool(given) and isinstance(given[0], dict)


def _wrong_kind(place: str, first: Any) -> InvalidRequest | None:
    """For a short text that is not one of a few names: it is no prompt, so the message may repeat it."""
    if first["type"] == "union_tag_invalid" and any(
        one in first["ctx"]["expected_tags"] for one in _PARTS
    ):  # part of a content
        field, seen = first["ctx"]["discriminator"].strip("'"), str(first["ctx"]["tag"])
        place = f"{place}.{field}"
        expected = first["ctx"]["expected_tags"].partition(",")[0] + ": this server takes text only"
    elif first["type"] == "literal_error" and isinstance(first["input"], str):
        seen, expected = first["input"], first["ctx"]["expected"]
    else:
        return None
    if len(seen) > MAX_KIND_CHARS or not seen.isprintable():
        return None
    return InvalidRequest(place, repr(seen), expected)


def _parts(location: Sequence[str | int], given: Any, *, is_missing: bool) -> list[str]:
    """The parts of a place as OpenAI writes it, such as `.messages`, `[0]` and `.content`. Without the names that
    pydantic gives to the alternatives of a union: they are no part of the request."""
    found = []
    for index, part in enumerate(location):
        is_item = isinstance(given, list) and isinstance(part, int)
        if is_item or (isinstance(given, dict) and part in given):
            inside: Any = given
            given = inside[part]
        elif not (is_missing and index == len(location) - 1):
            continue
        found.append(f"[{part}]" if is_item else f".{part}")
    return found


def check_model(name: object, model: Model) -> None:
    """Raises UnknownModel. Without a name the served model is meant."""
    if isinstance(name, str) and name not in model.names:
        raise UnknownModel(name, model.names)


def sdk_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Text parts are joined by line ends, as in vLLM. Templates know `system`, which `developer` replaced.

    Raises InvalidRequest.
    """
    return [_sdk_message(f"messages[{index}]", one) for index, one in enumerate(messages)]


def _sdk_message(place: str, message: Message) -> dict[str, Any]:
    content = message.refusal if message.content is None else message.content
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if content is None and not message.tool_calls and (reasoning is None or message.role != "assistant"):
        raise InvalidRequest(f"{place}.content", "no value", "text, or tool_calls or reasoning of an assistant")
    if bool(message.tool_calls) and message.role != "assistant":
        raise InvalidRequest(f"{place}.tool_calls", f"calls of {message.role}", "calls of an assistant only")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise InvalidRequest(
            f"{place}.tool_call_id",
            "no value" if message.tool_call_id is None else f"a value in a message of role {message.role}",
            "the call's id, in messages of role tool only",
        )
    if message.role not in _SENT_BACK and message.model_extra:
        raise InvalidRequest(f"{place}.{next(iter(message.model_extra))}", "an unknown field", "no such field")
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": None if content is None else text_of(content)}
    if message.tool_calls:
        found["tool_calls"] = [one.model_dump() for one in message.tool_calls]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": reasoning}
    found |= {name: value for name, value in optional.items() if value is not None}
    return found


def text_of(content: Any) -> str:
    """Of a content, which is a text or parts of one."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _checked(endpoint: Endpoint, given: Mapping[str, Any], model: Model) -> dict[str, Any]:
    check_model(given.get("model"), model)
    return supported(endpoint, given)


def _call(
    request: SamplingRequest,
    prompts: Sequence[Prompt],
    options: Mapping[str, Any],
    logprobs: int | None,
    names: Mapping[str, str],
    tools: ToolPlan | None = None,
) -> SdkCall:
    is_streamed = bool(request.stream)
    if is_streamed and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", request.prompt_logprobs, "no value beside stream")
    if request.stream_options is not None and not is_streamed:
        raise InvalidRequest("stream_options", "an object", "stream to be true beside it")
    stream_options = request.stream_options or StreamOptions()
    structure = "response_format" if request.structured_outputs is None else "structured_outputs"
    return SdkCall(
        prompts=prompts,
        options=cast(Options, options),
        answers_each=request.n or 1,
        shown=Shown(
            is_streamed=is_streamed,
            has_usage=stream_options.include_usage,
            has_running_usage=stream_options.include_usage and stream_options.continuous_usage_stats,
            is_padded=stream_options.include_obfuscation,
            has_token_ids=bool(request.return_token_ids),
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
        ),
        tools=tools,
        names={**dict.fromkeys(_STRUCTURES, structure), **names},
    )


def _options(request: SamplingRequest, model: Model, max_tokens: int, logprobs: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(request, name) for name in _PASSED if getattr(request, name) is not None}
    found["max_tokens"] = max_tokens
    if request.model in model.adapters:
        found["model"] = request.model
    if logprobs is not None:
        found["logprobs"] = logprobs
    if request.top_k is not None:
        found["top_k"] = 0 if request.top_k == -1 else request.top_k
    if request.seed is not None:
        found["seed"] = request.seed & MAX_SEED if -(2**63) <= request.seed < 0 else request.seed
    if request.priority is not None:
        if not -(2**31) < request.priority <= 2**31:  # said here, because the SDK's message would have the other sign
            raise InvalidRequest("priority", request.priority, f"{1 - 2**31} to {2**31}")
        found["priority"] = -request.priority  # in vLLM, smaller values are served first
    if request.include_stop_str_in_output is not None:
        found["include_stop_in_output"] = request.include_stop_str_in_output
    if request.logit_bias is not None:
        found["logit_bias"] = {_token_id(name): bias for name, bias in request.logit_bias.items()}
    return found | _structure(request)


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) <= 10):
        raise InvalidRequest("logit_bias", repr(name), "token ids as keys")
    return int(name)


def _structure(request: SamplingRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(request.response_format, JsonObjectFormat):
        found["json_object"] = True
    elif isinstance(request.response_format, JsonSchemaFormat):
        schema = request.response_format.json_schema.schema_
        found |= {"json_object": True} if schema is None else {"json_schema": schema}
    if (asked := request.structured_outputs) is not None:
        vllm = {
            "json_schema": asked.json_,
            "json_object": asked.json_object or None,
            "regex": asked.regex,
            "choice": asked.choice,
            "grammar": asked.grammar,
        }
        given = {name: value for name, value in vllm.items() if value is not None}
        if len(given) != 1 or found:
            also = " and a response_format" if found else ""
            raise InvalidRequest("structured_outputs", f"{len(given)} of them{also}", "exactly one")
        found = given
    return found


def _prompts(prompt: Any) -> list[Prompt]:
    """`prompt` is one of the forms of TextRequest.prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt", "an empty list", "a text, token ids, or a list of either")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)

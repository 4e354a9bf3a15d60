"""Whether each field of OpenAI's, Anthropic's and vLLM's requests is supported, ignored or rejected. Pure.

A field that cannot change the answer may be ignored. Any other unsupported field is rejected, unless its value requests
the default behaviour. A name that is in no table is rejected as unknown (docs/decisions/0017-http-gateway.md).
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

from pdserve.core.setting import did_you_mean, nearest
from pdserve.gateway.api.errors import UnknownField, UnsupportedField
from pdserve.gateway.api.message_models import MessagesRequest
from pdserve.gateway.api.request_models import ChatRequest, ResponsesRequest, TextRequest

Endpoint = Literal["chat", "text", "responses", "messages"]
MODELS: Final[Mapping[Endpoint, type[BaseModel]]] = {
    "chat": ChatRequest,
    "text": TextRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


@dataclass(frozen=True, slots=True)
class Rejected:
    """`harmless` values request the default behaviour; with one of them the field is ignored."""

    reason: str
    harmless: tuple[Any, ...] = ()


_NOT_STORED: Final = "for OpenAI's account pages; nothing is stored"
#: Both endpoints.
_IGNORED: Final[Mapping[str, str]] = {
    "user": "the caller's own label; the token identifies the caller",
}
_IGNORED_CHAT: Final[Mapping[str, str]] = {
    **_IGNORED,
    "metadata": _NOT_STORED,
    "safety_identifier": _NOT_STORED,
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "cached prefixes stay while memory allows",
    "prompt_cache_options": "prefixes are found by their content",
}
IGNORED: Final[Mapping[Endpoint, Mapping[str, str]]] = {
    "chat": _IGNORED_CHAT,
    "text": _IGNORED,
    "responses": {**_IGNORED_CHAT, "client_metadata": "the client's own labels"},
    "messages": {
        "metadata": _NOT_STORED,
        "billing_policy": "of Anthropic's accounts",
        "fallbacks": "there is one model",
        "fallback_credit_token": "of Anthropic's accounts",
        "cache_control": "prefixes are found by their content; a `ttl` is a hint, as the header `x-reuse-within-s`",
        "context_management": "the messages are used as they are",
        "diagnostics": "`explain` says where a request was placed",
        "inference_geo": "the workers are where they are",
        "service_tier": "there are no tiers; see priority",
        "speed": "there are no tiers; see priority",
        "workspace_id": "of Anthropic's accounts",
    },
}

_TEMPLATE: Final = "the chat template is the model's own"
#: vLLM's, of both endpoints.
_REJECTED: Final[Mapping[str, Rejected]] = {
    "use_beam_search": Rejected("the SDK's beam_search() does it", (False,)),
    "length_penalty": Rejected("of beam search", (1.0,)),
    "add_special_tokens": Rejected("texts get the tokenizer's special tokens, rendered chats their template's"),
    "spaces_between_special_tokens": Rejected("special tokens are joined as their tokenizer does", (True,)),
    "logits_processors": Rejected("code does not come from requests"),
    "kv_transfer_params": Rejected("the router places requests"),
    "vllm_xargs": Rejected("there are no further arguments"),
    "repetition_detection": Rejected("not supported"),
}
_REJECTED_CHAT: Final[Mapping[str, Rejected]] = {
    **_REJECTED,
    "functions": Rejected("replaced by tools in OpenAI's API", ([],)),
    "function_call": Rejected("replaced by tool_choice in OpenAI's API", ("none", "auto")),
    "audio": Rejected("answers are text"),
    "modalities": Rejected("answers are text", (["text"],)),
    "moderation": Rejected("answers are not moderated"),
    "prediction": Rejected("drafts come from the text itself"),
    "verbosity": Rejected("the models have no such switch", ("medium",)),
    "service_tier": Rejected("there are no tiers; see priority", ("auto", "default")),
    "store": Rejected("nothing is stored", (False,)),
    "web_search_options": Rejected("there is no web search"),
    "chat_template": Rejected(_TEMPLATE),
    "documents": Rejected(_TEMPLATE, ([],)),
    "add_generation_prompt": Rejected("the answer is always the assistant's next message", (True,)),
    "continue_final_message": Rejected("the answer is always the assistant's next message", (False,)),
    "echo": Rejected("of /v1/completions", (False,)),
    "best_of": Rejected("of /v1/completions", (1,)),
    "mm_processor_kwargs": Rejected("prompts are text", ({},)),
    "include_reasoning": Rejected("reasoning is always returned, apart from the text", (True,)),
}
_REJECTED_TEXT: Final[Mapping[str, Rejected]] = {
    **_REJECTED,
    "suffix": Rejected("the models complete texts at their end", ("",)),
    "prompt_embeds": Rejected("a prompt is text or token ids"),
}
_NO_STORE: Final = "nothing is stored unless store_bytes of the gateway is set"
_REJECTED_RESPONSES: Final[Mapping[str, Rejected]] = {
    "access_programs": Rejected("of OpenAI's accounts"),
    "background": Rejected("nothing is stored, so an answer cannot be fetched later", (False,)),
    "background_options": Rejected("nothing is stored, so an answer cannot be fetched later"),
    "context_management": Rejected("the input is used as it is"),
    "conversation": Rejected(f"{_NO_STORE}; the input holds the whole conversation"),
    "image": Rejected("answers are text"),
    "max_tool_calls": Rejected("of OpenAI's own tools"),
    "moderation": Rejected("answers are not moderated"),
    "previous_response_id": Rejected(f"{_NO_STORE}; the input holds the whole conversation"),
    "prompt": Rejected("nothing is stored"),
    "service_tier": Rejected("there are no tiers", ("auto", "default")),
    "store": Rejected(_NO_STORE, (False,)),
    "truncation": Rejected("an input over the context window is an error", ("disabled",)),
}
_REJECTED_MESSAGES: Final[Mapping[str, Rejected]] = {
    "compaction": Rejected("the messages are used as they are"),
    "container": Rejected("of Anthropic's own tools"),
    "mcp_servers": Rejected("of Anthropic's own tools", ([],)),
    "thread": Rejected("nothing is stored; the messages hold the whole conversation"),
    "user_profile_id": Rejected("of Anthropic's accounts"),
}
REJECTED: Final[Mapping[Endpoint, Mapping[str, Rejected]]] = {
    "chat": _REJECTED_CHAT,
    "text": _REJECTED_TEXT,
    "responses": _REJECTED_RESPONSES,
    "messages": _REJECTED_MESSAGES,
}


def supported(endpoint: Endpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `given` that the endpoint's model reads. Raises UnsupportedField and UnknownField."""
    fields, ignored, rejected = MODELS[endpoint].model_fields, IGNORED[endpoint], REJECTED[endpoint]
    found = {}
    for name, value in given.items():
        if name in fields:
            found[name] = value
        elif name in ignored:
            continue
        elif name in rejected:
            if not any(type(value) is type(one) and value == one for one in rejected[name].harmless):
                raise UnsupportedField(name, "a value", f"the field to be absent: {rejected[name].reason}")
        else:
            expected = "only fields of this endpoint (docs/reference/http.md)"
            raise UnknownField(name, "an unknown field", expected + did_you_mean(nearest(name, fields)))
    return found


def meant_field(kind: type[BaseModel], location: Sequence[str | int]) -> str | None:
    """The name that is nearest to the unknown one at the end of pydantic's `location`, in the objects before it."""
    models: list[type[BaseModel]] = [kind]
    for step in location[:-1]:
        fields = [one.model_fields.get(str(step)) for one in models]
        # A step that is no field is an index, or the tag of a union.
        models = [found for one in fields if one is not None for found in _models_in(one.annotation)] or models
    known = [field.alias or name for one in models for name, field in one.model_fields.items()]
    return nearest(str(location[-1]), known)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for one in typing.get_args(annotation) for found in _models_in(one)]

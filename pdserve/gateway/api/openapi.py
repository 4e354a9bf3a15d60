"""The table of all endpoints, and the OpenAPI document that follows from it, as JSON and as a page. Pure."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pdserve.gateway.api import response_models as answers
from pdserve.gateway.api.conversations import ConversationItems, ConversationRequest, ConversationUpdate
from pdserve.gateway.api.errors import ROWS
from pdserve.gateway.api.field_support import IGNORED, MODELS
from pdserve.gateway.api.http_input import (
    API_KEY,
    EXPECTED_TOKENS,
    REQUEST_ID,
    REUSE_WITHIN_S,
    SESSION_ID,
    SLO_TASK_S,
    TARGETS,
)
from pdserve.gateway.api.message_models import MessagesRequest
from pdserve.gateway.api.request_models import (
    ChatRequest,
    DetokenizeRequest,
    LoadLoraRequest,
    ResponsesRequest,
    TextRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)
from pdserve.gateway.api.response_models import ErrorAnswer

# --- endpoints ------------------------------------------------------------------------------------------------
# Who may call each, what it reads and what it answers.
#
# An endpoint needs the caller's token unless it is declared open here. Open endpoints show nothing of the cluster but
# whether it serves: load balancers ask for that, and pages and the document are the same in every installation.

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
HTML: Final = "text/html"
PLAIN: Final = "text/plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    summary: str
    tag: str = "server"
    is_open: bool = False  # needs no token
    is_control: bool = False  # for operators, who have connections of their own for it
    request: type[BaseModel] | None = None
    #: By status: the model of a JSON body, or another media type; None: no body.
    answers: Mapping[int, type[BaseModel] | str | None] = field(default_factory=dict)
    is_streamed: bool = False  # on request, with server-sent events
    headers: tuple[str, ...] = ()  # that the endpoint requires
    error: type[BaseModel] = ErrorAnswer


def _stored(summary: str, request: type[BaseModel] | None = None, answer: type[BaseModel] | str = JSON) -> Operation:
    return Operation(summary=summary, tag="stored", request=request, answers={200: answer})


_HEALTH: Final = {200: answers.HealthAnswer, 503: answers.HealthAnswer}
_PAGE: Final[Mapping[int, type[BaseModel] | str | None]] = {200: HTML}

#: By method and path.
OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answers a chat",
        tag="generation",
        request=ChatRequest,
        answers={200: answers.ChatAnswer},
        is_streamed=True,
    ),
    ("POST", "/v1/completions"): Operation(
        summary="Continues texts",
        tag="generation",
        request=TextRequest,
        answers={200: answers.TextAnswer},
        is_streamed=True,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answers in the form of OpenAI's responses, which are stored if `store_bytes` is set",
        tag="generation",
        request=ResponsesRequest,
        answers={200: answers.ResponseAnswer},
        is_streamed=True,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answers in the form of Anthropic's messages; nothing is stored",
        tag="generation",
        request=MessagesRequest,
        answers={200: answers.MessageAnswer},
        is_streamed=True,
        error=answers.MessagesErrorAnswer,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Counts the prompt tokens of a request to /v1/messages",
        tag="tokens",
        request=MessagesRequest,
        answers={200: answers.CountAnswer},
        error=answers.MessagesErrorAnswer,
    ),
    ("GET", "/v1/models"): Operation(
        summary="Lists the served model and its LoRA adapters", answers={200: answers.ModelsAnswer}
    ),
    ("GET", "/v1/responses/{response_id}"): _stored("Returns a stored response", answer=answers.ResponseAnswer),
    ("DELETE", "/v1/responses/{response_id}"): _stored("Deletes a stored response"),
    ("POST", "/v1/responses/{response_id}/cancel"): _stored(
        "Rejects the call, because no response is made in the background"
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): _stored(
        "Lists the input of a stored response, by pages of `limit`"
    ),
    ("POST", "/v1/conversations"): _stored(
        "Creates a conversation, which turns of /v1/responses extend", ConversationRequest
    ),
    ("GET", "/v1/conversations/{conversation_id}"): _stored("Returns a conversation without its items"),
    ("POST", "/v1/conversations/{conversation_id}"): _stored(
        "Replaces the metadata of a conversation", ConversationUpdate
    ),
    ("DELETE", "/v1/conversations/{conversation_id}"): _stored("Deletes a conversation and its items"),
    ("GET", "/v1/conversations/{conversation_id}/items"): _stored(
        "Lists the items of a conversation, by pages of `limit`"
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): _stored(
        "Adds up to 20 items to a conversation", ConversationItems
    ),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): _stored("Returns an item of a conversation"),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): _stored(
        "Deletes an item and returns its conversation"
    ),
    ("GET", "/v1/sessions"): Operation(
        summary="Lists the sessions of the caller's tenant, by pages of `limit`, and where their prefixes are cached",
        answers={200: answers.SessionsAnswer},
    ),
    ("DELETE", "/v1/sessions/{session_id:path}"): Operation(
        summary="Ends a session of the caller's tenant, whose cached prefixes then leave first",
        answers={200: answers.SessionEndedAnswer},
    ),
    ("GET", "/v1/models/{name:path}"): Operation(summary="Describes the model", answers={200: answers.ModelAnswer}),
    ("POST", "/v1/load_lora_adapter"): Operation(
        summary="Loads a LoRA adapter on all workers; for operators",
        is_control=True,
        request=LoadLoraRequest,
        answers={200: PLAIN},
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        summary="Ends the use of a LoRA adapter by new requests; for operators",
        is_control=True,
        request=UnloadLoraRequest,
        answers={200: PLAIN},
    ),
    ("POST", "/tokenize"): Operation(
        summary="Tokenizes a text or a chat",
        tag="tokens",
        request=TokenizeRequest,
        answers={200: answers.TokenizeAnswer},
    ),
    ("POST", "/detokenize"): Operation(
        summary="Returns the text of tokens; special tokens have none",
        tag="tokens",
        request=DetokenizeRequest,
        answers={200: answers.DetokenizeAnswer},
    ),
    ("GET", "/version"): Operation(summary="Returns the version of pdserve", answers={200: answers.VersionAnswer}),
    ("GET", "/load"): Operation(
        summary="Counts the requests of this gateway that are being answered; for operators",
        is_control=True,
        answers={200: answers.LoadAnswer},
    ),
    ("GET", "/health"): Operation(summary="Whether the router has a decode worker", is_open=True, answers=_HEALTH),
    ("GET", "/ping"): Operation(summary="The same as /health", is_open=True, answers=_HEALTH),
    ("POST", "/ping"): Operation(summary="The same as /health", is_open=True, answers=_HEALTH),
    ("GET", "/metrics"): Operation(
        summary="Metrics for Prometheus; for operators", is_control=True, answers={200: PLAIN}
    ),
    ("GET", "/openapi.json"): Operation(summary="This document", is_open=True, answers={200: JSON}),
    ("GET", "/docs"): Operation(summary="This document as a page", is_open=True, answers=_PAGE),
    ("GET", "/"): Operation(summary="Leads to the live view", is_open=True, answers={307: None}),
    ("GET", "/ui"): Operation(summary="The page of the live view", tag="live view", is_open=True, answers=_PAGE),
    ("GET", "/ui/events"): Operation(
        summary="Frames of the live view", tag="live view", is_control=True, answers={200: EVENTS}
    ),
    ("GET", "/ui/requests/{request_id:path}"): Operation(
        summary="Explains where a request was placed", tag="live view", is_control=True, answers={200: JSON}
    ),
    ("POST", "/ui/workers/{worker_id}/drain"): Operation(
        summary="Drains a worker", tag="live view", is_control=True, answers={204: None}, headers=("x-pdserve-ui",)
    ),
    ("POST", "/ui/workers/{worker_id}/undrain"): Operation(
        summary="Ends the draining of a worker",
        tag="live view",
        is_control=True,
        answers={204: None},
        headers=("x-pdserve-ui",),
    ),
    ("GET", "/ui/workers/{worker_id}/log"): Operation(
        summary="The last log lines of a worker", tag="live view", is_control=True, answers={200: JSON}
    ),
}


# --- document -------------------------------------------------------------------------------------------------

API_VERSION: Final = "1"  # of the API: the version of pdserve is behind the token
_REFERENCE: Final = "#/components/schemas/{model}"
_PARAMETER: Final = re.compile(r"\{(\w+)(?::path)?\}")
_IGNORED: Final = {MODELS[endpoint]: fields for endpoint, fields in IGNORED.items()}
#: Of any operation: a method that it lacks, a flood of callers, an error of the gateway, and a router that is away.
_ALWAYS: Final = frozenset((405, 429, 500, 503))
_OF_CALLERS: Final = frozenset((401, 403))
_MILLISECONDS: Final = {"type": "number", "minimum": 0.001, "maximum": 86_400_000}
_HEADERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    REQUEST_ID: (
        "a name of the request, which the answer repeats",
        {"type": "string", "pattern": "^[!-~]{1,128}$"},
    ),
    SESSION_ID: ("groups requests; printable", {"type": "string", "maxLength": 128}),
    **dict.fromkeys(TARGETS, ("the request's target in milliseconds", _MILLISECONDS)),
    SLO_TASK_S: (
        "deadline of the whole task, in seconds from its first turn",
        {"type": "number", "minimum": 0.000_001, "maximum": 86_400},
    ),
    REUSE_WITHIN_S: (
        "hint: seconds until the cached prefix is used again; 0: the session ends",
        {"type": "number", "minimum": 0, "maximum": 86_400},
    ),
    EXPECTED_TOKENS: (
        "hint: expected tokens of each answer",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    ),
}


def _within(minimum: float | None, maximum: float | None) -> dict[str, Any]:
    found = {"minimum": minimum, "maximum": maximum}
    return {name: value for name, value in found.items() if value is not None}


#: Limits of fields, in whichever request they are. The SDK checks them, after the models.
BOUNDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "temperature": _within(0, 100),
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "n": _within(1, 16),
    "seed": _within(-(2**63), 2**64 - 1),
    "presence_penalty": _within(-2, 2),
    "frequency_penalty": _within(-2, 2),
    "top_k": _within(-1, 2**32 - 1),
    "min_p": _within(0, 1),
    "top_n_sigma": _within(0, 100),
    "repetition_penalty": _within(0.01, 100),
    "prompt_logprobs": _within(0, 20),
    "logprobs": _within(0, 64),
    "top_logprobs": _within(0, 64),
    "min_tokens": _within(0, None),
    "truncate_prompt_tokens": _within(1, None),
    "priority": _within(1 - 2**31, 2**31),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _within(0, None)),
    "messages": {"minItems": 1},
    "cache_salt": {"minLength": 1, "maxLength": 256},
    "request_id": {"minLength": 1, "maxLength": 128},
}
_FORMS: Final[Mapping[type[BaseModel], Mapping[str, Any]]] = {
    TokenizeRequest: {
        "oneOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
        ]
    }
}


@cache
def document() -> dict[str, Any]:
    """Of version 3.1, whose schemas are JSON Schema 2020-12."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pdserve",
            "version": API_VERSION,
            "description": "OpenAI's and Anthropic's APIs for text, and the gateway's own endpoints. docs/http.md "
            "describes them.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": API_KEY},
            },
        },
        "security": [{"token": []}, {"key": []}, {}],  # a cluster may need no token
    }


@cache
def body() -> bytes:
    return json.dumps(document(), ensure_ascii=False, separators=(",", ":")).encode()


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": _PARAMETER.sub(r"\1", f"{method.lower()}{path}").replace("/", "_").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {str(status): _answer(operation, status) for status in operation.answers}
        | {
            str(status): _error(operation)
            for status in sorted(_errors(operation, path))
            if status not in operation.answers
        },
    }
    if operation.is_open:
        found["security"] = []
    if parameters := list(_parameters(path, operation)):
        found["parameters"] = parameters
    if operation.request is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(operation.request)}}}
    return found


def _parameters(path: str, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in _PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name in operation.headers:
        yield {"name": name, "in": "header", "required": True, "schema": {"type": "string"}}
    if operation.request in _IGNORED:
        for name, (about, schema) in _HEADERS.items():
            yield {"name": name, "in": "header", "description": about, "schema": dict(schema)}


def _answer(operation: Operation, status: int) -> dict[str, Any]:
    given = operation.answers[status]
    found: dict[str, Any] = {"description": "an error" if status >= 400 else "the answer"}
    if isinstance(given, str):
        found["content"] = {given: {"schema": {} if given in (JSON, EVENTS) else {"type": "string"}}}
    elif given is not None:
        found["content"] = {JSON: {"schema": _reference(given)}}
    if operation.is_streamed:
        # Version 3.1 describes no events, and validators disagree about what a schema here applies to.
        found["content"][EVENTS] = {"schema": {"description": "with `stream`: server-sent events"}}
    return found


def _error(operation: Operation) -> dict[str, Any]:
    return {"description": "an error", "content": {JSON: {"schema": _reference(operation.error)}}}


def _errors(operation: Operation, path: str) -> frozenset[int]:
    if operation.is_open:
        return _ALWAYS
    if operation.request is not None:
        return _ALWAYS | _OF_CALLERS | {row.status for row in ROWS.values()}
    return _ALWAYS | _OF_CALLERS | ({400, 404, 408, 499, 501} if "{" in path else {501})


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _schemas() -> dict[str, Any]:
    requests = [one.request for one in OPERATIONS.values() if one.request is not None]
    replies = [one for operation in OPERATIONS.values() for one in operation.answers.values() if isinstance(one, type)]
    found = _definitions(requests, "validation")
    written = _definitions([*replies, *(one.error for one in OPERATIONS.values())], "serialization")
    assert not found.keys() & written.keys(), "two models of one name"
    for model, ignored in _IGNORED.items():
        found[model.__name__]["properties"] |= {
            name: {"description": f"ignored: {why}"} for name, why in ignored.items()
        }
    for model in requests:
        found[model.__name__] |= _FORMS.get(model, {})
        properties = found[model.__name__]["properties"]
        for name in BOUNDS.keys() & properties.keys():
            properties[name] |= BOUNDS[name]
    return found | written


def _definitions(models: list[type[BaseModel]], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    pairs = [(one, mode) for one in dict.fromkeys(models)]
    found: dict[str, Any] = models_json_schema(pairs, ref_template=_REFERENCE)[1]["$defs"]
    return found


# --- page -----------------------------------------------------------------------------------------------------
# It has no scripts, and loads nothing from outside.

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;border-top:1px solid #8884;padding:.25rem .75rem .25rem 0}"
    "summary{cursor:pointer;padding:.25rem 0}details{border-top:1px solid #8884}:root{color-scheme:light dark}"
)


@cache
def docs_page() -> tuple[bytes, Mapping[str, str]]:
    """The page and the headers of its response."""
    body = "".join(_lines(document())).encode()
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return body, {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    info = found["info"]
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(info["title"])}</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{html.escape(info['title'])}</h1>"
    yield f'<p>{html.escape(info["description"])} The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
    operations = [(path, method, one) for path, item in found["paths"].items() for method, one in item.items()]
    for tag in dict.fromkeys(one["tags"][0] for _, _, one in operations):
        yield f"<h2>{html.escape(tag)}</h2>"
        for path, method, one in operations:
            if one["tags"][0] == tag:
                yield from _operation_html(f"{method.upper()} {path}", one, found["components"]["schemas"])
    yield "</body></html>"


def _operation_html(title: str, one: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><code>{html.escape(title)}</code> {html.escape(one['summary'])}</summary>"
    if one.get("security") == []:
        yield "<p>Needs no token.</p>"
    content = one.get("requestBody", {}).get("content", {})
    fields = [
        (f"header <code>{html.escape(p['name'])}</code>", p) for p in one.get("parameters", ()) if p["in"] != "path"
    ]
    for media in content.values():
        model = schemas[media["schema"]["$ref"].rpartition("/")[2]]
        fields += [(f"<code>{html.escape(name)}</code>", value) for name, value in model["properties"].items()]
    if fields:
        yield "<table><tr><th>field<th>meaning</tr>"
        yield from (f"<tr><td>{name}<td>{html.escape(value.get('description', ''))}</tr>" for name, value in fields)
        yield "</table>"
    yield f"<p>Answers: {', '.join(html.escape(status) for status in one['responses'])}</p></details>"

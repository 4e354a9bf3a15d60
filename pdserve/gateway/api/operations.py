"""Every endpoint of the gateway: who may call it, what it reads and what it answers. Pure.

An endpoint needs the caller's token unless it is declared open here. Open endpoints show nothing of the cluster but
whether it serves: load balancers ask for that, and pages and the document are the same in every installation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel

from pdserve.gateway.api import response_models as answers
from pdserve.gateway.api.request_models import ChatRequest, DetokenizeRequest, TextRequest, TokenizeRequest
from pdserve.gateway.api.responses_models import ResponsesRequest

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
        summary="Answers in the form of OpenAI's responses; nothing is stored",
        tag="generation",
        request=ResponsesRequest,
        answers={200: answers.ResponseAnswer},
        is_streamed=True,
    ),
    ("GET", "/v1/models"): Operation(summary="Lists the served model", answers={200: answers.ModelsAnswer}),
    ("GET", "/v1/models/{name:path}"): Operation(summary="Describes the model", answers={200: answers.ModelAnswer}),
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

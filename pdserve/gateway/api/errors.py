"""OpenAI's and Anthropic's forms of an error: HTTP status, body and headers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pdserve.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    IdInUse,
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    UnknownMethod,
    UnknownModel,
    shortened,
)


class BodyTooLarge(InvalidRequest):
    """The body of an HTTP request is over the limit."""


class UnknownField(InvalidRequest):
    """A field that neither OpenAI nor vLLM has."""


class UnsupportedField(InvalidRequest):
    """A field of OpenAI or vLLM that pdserve does not support."""


@dataclass(frozen=True, slots=True)
class Row:
    """The HTTP answer for an error and its subclasses. `code` None: the error's reason in lower case."""

    status: int
    type: str
    code: str | None = None


#: OpenAI's clients choose the exception by the status. They retry 408, 409, 429 and 5xx.
ROWS: Final[Mapping[type[PdserveError], Row]] = {
    BodyTooLarge: Row(413, "invalid_request_error", "body_too_large"),
    UnknownField: Row(400, "invalid_request_error", "unknown_parameter"),
    UnsupportedField: Row(400, "invalid_request_error", "unsupported_parameter"),
    ContextLengthExceeded: Row(400, "invalid_request_error"),
    InvalidRequest: Row(400, "invalid_request_error", "invalid_value"),
    Unauthenticated: Row(401, "invalid_request_error", "invalid_api_key"),
    PermissionDenied: Row(403, "invalid_request_error"),
    UnknownModel: Row(404, "invalid_request_error", "model_not_found"),
    UnknownMethod: Row(501, "server_error"),
    NotFound: Row(404, "invalid_request_error"),
    IdInUse: Row(409, "invalid_request_error"),
    DeadlineExceeded: Row(408, "timeout_error"),
    QuotaExceeded: Row(429, "requests", "rate_limit_exceeded"),
    Overloaded: Row(429, "rate_limit_error"),
    Cancelled: Row(499, "invalid_request_error"),
    Unavailable: Row(503, "server_error"),
    PdserveError: Row(500, "server_error"),
}

#: OpenAI's type of a rate limit error is the unit of the limit.
_QUOTA_TYPES: Final[Mapping[str, str]] = {"tokens_per_minute": "tokens"}

#: Fields that have another name in OpenAI's API.
_PARAMS: Final[Mapping[str, str]] = {
    "chat": "messages",
    "chat.messages": "messages",
    "text": "prompt",
    "token_ids": "prompt",
    "include_stop_in_output": "include_stop_str_in_output",
    "slo.ttft_s": "x-slo-ttft-ms",
    "slo.tpot_s": "x-slo-tpot-ms",
    "slo_task_s": "x-slo-task-s",
    "reuse_within_s": "x-reuse-within-s",
    "expected_output_tokens": "x-expected-output-tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    status: int
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


def reply(error: PdserveError) -> ErrorReply:
    row = next(ROWS[kind] for kind in type(error).__mro__ if kind in ROWS)
    field = getattr(error, "field", None) if isinstance(error, InvalidRequest) else None
    kind = _QUOTA_TYPES.get(error.quota, row.type) if isinstance(error, QuotaExceeded) else row.type
    code = error.reason.lower() if row.code is None else row.code
    return ErrorReply(
        status=row.status,
        body=body(error.message, kind, code, _PARAMS.get(field, field) if field else None),
        headers=(*_retry_headers(getattr(error, "retry_after_s", None)), *_challenge(row.status)),
    )


#: Anthropic's type of an error, by its status.
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def as_anthropic(found: ErrorReply) -> ErrorReply:
    """The same error in the form of Anthropic's API, whose clients also choose the exception by the status."""
    error = found.body["error"]
    kind = _ANTHROPIC_TYPES.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    shown = {"type": kind, "message": error["message"]}
    if error["param"] == "thread":  # their tool runner then sends the whole conversation
        shown["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return replace(found, body={"type": "error", "error": shown})


def wrong_method(method: str, path: str, allowed: Sequence[str]) -> ErrorReply:
    message = f"{shortened(method)} is not allowed on {shortened(path)}"
    found = body(message, "invalid_request_error", "method_not_allowed")
    return ErrorReply(status=405, body=found, headers=(("Allow", ", ".join(allowed)),))


def body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _retry_headers(retry_after_s: float | None) -> tuple[tuple[str, str], ...]:
    """Two headers: milliseconds for OpenAI's clients, and whole seconds for all others."""
    if not retry_after_s or retry_after_s < 0.0:
        return ()
    return (("retry-after-ms", str(math.ceil(retry_after_s * 1000))), ("retry-after", str(math.ceil(retry_after_s))))


def _challenge(status: int) -> tuple[tuple[str, str], ...]:
    return (("www-authenticate", "Bearer"),) if status == 401 else ()

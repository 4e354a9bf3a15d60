"""The table of pdserve's errors and gRPC statuses, used in both directions.

A server converts an error to a `google.rpc.Status` with details, sent in the trailing metadata
`grpc-status-details-bin`: ErrorInfo (stable reason, domain "pdserve", the error's fields), RetryInfo if a retry time is
known, BadRequest if a field is invalid. A client restores the same error from it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from pdserve.core.durations import clamped_s
from pdserve.core.errors import (
    Cancelled,
    ChangeFailed,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    IdInUse,
    InternalError,
    InvalidRequest,
    KvLost,
    LoadShed,
    ModelError,
    NotFound,
    NoWorkers,
    Overloaded,
    PdserveError,
    PermissionDenied,
    QuotaExceeded,
    ShuttingDown,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    UnknownMethod,
    UnknownModel,
    shortened,
)
from pdserve.tls.reasons import connection_failure, tls_failure

DOMAIN: Final = "pdserve"
DETAILS_KEY: Final = "grpc-status-details-bin"
# HTTP/2 peers commonly limit all headers of a response to 8 KiB, including the message and the base64 details.
MAX_FIELD_CHARS: Final = 512
MAX_MESSAGE_CHARS: Final = 2048

Fields: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Mapped:
    """One row: the status code, the error's fields that are sent, and how the error is restored from them."""

    code: grpc.StatusCode
    fields: tuple[str, ...]
    build: Callable[[str, Fields, float | None], PdserveError]  # (message, fields, retry_after_s)


def _field_error(kind: type[InvalidRequest] | type[ConfigError]) -> Callable[[str, Fields, float | None], PdserveError]:
    return lambda _, fields, __: kind(fields["field"], fields["seen"], fields["expected"])


TABLE: Final[Mapping[type[PdserveError], Mapped]] = {
    InvalidRequest: Mapped(
        grpc.StatusCode.INVALID_ARGUMENT, ("field", "seen", "expected"), _field_error(InvalidRequest)
    ),
    ContextLengthExceeded: Mapped(
        grpc.StatusCode.INVALID_ARGUMENT, ("field", "seen", "expected"), _field_error(ContextLengthExceeded)
    ),
    IdInUse: Mapped(grpc.StatusCode.ALREADY_EXISTS, ("name",), lambda _, fields, __: IdInUse(fields["name"])),
    NotFound: Mapped(
        grpc.StatusCode.NOT_FOUND, ("kind", "name"), lambda _, fields, __: NotFound(fields["kind"], fields["name"])
    ),
    UnknownMethod: Mapped(
        grpc.StatusCode.UNIMPLEMENTED, ("name",), lambda _, fields, __: UnknownMethod(fields["name"])
    ),
    UnknownModel: Mapped(
        grpc.StatusCode.NOT_FOUND,
        ("name", "served"),
        lambda _, fields, __: UnknownModel(fields["name"], fields["served"]),
    ),
    ConfigError: Mapped(grpc.StatusCode.FAILED_PRECONDITION, ("field", "seen", "expected"), _field_error(ConfigError)),
    ModelError: Mapped(grpc.StatusCode.FAILED_PRECONDITION, ("field", "seen", "expected"), _field_error(ModelError)),
    Overloaded: Mapped(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        (),
        lambda message, _, retry_after_s: Overloaded(message, retry_after_s or 0.0),
    ),
    QuotaExceeded: Mapped(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        ("quota",),
        lambda message, fields, retry_after_s: QuotaExceeded(fields["quota"], message, retry_after_s or 0.0),
    ),
    LoadShed: Mapped(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        ("cause",),
        lambda _, fields, retry_after_s: LoadShed(fields["cause"], retry_after_s or 0.0),
    ),
    Unavailable: Mapped(
        grpc.StatusCode.UNAVAILABLE, (), lambda message, _, retry_after_s: Unavailable(message, retry_after_s)
    ),
    NoWorkers: Mapped(
        grpc.StatusCode.UNAVAILABLE,
        ("role",),
        lambda message, fields, retry_after_s: NoWorkers.from_message(message, fields["role"], retry_after_s),
    ),
    ShuttingDown: Mapped(grpc.StatusCode.UNAVAILABLE, (), lambda _, __, retry_after_s: ShuttingDown(retry_after_s)),
    DeadlineExceeded: Mapped(
        grpc.StatusCode.DEADLINE_EXCEEDED, ("stage",), lambda _, fields, __: DeadlineExceeded(fields["stage"])
    ),
    Cancelled: Mapped(grpc.StatusCode.CANCELLED, (), lambda message, _, __: Cancelled(message)),
    Unauthenticated: Mapped(grpc.StatusCode.UNAUTHENTICATED, (), lambda message, _, __: Unauthenticated(message)),
    PermissionDenied: Mapped(grpc.StatusCode.PERMISSION_DENIED, (), lambda message, _, __: PermissionDenied(message)),
    ChangeFailed: Mapped(grpc.StatusCode.ABORTED, (), lambda message, _, __: ChangeFailed(message)),
    TransferFailed: Mapped(grpc.StatusCode.ABORTED, (), lambda message, _, __: TransferFailed(message)),
    KvLost: Mapped(grpc.StatusCode.DATA_LOSS, (), lambda message, _, __: KvLost(message)),
    InternalError: Mapped(grpc.StatusCode.INTERNAL, (), lambda message, _, __: InternalError(message)),
}
BY_REASON: Final[Mapping[str, type[PdserveError]]] = {kind.reason: kind for kind in TABLE}
BY_NUMBER: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

# The meaning of a status without details of ours: gRPC itself, or a proxy, ended the call.
_BARE: Final[Mapping[grpc.StatusCode, Callable[[str], PdserveError]]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: lambda text: InvalidRequest("request", text, "a request that the server accepts"),
    grpc.StatusCode.ALREADY_EXISTS: IdInUse,
    grpc.StatusCode.NOT_FOUND: lambda text: NotFound("resource", text),
    grpc.StatusCode.DEADLINE_EXCEEDED: lambda _: DeadlineExceeded("in flight"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: lambda text: Overloaded(text, 1.0),
    grpc.StatusCode.UNAVAILABLE: lambda text: not_connected(text),
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: lambda _: UnknownMethod(""),  # gRPC's own text does not name the method
    grpc.StatusCode.DATA_LOSS: KvLost,
    grpc.StatusCode.ABORTED: TransferFailed,
}
# gRPC text for a refused connection: "... last error: UNKNOWN: ipv4:127.0.0.1:50051: Failed to connect ...: refused".
_NOBODY: Final = re.compile(
    r"(?:failed to connect to all addresses|connections to all backends failing)"  # the second: of round_robin
    r".*?(?:ipv4|ipv6|unix):(.+?): (?:.*: )?(.+)",
    re.DOTALL,
)
NO_CONNECTION: Final = "no connection to"  # begins the message if a server answers that does not speak gRPC or TLS
_NOT_GRPC: Final = (  # gRPC's text when the other side does not speak HTTP/2, the first for HTTP/1
    (
        "http1.x server",
        "that is an HTTP port; give the gRPC port of the router, which is 50051 unless its --port is another",
    ),
    ("Failed parsing HTTP/2", "that server does not speak gRPC; give the gRPC port of the router"),
)
_NO_NAME: Final = re.compile(r"lookup failed for (\S+): ([^\]]+)")
_NO_ANSWER: Final = "no server answers at"  # begins the message if no connection was made
_LOST: Final = re.compile(r"socket closed|connection reset|broken pipe|goaway|keepalive|ping timeout", re.IGNORECASE)
_ENDED_CALLS: Final = "Cancelling all calls"  # of a gRPC server that ends
_ALL_DRAIN: Final = "backend unhealthy"  # of a client that watches its routers' health (client/connect.py)
_TOO_LARGE: Final = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")


def to_status(error: PdserveError) -> status_pb2.Status:
    """The status of `error`. A class without a row uses its nearest ancestor's row."""
    kind = _kind(error)
    row = TABLE[kind]
    fields = {name: shortened(getattr(error, name), MAX_FIELD_CHARS) for name in row.fields}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=kind.reason, domain=DOMAIN, metadata=fields)]
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(clamped_s(retry_after_s) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=fields["field"], description=f"got {fields['seen']}, expected {fields['expected']}"
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=row.code.value[0], message=error.message[:MAX_MESSAGE_CHARS])
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def code_of(error: PdserveError) -> grpc.StatusCode:
    return TABLE[_kind(error)].code


def from_status(status: status_pb2.Status) -> PdserveError:
    """Restores the error of `to_status`; for a foreign status, the nearest error by its code."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, retry_after_s = "", None
    fields: Fields = {}
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            reason, fields = info.reason, dict(info.metadata)
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after_s = clamped_s(retry.retry_delay.ToNanoseconds() / 1e9)
    kind = BY_REASON.get(reason)
    if kind is not None and all(name in fields for name in TABLE[kind].fields):
        return TABLE[kind].build(status.message, fields, retry_after_s)
    return from_code(BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN), status.message)


def from_code(code: grpc.StatusCode, text: str) -> PdserveError:
    """The error of a status without our details: gRPC itself or a proxy ended the call."""
    too_large = _TOO_LARGE.search(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and too_large is not None:
        seen, limit = too_large.groups()
        return InvalidRequest("request", f"a message of {seen} bytes", f"at most {limit} bytes")
    if code is grpc.StatusCode.UNAVAILABLE:
        if text == _ENDED_CALLS or _ALL_DRAIN in text:
            return ShuttingDown()
        text = _who_is_away(text)
    build = _BARE.get(code)
    return InternalError(f"{code.name}: {text}") if build is None else build(text)


def _who_is_away(text: str) -> str:
    """Rewords gRPC's text for a failed connection; other texts are unchanged."""
    if nobody := _NOBODY.search(text):
        foreign = next((why for words, why in _NOT_GRPC if words in text), "")
        if why := foreign or tls_failure(text) or connection_failure(nobody[2]):
            return f"{NO_CONNECTION} {unquote(nobody[1])}: {why}"
        return f"{_NO_ANSWER} {unquote(nobody[1])} ({nobody[2]})"
    if no_name := _NO_NAME.search(text):
        return f"{_NO_ANSWER} {no_name[1]} ({no_name[2]})"
    return text


def from_rpc_error(error: grpc.RpcError) -> PdserveError:
    """The error of a failed call. Accepts the errors of grpc and of grpc.aio."""
    code: grpc.StatusCode = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
    text: str = (error.details() if callable(getattr(error, "details", None)) else str(error)) or ""
    trailing: Any = error.trailing_metadata() if callable(getattr(error, "trailing_metadata", None)) else None
    for key, value in trailing or ():
        if key == DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except Exception:  # the C and Python parsers raise different classes; a bad detail must not hide the code
                break
            if BY_NUMBER.get(status.code) is code:
                return from_status(status)
    return from_code(code, text)


@contextlib.contextmanager
def reading(call: Any) -> Iterator[None]:
    """While the messages of a stream are read: raises our errors, and cancels the call at the end."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    finally:
        call.cancel()


def not_connected(text: str) -> Unavailable:
    """The error of a call whose connection has ended, or could not be made: gRPC's text, which may be reworded."""
    error = Unavailable(text)
    error.is_from_server = False
    return error


def is_interruption(error: PdserveError) -> bool:
    """Whether the router of the call, or the connection to it, has ended or is absent, so that another router may
    continue the call. What a router that lives says about its cluster is none."""
    return isinstance(error, ShuttingDown) or (isinstance(error, Unavailable) and not error.is_from_server)


def is_connection_lost(error: PdserveError) -> bool:
    """Whether an established connection has ended during the call, so that the call may have been received."""
    text = error.message
    was_made = not text.startswith((_NO_ANSWER, NO_CONNECTION)) and bool(_LOST.search(text))
    return was_made and isinstance(error, Unavailable) and not error.is_from_server


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    """Ends a call of a grpc.aio server with the status of `error`."""
    status = to_status(error)
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(BY_NUMBER[status.code], status.message, trailing)
    raise AssertionError("abort() returned")


def end(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> None:
    """Like `abort`, but without raising, for a streaming handler that then returns."""
    status = to_status(error)
    context.set_code(BY_NUMBER[status.code])
    context.set_details(status.message)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))


def _kind(error: PdserveError) -> type[PdserveError]:
    return next((kind for kind in type(error).__mro__ if kind in TABLE), InternalError)

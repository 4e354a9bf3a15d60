"""Calls with one request and one response, as data; Client and AsyncClient execute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pdserve.client import results
from pdserve.client.request import detokenize_request, token_bytes_request, tokenize_request
from pdserve.client.results import Explanation, Model, Token, Topology
from pdserve.core.log_line import LogLine
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire.log_line import LOG_LINE

Result = TypeVar("Result")
_SERVICE: Final = "pdserve.v1.InferenceService"
_SERVING: Final = b"\x08\x01"  # HealthCheckResponse with status SERVING


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[Result]):
    """`read` converts the response for the caller."""

    stub: Callable[[Any], Any]  # made from a channel
    method: str
    request: Any
    read: Callable[[Any], Result]


def model() -> UnaryCall[Model]:
    return _inference("GetModel", inference_pb2.GetModelRequest(), results.MODEL.decode)


def tokenize(
    prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> UnaryCall[list[int]]:
    request = tokenize_request(prompt, tools, **options)
    return _inference("Tokenize", request, lambda response: list(response.token_ids))


def detokenize(token_ids: Sequence[int], prompt: Sequence[int]) -> UnaryCall[str]:
    return _inference("Detokenize", detokenize_request(token_ids, prompt), lambda response: str(response.text))


def token_bytes(token_ids: Sequence[int]) -> UnaryCall[list[bytes]]:
    return _inference("GetTokenBytes", token_bytes_request(token_ids), lambda response: list(response.token_bytes))


def tokens(token_ids: Sequence[int]) -> UnaryCall[list[Token]]:
    def read(response: inference_pb2.GetTokenBytesResponse) -> list[Token]:
        special = set(response.special_ids)
        return [
            Token(token_bytes=written, is_special=token_id in special)
            for token_id, written in zip(token_ids, response.token_bytes, strict=True)
        ]

    return _inference("GetTokenBytes", token_bytes_request(token_ids), read)


def is_serving() -> UnaryCall[bool]:
    """gRPC's standard health check of the public service, for which no token is needed."""
    return UnaryCall(_HealthStub, "Check", _SERVICE, lambda status: bool(status == _SERVING))


class _HealthStub:
    """Encodes its two messages itself, because the SDK does not depend on grpcio-health-checking."""

    def __init__(self, channel: Any) -> None:
        self.Check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=lambda service: b"\n" + bytes((len(service),)) + service.encode(),
            response_deserializer=lambda message: message,
        )


def topology() -> UnaryCall[Topology]:
    return _cluster("GetTopology", cluster_pb2.GetTopologyRequest(), results.topology)


def drain(worker_id: str) -> UnaryCall[None]:
    return _cluster("Drain", cluster_pb2.DrainRequest(worker_id=worker_id), lambda _: None)


def undrain(worker_id: str) -> UnaryCall[None]:
    return _cluster("Undrain", cluster_pb2.UndrainRequest(worker_id=worker_id), lambda _: None)


def worker_log(worker_id: str) -> UnaryCall[tuple[LogLine, ...]]:
    request = cluster_pb2.GetWorkerLogRequest(worker_id=worker_id)
    return _cluster("GetWorkerLog", request, lambda response: tuple(map(LOG_LINE.decode, response.lines)))


def explain(request_id: str) -> UnaryCall[Explanation]:
    """Raises TypeError."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be str, not {type(request_id).__name__}")
    return _cluster("Explain", cluster_pb2.ExplainRequest(request_id=request_id), results.EXPLANATION.decode)


def _inference(method: str, request: Any, read: Callable[[Any], Result]) -> UnaryCall[Result]:
    return UnaryCall(inference_pb2_grpc.InferenceServiceStub, method, request, read)


def _cluster(method: str, request: Any, read: Callable[[Any], Result]) -> UnaryCall[Result]:
    return UnaryCall(cluster_pb2_grpc.ClusterServiceStub, method, request, read)

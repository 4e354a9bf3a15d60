"""For tests of programs that call pdserve: a real cluster in this process, and answers without any cluster.

    from pdserve.testing import Cluster, MockTransport, toy_answer

`Cluster` runs a router and workers with the toy model, and needs the extra `server`. `MockTransport` answers a client's
calls with a function, and needs nothing beside the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, final

import grpc
import grpc.aio

from pdserve.client.connect import Target
from pdserve.core.errors import PdserveError
from pdserve.v1 import inference_pb2
from pdserve.wire import status

if TYPE_CHECKING:
    from pdserve.testing.cluster import Cluster as Cluster
    from pdserve.testing.cluster import toy_answer as toy_answer

__all__ = ["Cluster", "MockTransport", "toy_answer"]


def __getattr__(name: str) -> Any:
    if name not in ("Cluster", "toy_answer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdserve.testing import cluster  # at first use, because it needs the packages of the extra `server`

    return getattr(cluster, name)


# --- answers without a cluster --------------------------------------------------------------------------------

Handler = Callable[[Any], Any]


@final
class MockTransport:
    """`handler(request)` is called with the request message of each attempt of a call.

    For a GenerateRequest it returns the text of the answer, or an iterable of its pieces, or of GenerateResponse
    messages. For any other request it returns the response message. To let the attempt fail, it raises a PdserveError,
    also between two pieces; the client then retries as with a cluster. The client's own checks of arguments apply.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def open(self, target: Target) -> Any:
        return _Channel(self._handler)

    def open_aio(self, target: Target) -> Any:
        return _AioChannel(self._handler)


class _Channel:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def unary_unary(self, path: str, **serializers: Any) -> Callable[..., Any]:
        return lambda request, **_: _respond(self._handler, request)

    def unary_stream(self, path: str, **serializers: Any) -> Callable[..., Any]:
        return lambda request, **_: _Stream(self._handler, request)

    def close(self) -> None:
        """There is no connection."""


class _AioChannel(_Channel):
    def unary_unary(self, path: str, **serializers: Any) -> Callable[..., Any]:
        async def call(request: Any, **_: Any) -> Any:
            return _respond(self._handler, request)

        return call

    async def close(self, grace: float | None = None) -> None:  # type: ignore[override]
        """There is no connection."""


class _Stream:
    """The call of one answer, for both clients."""

    def __init__(self, handler: Handler, request: inference_pb2.GenerateRequest) -> None:
        self._messages = _messages(handler, request)

    def __next__(self) -> inference_pb2.GenerateResponse:
        try:
            return next(self._messages)
        except PdserveError as error:
            raise _RpcError(error) from error

    async def read(self) -> Any:
        try:
            return next(self)
        except StopIteration:
            return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs

    def cancel(self) -> None:
        self._messages = iter(())


class _RpcError(grpc.RpcError):
    """A failed call as grpc raises it."""

    def __init__(self, error: PdserveError) -> None:
        super().__init__(error.message)
        self._status = status.to_status(error)

    def code(self) -> grpc.StatusCode:
        return status.BY_NUMBER[self._status.code]

    def details(self) -> str:
        return str(self._status.message)

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [(status.DETAILS_KEY, self._status.SerializeToString())]


def _respond(handler: Handler, request: Any) -> Any:
    try:
        return handler(request)
    except PdserveError as error:
        raise _RpcError(error) from error


def _messages(handler: Handler, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateResponse]:
    answer: str | Iterable[Any] = handler(request)
    indexes = range(request.n if request.HasField("n") else 1)
    has_started = has_finished = False
    for piece in [answer] if isinstance(answer, str) else answer:
        if isinstance(piece, inference_pb2.GenerateResponse):
            has_finished = has_finished or piece.HasField("finished")
            yield piece
        else:
            if not has_started:
                started = inference_pb2.Started(request_id=request.request_id or "mock")
                yield inference_pb2.GenerateResponse(started=started)
            for index in indexes:
                yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(index=index, text=piece))
        has_started = True
    if not has_finished:
        for index in indexes:
            end = inference_pb2.Finished(index=index, reason=inference_pb2.FINISH_REASON_STOP)
            yield inference_pb2.GenerateResponse(finished=end)

"""A real gRPC server on a free loopback port that plays scripted answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire import status

WAIT_S = 60.0
Play = Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]]


def started(request_id: str = "r1", prompt_tokens: int = 3, model: str = "") -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(request_id=request_id, prompt_tokens=prompt_tokens, model=model)
    )


def delta(text: str, *token_ids: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, token_ids=token_ids))


def finished(**fields: Any) -> inference_pb2.GenerateResponse:
    fields.setdefault("reason", inference_pb2.FINISH_REASON_LENGTH)
    return inference_pb2.GenerateResponse(finished=inference_pb2.Finished(**fields))


def fail(context: grpc.ServicerContext, error: PdserveError) -> None:
    """Ends a call of a blocking server like wire.status.abort on a grpc.aio server, or like gRPC without a server."""
    seen = status.to_status(error)
    if isinstance(error, Unavailable) and not error.is_from_server:
        context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
    context.set_trailing_metadata(((status.DETAILS_KEY, seen.SerializeToString()),))
    context.abort(status.BY_NUMBER[seen.code], seen.message)


class Script(inference_pb2_grpc.InferenceServiceServicer, cluster_pb2_grpc.ClusterServiceServicer):
    """Plays `plays` in turn, one for each Generate call, and records the requests."""

    def __init__(self) -> None:
        self.plays: list[Play] = []
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.timeouts_s: list[float | None] = []
        self.cancelled = threading.Event()
        self.unary_errors: list[PdserveError] = []  # of GetModel
        self.token_errors: list[PdserveError] = []

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self._note(context)
        self.requests.append(request)
        play = self.plays.pop(0)
        yield from play(request, context)

    def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        self._note(context)
        if self.unary_errors:
            fail(context, self.unary_errors.pop(0))
        return inference_pb2.GetModelResponse(
            model="m",
            max_context_tokens=512,
            vocab_size=300,
            eos_token_ids=[1],
            max_new_tokens=64,
            version="9.8.7+abc",
        )

    def GetTokenBytes(
        self, request: inference_pb2.GetTokenBytesRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetTokenBytesResponse:
        if self.token_errors:
            fail(context, self.token_errors.pop(0))
        return inference_pb2.GetTokenBytesResponse(token_bytes=[bytes((one,)) for one in request.token_ids])

    def EndSession(
        self, request: inference_pb2.EndSessionRequest, context: grpc.ServicerContext
    ) -> inference_pb2.EndSessionResponse:
        return inference_pb2.EndSessionResponse(is_known=request.session_id == "s")

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=list(request.text.encode()))

    def GetTopology(
        self, request: cluster_pb2.GetTopologyRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.GetTopologyResponse:
        return cluster_pb2.GetTopologyResponse(
            router_id="router-0",
            workers=[cluster_pb2.WorkerView(worker_id="p0", role=1, is_connected=True)],  # type: ignore[arg-type]
            queued_requests=2,
        )

    def Explain(
        self, request: cluster_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ExplainResponse:
        return cluster_pb2.ExplainResponse(
            request_id=request.request_id,
            decision="remote",
            candidates=[cluster_pb2.Candidate(prefill_worker="p0", decode_worker="d0", is_chosen=True)],
        )

    def _note(self, context: grpc.ServicerContext) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.timeouts_s.append(context.time_remaining())

    def says(self, *messages: inference_pb2.GenerateResponse) -> None:
        def play(_: Any, __: Any) -> Iterator[inference_pb2.GenerateResponse]:
            yield from messages

        self.plays.append(play)

    def fails(self, error: PdserveError, *messages: inference_pb2.GenerateResponse) -> None:
        """Sends `messages`, then ends the call with `error`."""

        def play(_: Any, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
            yield from messages
            fail(context, error)

        self.plays.append(play)

    def hangs(self, *messages: inference_pb2.GenerateResponse) -> None:
        """Sends `messages`, then waits until the call is cancelled."""

        def play(_: Any, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
            context.add_callback(self.cancelled.set)
            yield from messages
            self.cancelled.wait(WAIT_S)

        self.plays.append(play)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def target(script: Script) -> Iterator[str]:
    with listening(script) as address:
        yield address


@contextmanager
def listening(script: Script) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(script, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    script.cancelled.set()
    server.stop(None).wait(WAIT_S)

"""The common parts of Client, AsyncClient and their streams: everything except waiting."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar, cast

from pdserve.client import connect, results
from pdserve.client.beam import BeamSearch, EarlyStopping
from pdserve.client.connect import ClientTransport, GrpcTransport, Tls, TlsPath
from pdserve.client.options import Options
from pdserve.client.request import (
    Messages,
    Prompt,
    checked_timeout_s,
    detokenize_request,
    generate_request,
    token_bytes_request,
    tokenize_request,
)
from pdserve.client.results import Completion, Explanation, Model, Piece, Token, TokenLogprob, Topology
from pdserve.client.retries import Attempts, HeldCall, Retries
from pdserve.core.errors import InternalError, InvalidRequest, PdserveError
from pdserve.core.live import LogLine
from pdserve.core.results import SessionPage
from pdserve.telemetry import names, trace_context
from pdserve.telemetry.trace_context import ClientCall, request_attributes
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire import status
from pdserve.wire.protocol import LOG_LINE, SESSION_PAGE

# --- answer ---------------------------------------------------------------------------------------------------
# Converts the messages of one Generate call to pieces and, at the end, a completion; records its span and metrics.
#
# There is one span per call, including retries, and none unless the caller's program uses OpenTelemetry.


class AnswerBuilder:
    """One call's answer so far. An attempt that failed before its first token leaves nothing here."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        server: tuple[str, int | None],
        *,
        is_stream: bool,
        keeps_pieces: bool = True,
    ) -> None:
        """`server`: the router's host and port. `keeps_pieces`: for the completion, which is empty otherwise."""
        self._call = ClientCall(partial(_attributes, request, server), is_stream=is_stream)
        self.held = HeldCall(request)
        self.request_id = request.request_id
        self.prompt_tokens: int | None = None
        self.seed: int | None = None
        self.reasoning: str | None = None  # how the prompt ends; None: the router does not say
        self._num_answers = request.n if request.HasField("n") else 1
        self._keeps_pieces = keeps_pieces
        self._pieces: list[Piece] = []
        self._finished: list[inference_pb2.Finished] = []
        self._prompt_logprobs: list[TokenLogprob | None] = []
        if request.sampling.HasField("prompt_logprobs"):
            self._prompt_logprobs.append(None)  # nothing is returned before the first token
        self._completion: Completion | None = None
        self.has_begun = False  # a token or text has reached the caller, so a retry could repeat it

    @property
    def traceparent(self) -> str | None:
        return self._call.traceparent

    def take(self, message: inference_pb2.GenerateResponse) -> Piece | None:
        """Returns the piece that the message contains, if any. Raises CannotResume if a resumed call begins again."""
        event = message.WhichOneof("event")
        if event == "delta":
            return self._took(message.delta)
        if event == "started":
            self.held.started(message.started)
            self.request_id = message.started.request_id
            self.prompt_tokens = message.started.prompt_tokens
            self.seed = message.started.seed if message.started.HasField("seed") else None
            self.reasoning = message.started.reasoning if message.started.HasField("reasoning") else None
            self._call.answered_by(message.started.model)
        elif event == "prompt_logprobs":
            self.scored(message.prompt_logprobs, scored_tokens(message.prompt_logprobs))
        elif event == "finished":
            self.held.finished(message.finished)
            self._finished.append(message.finished)
            if len(self._finished) == self._num_answers:
                self._completion = self._complete()
        return None

    def _took(self, delta: inference_pb2.Delta) -> Piece | None:
        piece = results.piece(delta)
        if not (piece.text or piece.token_ids):
            return None
        self.has_begun = True
        self.held.took(delta)
        if self._keeps_pieces:
            self._pieces.append(piece)
        self._call.took_chunk()
        return piece

    @property
    def is_complete(self) -> bool:
        """Every answer has its last message."""
        return self._completion is not None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Available with the first piece."""
        return tuple(self._prompt_logprobs)

    def scored(self, message: inference_pb2.PromptLogprobs, tokens: Sequence[TokenLogprob]) -> None:
        """`tokens`: scored_tokens(message)."""
        del self._prompt_logprobs[message.first_position :]
        self._prompt_logprobs += tokens

    def _complete(self) -> Completion:
        choices = [
            results.choice([one for one in self._pieces if one.index == finished.index], finished)
            for finished in sorted(self._finished, key=lambda one: one.index)
        ]
        return results.completion(self.request_id, choices, self._finished, self._prompt_logprobs)

    def end(self) -> None:
        """The stream ended normally. Raises InternalError if no finish reason was received."""
        done = self._completion
        if done is None:
            error = InternalError("the server closed the stream without a finish reason")
            self.fail(error)
            raise error
        if not self._call.is_on:
            return
        self._call.set(
            {
                names.RESPONSE_ID: done.request_id,
                names.RESPONSE_FINISH_REASONS: [one.finish_reason.value for one in done.choices],
                names.INPUT_TOKENS: done.usage.prompt_tokens,
                names.OUTPUT_TOKENS: done.usage.completion_tokens,
                names.CACHED_TOKENS: done.usage.cached_prompt_tokens,
            }
        )
        self._call.end()

    def fail(self, error: PdserveError) -> None:
        self._call.fail(error.reason, error.message)

    def drop(self) -> None:
        """The caller has stopped reading, which is not a failure."""
        self._call.end()

    @property
    def completion(self) -> Completion:
        if self._completion is None:
            raise RuntimeError("the stream has no completion: it was not read to its end")
        return self._completion


def scored_tokens(message: inference_pb2.PromptLogprobs) -> list[TokenLogprob]:
    """Of up to a whole prompt, whose conversion takes a while."""
    return list(map(results.TOKEN_LOGPROB.decode, message.tokens))


def _attributes(request: inference_pb2.GenerateRequest, server: tuple[str, int | None]) -> dict[str, Any]:
    host, port = server
    found = {**request_attributes(request), names.SERVER_ADDRESS: host}
    if port is not None:
        found[names.SERVER_PORT] = port
    if request.HasField("request_id"):
        found[names.REQUEST_ID] = request.request_id
    if request.HasField("session_id"):
        found[names.CONVERSATION_ID] = request.session_id
    return found


# --- clients and streams --------------------------------------------------------------------------------------

DEFAULT_TARGET: Final = "localhost:50051"


class BaseClient:
    """A connection to a cluster.

    `timeout_s` bounds a whole call, retries included; `connect_timeout_s` bounds one connection attempt. `retries`: a
    call is retried before its first token, and resumed after it. `tls`: a Tls, the path of a PEM file with the server's
    CA, or True for the roots that gRPC brings. `token` is sent over TLS or to this host only, unless `insecure`.
    `transport` opens the channel; a test replaces it with a pdserve.testing.MockTransport.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: Tls | TlsPath | bool | None = None,
        insecure: bool = False,
        timeout_s: float = connect.TIMEOUT_S,
        connect_timeout_s: float = connect.CONNECT_S,
        retries: Retries | None = None,
        transport: ClientTransport | None = None,
    ) -> None:
        self._timeout_s = checked_timeout_s("timeout_s", timeout_s)
        self._target = connect.target(
            target,
            tls=tls,
            token=token,
            connect_timeout_s=checked_timeout_s("connect_timeout_s", connect_timeout_s),
            insecure=insecure,
        )
        self._retries = retries or Retries()
        self._transport = transport or GrpcTransport()
        self._is_shut = threading.Event()  # shared with clients of `with_token`
        self._connect()

    def with_token(self, token: str | None) -> Self:
        """A client that presents another token on the same connection, for a program that serves several callers.

        Closing one of them closes the connection of both. Raises ConfigError like the constructor.
        """
        other = copy.copy(self)
        other._target = self._target.with_token(token)
        return other

    def _connect(self) -> None:
        """Prepares the channel."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._is_shut.is_set():
            raise ValueError("this Client is closed")

    def attempts(self) -> Attempts:
        """Those of a call that begins now."""
        self._check_open()
        return Attempts(self._timeout_s, self._retries)

    def _metadata(self) -> Any:
        return self._target.metadata(trace_context.current_traceparent())

    def _begin_watch(self, channel: Any, period_s: float, *, only_this_router: bool) -> Any:
        """Without a time limit, because it ends when the caller leaves."""
        self._check_open()
        request = cluster_pb2.WatchRequest(period_s=period_s, only_this_router=only_this_router)
        return cluster_pb2_grpc.ClusterServiceStub(channel).Watch(request, metadata=self._metadata())

    def _begin_change(self, channel: Any, request: cluster_pb2.ChangeWorkersRequest) -> Any:
        """Without a time limit, because a model may load for many minutes."""
        self._check_open()
        return cluster_pb2_grpc.ClusterServiceStub(channel).ChangeWorkers(request, metadata=self._metadata())

    def _begin(
        self, channel: Any, prompt: Prompt, options: Options, call: str, *, keeps_pieces: bool = True
    ) -> tuple[Callable[[float], Any], AnswerBuilder, Attempts]:
        """The arguments of a stream. Raises TypeError and InvalidRequest on invalid arguments."""
        self._check_open()
        request = generate_request(prompt, options, call)
        answer = AnswerBuilder(request, self._target.server, is_stream=call == "stream", keeps_pieces=keeps_pieces)
        metadata = self._target.metadata(answer.traceparent or options.get("traceparent"))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def begin(remaining_s: float) -> Any:
            self._check_open()
            return stub.Generate(answer.held.request, timeout=remaining_s, metadata=metadata)

        return begin, answer, Attempts(options.get("timeout_s") or self._timeout_s, self._retries)


def beam_search(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    ignore_eos: bool,
) -> BeamSearch:
    """Raises InvalidRequest."""
    return BeamSearch(
        width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        end_ids=() if ignore_eos else model.eos_token_ids,
        room=model.max_context_tokens - len(prompt_ids),
    )


def as_text(prompt: Prompt) -> str | Messages:
    """A prompt that is not token ids."""
    return cast("str | Messages", prompt)


class BaseStream:
    """One answer and its attempts."""

    def __init__(self, begin: Callable[[float], Any], answer: AnswerBuilder, attempts: Attempts) -> None:
        self._begin, self._answer, self._attempts = begin, answer, attempts
        self._call: Any = begin(attempts.remaining_s)

    @property
    def request_id(self) -> str:
        """Available once the server has accepted the request; empty before."""
        return self._answer.request_id

    @property
    def reasoning(self) -> str | None:
        """Of a chat whose model marks its reasoning: `open` if the prompt ends within it, `closed` if after it, empty
        if without a mark. Available with the first piece; None if unknown."""
        return self._answer.reasoning

    @property
    def prompt_tokens(self) -> int | None:
        """Number of prompt tokens. Available with the first piece; None before."""
        return self._answer.prompt_tokens

    @property
    def seed(self) -> int | None:
        """The seed of the first answer, which the router draws if there is none. Available with the first piece."""
        return self._answer.seed

    @property
    def is_resumed(self) -> bool:
        """Whether the call was interrupted after a token, and sent again to continue."""
        return self._answer.held.interruption is not None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Logprobs of each prompt token, None for the first. Available with the first piece, if requested."""
        return self._answer.prompt_logprobs

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RuntimeError unless the stream was read to its end."""
        return self._answer.completion

    def _delay_s(self, failure: PdserveError) -> float:
        """The wait before the next attempt, which continues after the tokens so far. Raises the error of the call if
        there is none."""
        answer, held, attempts = self._answer, self._answer.held, self._attempts
        delay_s = None
        if answer.has_begun or attempts.is_resuming or status.is_connection_lost(failure):
            delay_s = attempts.resume_delay_s(failure, held.num_tokens)
        if not answer.has_begun:
            if delay_s is None and not attempts.has_given_up:
                delay_s = attempts.delay_s(failure)
        elif delay_s is not None and not held.resume(failure):
            delay_s = None
        if delay_s is not None:
            return delay_s
        is_rejected = isinstance(failure, InvalidRequest) and not held.is_accepted
        if held.interruption is not None and (is_rejected or attempts.has_given_up):
            # The request was accepted before, so the interruption is what went wrong: the call may be sent again.
            interruption, interruption.__cause__ = held.interruption, failure
            failure = interruption
        answer.fail(failure)
        raise failure from failure.__cause__  # not from the error of grpc


# --- unary calls ----------------------------------------------------------------------------------------------
# One request and one response, as data; Client and AsyncClient execute them.

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


def sessions(limit: int, after: int) -> UnaryCall[SessionPage]:
    """Raises InvalidRequest."""
    for name, value, most in (("limit", limit, 2**32 - 1), ("after", after, 2**64 - 1)):
        if not 0 <= value <= most:
            raise InvalidRequest(name, value, f"0 to {most}")
    request = inference_pb2.ListSessionsRequest(limit=limit, after=after)
    return _inference("ListSessions", request, SESSION_PAGE.decode)


def end_session(session_id: str) -> UnaryCall[bool]:
    """Raises TypeError."""
    if not isinstance(session_id, str):
        raise TypeError(f"session_id must be str, not {type(session_id).__name__}")
    request = inference_pb2.EndSessionRequest(session_id=session_id)
    return _inference("EndSession", request, lambda response: bool(response.is_known))


def is_serving() -> UnaryCall[bool]:
    """gRPC's standard health check of the public service, for which no token is needed."""
    return UnaryCall(_HealthStub, "Check", _SERVICE, lambda health: bool(health == _SERVING))


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


def scaling(limit: int) -> UnaryCall[results.Scaling]:
    """Raises InvalidRequest."""
    if not 0 <= limit < 2**32:
        raise InvalidRequest("limit", limit, "a number of decisions")
    return _cluster("GetScaling", cluster_pb2.GetScalingRequest(limit=limit), results.SCALING.decode)


def load_adapter(name: str, folder: str) -> UnaryCall[str]:
    request = cluster_pb2.LoadAdapterRequest(name=name, folder=folder)
    return _cluster("LoadAdapter", request, lambda response: str(response.fingerprint))


def unload_adapter(name: str) -> UnaryCall[None]:
    return _cluster("UnloadAdapter", cluster_pb2.UnloadAdapterRequest(name=name), lambda _: None)


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

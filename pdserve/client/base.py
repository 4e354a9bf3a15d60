"""The common parts of Client, AsyncClient and their streams: everything except waiting."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar, cast

from pdserve.client import connect, results
from pdserve.client.beam import BeamSearch, EarlyStopping
from pdserve.client.connect import ClientTransport, GrpcTransport, Tls, TlsPath
from pdserve.client.request import (
    Messages,
    Options,
    Prompt,
    checked_timeout_s,
    detokenize_request,
    generate_request,
    token_bytes_request,
    tokenize_request,
)
from pdserve.client.results import Completion, Explanation, Model, Piece, Token, TokenLogprob, Topology
from pdserve.core.durations import DAY_S, backoff_s
from pdserve.core.errors import ConfigError, InternalError, Overloaded, PdserveError, Unavailable
from pdserve.core.live import LogLine
from pdserve.telemetry import names, trace_context
from pdserve.telemetry.trace_context import ClientCall, request_attributes
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire.protocol import LOG_LINE

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
        self.request_id = request.request_id
        self.prompt_tokens: int | None = None
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
        """Returns the piece that the message contains, if any."""
        event = message.WhichOneof("event")
        if event == "delta":
            return self._took(message.delta)
        if event == "started":
            self.request_id = message.started.request_id
            self.prompt_tokens = message.started.prompt_tokens
            self.reasoning = message.started.reasoning if message.started.HasField("reasoning") else None
            self._call.answered_by(message.started.model)
        elif event == "prompt_logprobs":
            self.scored(message.prompt_logprobs, scored_tokens(message.prompt_logprobs))
        elif event == "finished":
            self._finished.append(message.finished)
            if len(self._finished) == self._num_answers:
                self._completion = self._complete()
        return None

    def _took(self, delta: inference_pb2.Delta) -> Piece | None:
        piece = results.piece(delta)
        if not (piece.text or piece.token_ids):
            return None
        self.has_begun = True
        if self._keeps_pieces:
            self._pieces.append(piece)
        self._call.took_chunk()
        return piece

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


# --- retries --------------------------------------------------------------------------------------------------

MAX_RETRIES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Retries after the first attempt. A call that has yielded a token is never retried.

    If the server names a retry time (RetryInfo), the wait is that time plus some jitter, so that callers do not return
    together. If it is more than `longest_wait_s`, there is no retry.
    """

    limit: int = 2
    first_backoff_s: float = 0.5
    longest_backoff_s: float = 8.0
    longest_wait_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= MAX_RETRIES:
            raise ConfigError("retries.limit", self.limit, f"between 0 and {MAX_RETRIES}")
        for name in ("first_backoff_s", "longest_backoff_s", "longest_wait_s"):
            if not 0.0 <= getattr(self, name) <= DAY_S:
                raise ConfigError(f"retries.{name}", getattr(self, name), f"between 0 and {DAY_S:g} seconds")

    def delay_s(self, error: PdserveError, tries: int, remaining_s: float, noise: float) -> float | None:
        """Seconds to wait before the next attempt; None: raise `error`.

        `tries` is the number of failed attempts, including this one; `remaining_s` is the rest of the call's timeout;
        `noise` is uniform in [0, 1).
        """
        if tries > self.limit or not isinstance(error, Overloaded | Unavailable):
            return None
        asked_s = error.retry_after_s
        if not asked_s or asked_s < 0.0:  # absent, or without a retry time
            ceiling_s = backoff_s(self.first_backoff_s, self.longest_backoff_s, tries - 1)
            delay_s = ceiling_s * (0.5 + 0.5 * noise)
        elif asked_s > self.longest_wait_s:
            return None
        else:
            delay_s = asked_s * (1.0 + 0.25 * noise)
        return delay_s if delay_s < remaining_s else None


# --- clients and streams --------------------------------------------------------------------------------------

DEFAULT_TARGET: Final = "localhost:50051"


class Attempts:
    """One call's deadline and attempts."""

    def __init__(self, timeout_s: float, retries: Retries) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._retries = retries
        self._count = 0

    @property
    def remaining_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    def delay_s(self, failure: PdserveError) -> float | None:
        """How long to wait before the next attempt; None: no further attempt."""
        self._count += 1
        return self._retries.delay_s(failure, self._count, self._deadline_s - time.monotonic(), random.random())


class BaseClient:
    """A connection to a cluster.

    `timeout_s` bounds a whole call, retries included; `connect_timeout_s` bounds one connection attempt. A call is
    retried (`retries`) only before its first token. `tls`: a Tls, the path of a PEM file with the server's CA, or True
    for the roots that gRPC brings. `token` is sent over TLS or to this host only, unless `insecure`. `transport` opens
    the channel; a test replaces it with a pdserve.testing.MockTransport.
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

    def _attempts(self) -> Attempts:
        self._check_open()
        return Attempts(self._timeout_s, self._retries)

    def _metadata(self) -> Any:
        return self._target.metadata(trace_context.current_traceparent())

    def _begin_watch(self, channel: Any, period_s: float) -> Any:
        """Without a time limit, because it ends when the caller leaves."""
        self._check_open()
        request = cluster_pb2.WatchRequest(period_s=period_s)
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
            return stub.Generate(request, timeout=remaining_s, metadata=metadata)

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
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Logprobs of each prompt token, None for the first. Available with the first piece, if requested."""
        return self._answer.prompt_logprobs

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RuntimeError unless the stream was read to its end."""
        return self._answer.completion

    def _delay_s(self, failure: PdserveError) -> float | None:
        """The wait before the next attempt; None after the first token, or if there is no further attempt."""
        return None if self._answer.has_begun else self._attempts.delay_s(failure)


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

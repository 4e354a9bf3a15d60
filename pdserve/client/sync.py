"""The blocking client. One Client may serve many threads; one Stream belongs to one reader."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack, cast, final

import grpc

from pdserve.client import beam, connect, results
from pdserve.client.answer import Answer
from pdserve.client.beam import Beam, BeamSearch, EarlyStopping, Tops
from pdserve.client.connect import Target, Tls
from pdserve.client.request import (
    Options,
    Prompt,
    checked_timeout_s,
    detokenize_request,
    generate_request,
    token_ids_of,
    tokenize_request,
)
from pdserve.client.results import Completion, Explanation, Model, Piece, TokenLogprob, Topology
from pdserve.client.retry import Retries
from pdserve.core.errors import PdserveError
from pdserve.telemetry import propagate
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire import status

Reply = TypeVar("Reply")
DEFAULT_TARGET: Final = "localhost:50051"


@final
class Client:
    """A connection to a cluster.

    `timeout_s` bounds a whole call, retries included; `connect_timeout_s` one connection attempt. A call is tried
    again (`retries`) only while no token has arrived. `token` travels over TLS or to this host only.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: Tls | bool | None = None,
        timeout_s: float = connect.TIMEOUT_S,
        connect_timeout_s: float = connect.CONNECT_S,
        retries: Retries | None = None,
    ) -> None:
        self._timeout_s = checked_timeout_s("timeout_s", timeout_s)
        self._target = connect.target(
            target, tls=tls, token=token, connect_timeout_s=checked_timeout_s("connect_timeout_s", connect_timeout_s)
        )
        self._retries = retries or Retries()
        self._channel = _open(self._target)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. A prompt is text, token ids, or messages with role and content."""
        with self._start(prompt, options, "generate") as stream:
            for _ in stream:
                pass
            return stream.completion

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer piece by piece. Closing, leaving or forgetting the stream cancels the request."""
        return self._start(prompt, options, "stream")

    def beam_search(
        self,
        prompt: Prompt,
        *,
        width: int = beam.WIDTH,
        max_tokens: int = beam.MAX_TOKENS,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[Beam, ...]:
        """The `width` best continuations that beam search finds, best first, as transformers would.

        `length_penalty` above 0 favours long ones. `early_stopping` True ends when `width` are finished; False when
        the best living beam is no better than they are; "never" when it cannot become better. `width` is 1 to 32,
        less where the model has several end tokens; each step is one request per living beam.
        """
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        model = self.model()
        ids = token_ids_of(prompt)
        if ids is None:
            ids = self.tokenize(cast("str | Sequence[Mapping[str, str]]", prompt))
        search = BeamSearch(
            width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            end_ids=() if ignore_eos else model.eos_token_ids,
            room=model.max_context_tokens - len(ids),
        )
        while not search.is_over:
            options = search.options(deadline_s - time.monotonic())
            search.take(self._tops([[*ids, *tokens] for tokens in search.living], options))
        return tuple([replace(one, text=self.detokenize(one.text_ids, ids)) for one in search.found])

    def _tops(self, prompts: Sequence[Sequence[int]], options: Options) -> list[Tops]:
        """The likeliest next tokens of each prompt; all are asked for at once."""
        streams = [self._start(prompt, options, "beam_search") for prompt in prompts]
        try:
            for stream in streams:
                for _ in stream:
                    pass
            return [stream.completion.logprobs[0].top for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def model(self) -> Model:
        return results.model(self._call(self._inference.GetModel, inference_pb2.GetModelRequest()))

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        return list(self._call(self._inference.Tokenize, tokenize_request(prompt)).token_ids)

    def detokenize(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text that `token_ids` add to that of the token ids `prompt`; special tokens have none."""
        return str(self._call(self._inference.Detokenize, detokenize_request(token_ids, prompt)).text)

    def topology(self) -> Topology:
        return results.topology(self._call(self._cluster.GetTopology, cluster_pb2.GetTopologyRequest()))

    def drain(self, worker_id: str) -> None:
        """Stops new work on a worker, and lets its requests finish, until undrain(). Raises NotFound."""
        self._call(self._cluster.Drain, cluster_pb2.DrainRequest(worker_id=worker_id))

    def undrain(self, worker_id: str) -> None:
        """Gives new work to a drained worker again. Raises NotFound."""
        self._call(self._cluster.Undrain, cluster_pb2.UndrainRequest(worker_id=worker_id))

    def explain(self, request_id: str) -> Explanation:
        """Why a recent request was placed where it was. Raises NotFound once the router has forgotten it."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be str, not {type(request_id).__name__}")
        return results.explanation(self._call(self._cluster.Explain, cluster_pb2.ExplainRequest(request_id=request_id)))

    def close(self) -> None:
        """Ends the connection; streams that are still open are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, prompt: Prompt, options: Options, call: str) -> Stream:
        request = generate_request(prompt, options, call)
        timeout_s = options.get("timeout_s") or self._timeout_s

        answer = Answer(request)
        metadata = self._target.metadata(answer.traceparent)

        def begin(remaining_s: float) -> Any:
            return self._inference.Generate(request, timeout=remaining_s, metadata=metadata)

        return Stream(begin, answer, timeout_s, self._retries)

    def _call(self, method: Callable[..., Reply], request: Any) -> Reply:
        deadline_s = time.monotonic() + self._timeout_s
        tries = 0
        while True:
            remaining_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                return method(
                    request, timeout=remaining_s, metadata=self._target.metadata(propagate.current_traceparent())
                )
            except grpc.RpcError as error:
                tries += 1
                failure = status.from_rpc_error(error)
                delay_s = self._retries.delay_s(failure, tries, deadline_s - time.monotonic(), random.random())
                if delay_s is None:
                    raise failure from None
            time.sleep(delay_s)


@final
class Stream(Iterator[Piece]):
    """Pieces of one answer. Iterate it; `completion` is there after the last piece."""

    def __init__(self, begin: Callable[[float], Any], answer: Answer, timeout_s: float, retries: Retries) -> None:
        self._begin = begin
        self._deadline_s = time.monotonic() + timeout_s
        self._retries = retries
        self._tries = 0
        self._answer = answer
        self._closed = threading.Event()
        self._call: Any = begin(timeout_s)

    @property
    def request_id(self) -> str:
        """Known once the server has accepted the request; empty before."""
        return self._answer.request_id

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Of each prompt token, None for the first; there with the first piece, where they were asked for."""
        return self._answer.prompt_logprobs

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises RuntimeError unless the stream was read to its end."""
        return self._answer.completion

    def __next__(self) -> Piece:
        while not self._closed.is_set():
            try:
                message = next(self._call)
            except StopIteration:
                self._closed.set()
                self._answer.end()
                raise
            except grpc.RpcError as error:
                if self._closed.is_set():
                    break  # our own close(), from another thread
                self._try_again(status.from_rpc_error(error))
                continue
            piece = self._answer.take(message)
            if piece is not None:
                return piece
        raise StopIteration

    def _try_again(self, failure: PdserveError) -> None:
        self._tries += 1
        delay_s = None
        if not self._answer.has_begun:
            remaining_s = self._deadline_s - time.monotonic()
            delay_s = self._retries.delay_s(failure, self._tries, remaining_s, random.random())
        if delay_s is None:
            self._closed.set()
            self._answer.fail(failure)
            raise failure from None
        if not self._closed.wait(delay_s):
            self._call = self._begin(max(self._deadline_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Cancels the request if it still runs. Safe to call twice and from another thread."""
        self._closed.set()
        self._call.cancel()
        self._answer.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A reader that breaks out of its loop drops the stream; the cluster should not go on for nobody.
        # At interpreter exit grpc may be gone already, and the connection with it.
        with contextlib.suppress(Exception):
            self.close()


def _open(target: Target) -> grpc.Channel:
    credentials = target.credentials()
    if credentials is None:
        return grpc.insecure_channel(target.address, options=target.channel_options())
    return grpc.secure_channel(target.address, credentials, options=target.channel_options())

"""The asyncio client: Client's twin. Belongs to the event loop that first uses it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, final

import grpc
import grpc.aio

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
from pdserve.client.sync import DEFAULT_TARGET
from pdserve.core.errors import PdserveError
from pdserve.telemetry import propagate
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire import status

Reply = TypeVar("Reply")


@final
class AsyncClient:
    """A connection to a cluster; arguments as those of Client."""

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
        self._channel: grpc.aio.Channel | None = None  # opened on first use, inside the loop that uses it

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. A prompt is text, token ids, or messages with role and content."""
        async with self._start(prompt, options, "generate") as stream:
            async for _ in stream:
                pass
            return stream.completion

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The answer piece by piece, without await. Closing, leaving or forgetting the stream cancels the request."""
        return self._start(prompt, options, "stream")

    async def beam_search(
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
        """As Client.beam_search."""
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        model = await self.model()
        ids = token_ids_of(prompt)
        if ids is None:
            ids = await self.tokenize(cast("str | Sequence[Mapping[str, str]]", prompt))
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
            search.take(await self._tops([[*ids, *tokens] for tokens in search.living], options))
        return tuple([replace(one, text=await self.detokenize(one.text_ids, ids)) for one in search.found])

    async def _tops(self, prompts: Sequence[Sequence[int]], options: Options) -> list[Tops]:
        """The likeliest next tokens of each prompt; all are asked for at once."""
        streams = [self._start(prompt, options, "beam_search") for prompt in prompts]
        try:
            for stream in streams:
                async for _ in stream:
                    pass
            return [stream.completion.logprobs[0].top for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    async def model(self) -> Model:
        stub = inference_pb2_grpc.InferenceServiceStub(self._connection())
        return results.model(await self._call(stub.GetModel, inference_pb2.GetModelRequest()))

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        stub = inference_pb2_grpc.InferenceServiceStub(self._connection())
        return list((await self._call(stub.Tokenize, tokenize_request(prompt))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text that `token_ids` add to that of the token ids `prompt`; special tokens have none."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._connection())
        return str((await self._call(stub.Detokenize, detokenize_request(token_ids, prompt))).text)

    async def topology(self) -> Topology:
        stub = cluster_pb2_grpc.ClusterServiceStub(self._connection())
        return results.topology(await self._call(stub.GetTopology, cluster_pb2.GetTopologyRequest()))

    async def drain(self, worker_id: str) -> None:
        """Stops new work on a worker, and lets its requests finish, until undrain(). Raises NotFound."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self._connection())
        await self._call(stub.Drain, cluster_pb2.DrainRequest(worker_id=worker_id))

    async def undrain(self, worker_id: str) -> None:
        """Gives new work to a drained worker again. Raises NotFound."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self._connection())
        await self._call(stub.Undrain, cluster_pb2.UndrainRequest(worker_id=worker_id))

    async def explain(self, request_id: str) -> Explanation:
        """Why a recent request was placed where it was. Raises NotFound once the router has forgotten it."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be str, not {type(request_id).__name__}")
        stub = cluster_pb2_grpc.ClusterServiceStub(self._connection())
        return results.explanation(await self._call(stub.Explain, cluster_pb2.ExplainRequest(request_id=request_id)))

    async def close(self) -> None:
        """Ends the connection; streams that are still open are cancelled."""
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connection(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = _open(self._target)
        return self._channel

    def _start(self, prompt: Prompt, options: Options, call: str) -> AsyncStream:
        request = generate_request(prompt, options, call)
        timeout_s = options.get("timeout_s") or self._timeout_s
        stub = inference_pb2_grpc.InferenceServiceStub(self._connection())

        answer = Answer(request)
        metadata = self._target.metadata(answer.traceparent)

        def begin(remaining_s: float) -> Any:
            return stub.Generate(request, timeout=remaining_s, metadata=metadata)

        return AsyncStream(begin, answer, timeout_s, self._retries)

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        deadline_s = time.monotonic() + self._timeout_s
        tries = 0
        while True:
            remaining_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                return await method(
                    request, timeout=remaining_s, metadata=self._target.metadata(propagate.current_traceparent())
                )
            except grpc.RpcError as error:
                tries += 1
                failure = status.from_rpc_error(error)
                delay_s = self._retries.delay_s(failure, tries, deadline_s - time.monotonic(), random.random())
                if delay_s is None:
                    raise failure from None
            await asyncio.sleep(delay_s)


@final
class AsyncStream(AsyncIterator[Piece]):
    """Pieces of one answer. Iterate it with `async for`; `completion` is there after the last piece."""

    def __init__(self, begin: Callable[[float], Any], answer: Answer, timeout_s: float, retries: Retries) -> None:
        self._begin = begin
        self._deadline_s = time.monotonic() + timeout_s
        self._retries = retries
        self._tries = 0
        self._answer = answer
        self._is_closed = False
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

    async def __anext__(self) -> Piece:
        while not self._is_closed:
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                if self._is_closed:
                    break
                await self._try_again(status.from_rpc_error(error))
                continue
            except asyncio.CancelledError:
                # grpc raises this for a call that close() ended as well as for a cancelled reader.
                if self._is_closed:
                    break
                self.close()
                raise
            if not isinstance(message, inference_pb2.GenerateResponse):  # grpc.aio.EOF
                self._is_closed = True
                self._answer.end()
                break
            piece = self._answer.take(message)
            if piece is not None:
                return piece
        raise StopAsyncIteration

    async def _try_again(self, failure: PdserveError) -> None:
        self._tries += 1
        delay_s = None
        if not self._answer.has_begun:
            remaining_s = self._deadline_s - time.monotonic()
            delay_s = self._retries.delay_s(failure, self._tries, remaining_s, random.random())
        if delay_s is None:
            self._is_closed = True
            self._answer.fail(failure)
            raise failure from None
        await asyncio.sleep(delay_s)
        if not self._is_closed:
            self._call = self._begin(max(self._deadline_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Cancels the request if it still runs. Safe to call twice."""
        self._is_closed = True
        self._call.cancel()
        self._answer.drop()

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A reader that breaks out of its loop drops the stream; the cluster should not go on for nobody.
        # The loop may be closed by then, and the connection with it.
        with contextlib.suppress(Exception):
            self.close()


def _open(target: Target) -> grpc.aio.Channel:
    credentials = target.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target.address, options=target.channel_options())
    return grpc.aio.secure_channel(target.address, credentials, options=target.channel_options())

"""Requests to a live cluster of the engine toy, whose tokens can be computed, from three kinds of clients."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self, final

import grpc.aio
import httpx2 as httpx

from pdserve import AsyncClient, PdserveError, Retries
from pdserve.client.request import generate_request
from pdserve.core.errors import InternalError, Overloaded
from pdserve.core.types import Slo
from pdserve.engine.toy import answer
from pdserve.v1 import inference_pb2_grpc
from pdserve.wire import status

LIMIT_S: Final = 120.0  # of a call
RETRIES: Final = Retries(limit=8)  # of the SDK
HTTP_TRIES: Final = 20  # of a call that gets 503, one each second, as OpenAI's client can be told to
REJECTED: Final = "status 429"


class ClientKind(Enum):
    SDK = "sdk"
    GRPC = "grpc"  # a stub, which neither retries nor resumes
    HTTP = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyRequest:
    prompt: list[int]
    max_tokens: int
    seed: int | None  # None: greedy
    by: ClientKind

    @property
    def options(self) -> dict[str, Any]:
        sampling = {"temperature": 0.0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        return {"max_tokens": self.max_tokens, **sampling}


def toy_requests(
    draw: random.Random, lengths: Sequence[int], max_tokens: int, by: Sequence[ClientKind]
) -> Iterator[ToyRequest]:
    """Without end. Prompts share no block; each of `by` in turn sends a greedy request and one with a seed."""
    number = 0
    while True:
        prompt = [draw.randrange(33, 127) for _ in range(draw.choice(lengths))]
        seed = number if number % 2 else None
        yield ToyRequest(prompt=prompt, max_tokens=max_tokens, seed=seed, by=by[number // 2 % len(by)])
        number += 1


@dataclass(slots=True, kw_only=True)
class Sent:
    """A request, and what its client has received. Times are of time.monotonic."""

    request: ToyRequest
    phase: str
    began_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    is_resumed: bool = False
    error: BaseException | None = None

    def take(self, token_ids: Sequence[int]) -> None:
        if token_ids and not self.tokens:
            self.first_s = time.monotonic()
        self.tokens.extend(token_ids)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def tpot_s(self) -> float:
        rest = len(self.tokens) - 1
        return (self.ended_s - self.first_s) / rest if rest > 0 else 0.0

    @property
    def is_rejected(self) -> bool:
        error = self.error
        return isinstance(error, Overloaded) or (isinstance(error, PdserveError) and REJECTED in error.message)

    @property
    def is_failed(self) -> bool:
        return self.error is not None and not self.is_rejected

    @property
    def wrong(self) -> str:
        """Empty if its tokens are right, as far as they came."""
        request = self.request
        expected = answer(request.prompt, request.max_tokens, seed=request.seed)
        if self.tokens == (expected if self.error is None else expected[: len(self.tokens)]):
            return ""
        return f"{request.by.value}: {self.tokens}, expected {expected}"

    @property
    def error_text(self) -> str:
        return f"{self.request.by.value}: {type(self.error).__name__}: {self.error}"

    def attains(self, slo: Slo) -> bool:
        return self.error is None and self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


@final
class ToyClients:
    """One of each kind, for `async with`. `http_url` is needed for requests over HTTP."""

    def __init__(self, target: str, http_url: str = "") -> None:
        self._sdk = AsyncClient(target, retries=RETRIES, timeout_s=LIMIT_S)
        self._channel = grpc.aio.insecure_channel(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._http = httpx.AsyncClient(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None))
        self._http_url = http_url
        self.sent: list[Sent] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._sdk.close()
        await self._channel.close(None)
        await self._http.aclose()

    async def send(self, request: ToyRequest, phase: str = "") -> None:
        """Returns at the end of the answer. An error is a part of `sent`, and is judged later."""
        one = Sent(request=request, phase=phase, began_s=time.monotonic())
        self.sent.append(one)
        send = {ClientKind.SDK: self._by_sdk, ClientKind.GRPC: self._by_stub, ClientKind.HTTP: self._over_http}
        try:
            await send[request.by](request, one)
        except Exception as error:  # of any kind: it is reported
            one.error = error
        one.ended_s = time.monotonic()

    async def _by_sdk(self, request: ToyRequest, one: Sent) -> None:
        stream = self._sdk.stream(request.prompt, **request.options)
        try:
            async for piece in stream:
                one.take(piece.token_ids)
        finally:
            one.is_resumed = stream.is_resumed

    async def _by_stub(self, request: ToyRequest, one: Sent) -> None:
        is_finished = False
        try:
            async for found in self._stub.Generate(generate_request(request.prompt, request.options), timeout=LIMIT_S):
                if found.HasField("delta"):
                    one.take(found.delta.token_ids)
                is_finished |= found.HasField("finished")
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from None
        if not is_finished:
            raise EOFError("the stream ended before the answer")

    async def _over_http(self, request: ToyRequest, one: Sent) -> None:
        """Raises InternalError with the text of an HTTP error."""
        body = {**request.options, "prompt": request.prompt, "stream": True, "return_token_ids": True}
        is_finished = False
        for attempt in range(HTTP_TRIES):
            async with self._http.stream("POST", f"{self._http_url}/completions", json=body) as found:
                if found.status_code == 503 and attempt + 1 < HTTP_TRIES:
                    await asyncio.sleep(1.0)
                    continue
                if found.status_code != 200:
                    raise InternalError(f"status {found.status_code}: {(await found.aread()).decode()}")
                async for line in found.aiter_lines():
                    if line == "data: [DONE]":
                        is_finished = True
                    elif line:
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise InternalError(f"event: {chunk['error']['message']}")
                        for choice in chunk["choices"]:
                            one.take(choice.get("token_ids") or ())
            if not is_finished:
                raise EOFError("the stream ended before the answer")
            return

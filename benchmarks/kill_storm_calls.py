"""The requests of a kill storm, how each kind of client sends them, and whether the answers are right."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias, final

import grpc.aio
import httpx2 as httpx

from pdserve import AsyncClient, PdserveError, Retries
from pdserve.client.request import generate_request
from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine import toy
from pdserve.gateway.api.request_models import Tool
from pdserve.gateway.tools.grammars import calls_schema
from pdserve.v1 import inference_pb2_grpc
from pdserve.wire import status
from router.service.answer import samplings
from tests.oracle import Oracle, Verdict

CALL_S: Final = 600.0
HTTP_TRIES: Final = 20  # of a call that gets 503, one each second, as OpenAI's client can be told to
LOGPROB_ERROR: Final = 0.01  # a prompt that is computed again is rounded in another order


class By(Enum):
    """The kind of client of a request."""

    SDK = "sdk"
    PLAIN = "plain"  # a gRPC stub, which neither retries nor resumes
    HTTP = "http"  # of a gateway in its own process


TOOL: Final = {
    "type": "function",
    "function": {
        "name": "person",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}


@final
class Kind(Enum):
    """What a request asks for."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    SEVERAL = "several"  # answers
    GRAMMAR = "grammar"
    LOGPROBS = "logprobs"
    TOOLS = "tools"


OPTIONS: Final[Mapping[Kind, Mapping[str, Any]]] = {
    Kind.GREEDY: {"temperature": 0.0, "ignore_eos": True},
    Kind.SAMPLED: {"ignore_eos": True},
    Kind.SEVERAL: {"ignore_eos": True, "n": 3},
    Kind.GRAMMAR: {"json_schema": {"type": "array"}},
    Kind.LOGPROBS: {"ignore_eos": True, "logprobs": 1},
    Kind.TOOLS: {"tools": [TOOL], "json_schema": calls_schema([Tool.model_validate(TOOL)], 4)},
}
SIMPLE: Final = (Kind.GREEDY, Kind.SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StormRequest:
    prompt: Any  # token ids; of a chat, messages
    options: dict[str, Any]
    by: By = By.PLAIN
    kind: Kind = Kind.SAMPLED


@dataclass(slots=True, kw_only=True)
class Part:
    """One of the `n` answers to a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str | None = ""  # None: any
    logprobs: list[float] = field(default_factory=list)

    def differs_from(self, calm: Part, *, is_whole: bool) -> str:
        """How it differs from the same answer in peace, or from its beginning. Empty if it does not."""
        for name in ("token_ids", "text"):
            found, expected = getattr(self, name), getattr(calm, name)
            if expected is not None and found != (expected if is_whole else expected[: len(found)]):
                return f"{name} {found!r}, in peace {expected!r}"
        found, expected = self.logprobs, calm.logprobs
        if len(found) > len(expected) or (is_whole and len(found) < len(expected)):
            return f"{len(found)} logprobs, in peace {len(expected)}"
        worst = max((abs(a - b) for a, b in zip(found, expected, strict=False)), default=0.0)
        return f"a logprob differs by {worst:.3f}" if worst > LOGPROB_ERROR else ""


@dataclass(slots=True, kw_only=True)
class StormAnswer:
    """What a client received."""

    parts: dict[int, Part] = field(default_factory=dict)  # by index
    is_resumed: bool = False
    attempts: int = 0  # placements of a finished request; over HTTP always 1
    error: BaseException | None = None
    first_s: float = 0.0  # when the first token came, by time.monotonic
    took_s: float = 0.0

    def part(self, index: int) -> Part:
        return self.parts.setdefault(index, Part())

    def take(self, index: int, token_ids: Sequence[int], text: str, logprobs: Iterable[float]) -> None:
        if token_ids and not self.first_s:
            self.first_s = time.monotonic()
        part = self.part(index)
        part.token_ids.extend(token_ids)
        part.text = (part.text or "") + text
        part.logprobs.extend(logprobs)


def requests(
    count: int,
    seed: int,
    *,
    longest: int,
    max_tokens: int,
    vocabulary: int,
    by: Sequence[By] = (By.PLAIN,),
    kinds: Sequence[Kind] = SIMPLE,
) -> list[StormRequest]:
    """Prompts that share no block, of 2 to `longest` tokens. Each of `by` in turn sends each of `kinds`."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        kind = kinds[number // len(by) % len(kinds)]
        options = {"max_tokens": max_tokens, "temperature": 0.8, "top_p": 0.95, "seed": number, **OPTIONS[kind]}
        if kind is Kind.GREEDY:
            del options["top_p"], options["seed"]
        prompt: Any = [draw.randrange(1, vocabulary) for _ in range(draw.randint(2, longest))]
        if kind is Kind.TOOLS:
            prompt = [{"role": "user", "content": f"Who is number {' '.join(map(str, prompt))}?"[:longest]}]
        made.append(StormRequest(prompt=prompt, options=options, by=by[number % len(by)], kind=kind))
    return made


# --- clients --------------------------------------------------------------------------------------------------


CONNECTIONS: Final = 4  # of each kind of gRPC client, so that each router has some
RETRIES: Final = Retries(limit=8)  # of calls that begin while no router listens


@final
class Senders:
    """A client of each kind, of which the gRPC clients have several connections."""

    def __init__(
        self, sdks: Sequence[AsyncClient], stubs: Sequence[Any], http: httpx.AsyncClient, url: str, call_s: float
    ) -> None:
        self._sdks, self._stubs, self._http, self._http_url = itertools.cycle(sdks), itertools.cycle(stubs), http, url
        self._call_s = call_s

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, target: str, http_url: str, connections: int = CONNECTIONS, call_s: float = CALL_S
    ) -> AsyncIterator[Senders]:
        options = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            sdks = [await enter(AsyncClient(target, retries=RETRIES, timeout_s=call_s)) for _ in range(connections)]
            channels = [await enter(grpc.aio.insecure_channel(target, options)) for _ in range(connections)]
            http = await enter(httpx.AsyncClient(timeout=call_s, limits=httpx.Limits(max_connections=None)))
            stubs = [inference_pb2_grpc.InferenceServiceStub(one) for one in channels]
            yield cls(sdks, stubs, http, http_url, call_s)

    async def send(self, request: StormRequest, request_id: str) -> StormAnswer:
        """Never raises: the error is part of the answer, and is judged later."""
        answer, began_s = StormAnswer(), time.monotonic()
        try:
            await {By.SDK: self._by_sdk, By.PLAIN: self._by_stub, By.HTTP: self._over_http}[request.by](
                request, request_id, answer
            )
        except Exception as error:
            answer.error = error
        answer.took_s = time.monotonic() - began_s
        return answer

    async def _by_sdk(self, request: StormRequest, request_id: str, answer: StormAnswer) -> None:
        stream = next(self._sdks).stream(request.prompt, request_id=request_id, **request.options)
        try:
            async for piece in stream:
                answer.take(piece.index, piece.token_ids, piece.text, [one.logprob for one in piece.logprobs])
        finally:
            answer.is_resumed = stream.is_resumed
        answer.attempts = stream.completion.timings.attempts

    async def _by_stub(self, request: StormRequest, request_id: str, answer: StormAnswer) -> None:
        message = generate_request(request.prompt, {**request.options, "request_id": request_id})
        num_finished = 0
        try:
            async for found in next(self._stubs).Generate(message, timeout=self._call_s):
                if found.HasField("delta"):
                    delta = found.delta
                    logprobs = [one.logprob for one in delta.logprobs]
                    answer.take(delta.index, delta.token_ids, delta.text, logprobs)
                elif found.HasField("finished"):
                    num_finished += 1
                    answer.attempts = max(answer.attempts, found.finished.timings.attempts)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from None
        if num_finished != request.options.get("n", 1):
            raise EOFError(f"the stream ended after {num_finished} answers")

    async def _over_http(self, request: StormRequest, request_id: str, answer: StormAnswer) -> None:
        """Raises InternalError with the text of an HTTP error."""
        path, body = _http_body(request)
        for attempt in range(HTTP_TRIES):
            async with self._http.stream("POST", f"{self._http_url}/{path}", json=body) as found:
                if found.status_code == 503 and attempt + 1 < HTTP_TRIES:
                    await asyncio.sleep(1.0)
                    continue
                if found.status_code != 200:
                    raise InternalError(f"status {found.status_code}: {(await found.aread()).decode()}")
                async for line in found.aiter_lines():
                    if line == "data: [DONE]":
                        answer.attempts = 1
                    elif line:
                        _take_chunk(answer, json.loads(line.removeprefix("data: ")))
            if not answer.attempts:
                raise EOFError("the stream ended without [DONE]")
            return


def _http_body(request: StormRequest) -> tuple[str, dict[str, Any]]:
    options = {**request.options, "stream": True, "return_token_ids": True}
    schema = options.pop("json_schema", None)
    if request.kind is Kind.TOOLS:
        return "chat/completions", {**options, "messages": request.prompt, "tool_choice": "required"}
    if schema is not None:
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return "completions", {**options, "prompt": request.prompt}


def _take_chunk(answer: StormAnswer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise InternalError(f"event: {chunk['error']['message']}")
    for choice in chunk["choices"]:
        delta, logprobs = choice.get("delta") or {}, choice.get("logprobs") or {}
        called = [one["function"] for one in delta.get("tool_calls") or ()]
        words = [word for one in called for word in (one.get("name"), one.get("arguments"))]
        text = "".join(word for word in (choice.get("text"), delta.get("content"), *words) if word)
        answer.take(choice["index"], choice.get("token_ids") or (), text, logprobs.get("token_logprobs") or ())


# --- judgement ------------------------------------------------------------------------------------------------

#: What is wrong with an answer, by its number; empty if nothing is.
Judge: TypeAlias = Callable[[int, StormAnswer], str]


@dataclass(slots=True, kw_only=True)
class Result:
    requests: int = 0  # that were sent
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)  # of finished requests
    #: Requests by (kind of client or of request, end): exact, resumed, or failed.
    ends: Counter[tuple[By | Kind, str]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    computed: list[tuple[int, int]] = field(default_factory=list)  # tokens of resumed answers, and those computed again
    wrong: list[str] = field(default_factory=list)

    @property
    def finished(self) -> int:
        return self.attempts.total()


def judge(asked: Sequence[StormRequest], stormy: Sequence[StormAnswer | None], wrong_of: Judge) -> Result:
    """Only plain clients may get an error, and it must be a typed one."""
    result = Result()
    for number, (request, seen) in enumerate(zip(asked, stormy, strict=True)):
        if seen is None:
            continue
        result.requests += 1
        result.slowest_s = max(result.slowest_s, seen.took_s)
        who = f"request {number} ({request.by.value}, {request.kind.value})"
        if seen.error is None:
            result.attempts[seen.attempts] += 1
        else:
            result.errors[f"{request.by.value}: {type(seen.error).__name__}: {_nameless(seen.error)}"] += 1
            if not isinstance(seen.error, PdserveError):
                result.wrong.append(f"{who} ended untyped: {seen.error!r}")
            elif request.by is not By.PLAIN:
                result.wrong.append(f"{who} failed: {seen.error!r}, cause {seen.error.__cause__!r}")
        wrong = wrong_of(number, seen)
        if wrong:
            result.wrong.append(f"{who}{'' if seen.error is None else ' before its error'}: {wrong}")
        for key in (request.by, request.kind):
            result.ends[key, "failed" if seen.error is not None else "wrong" if wrong else "exact"] += 1
            result.ends[key, "resumed"] += seen.is_resumed
    return result


def _nameless(error: BaseException) -> str:
    """Without the name of a worker."""
    return " ".join("a worker" if word.rstrip(":,;") in WORKERS else word for word in str(error).split())


WORKERS: Final = ("p0", "p1", "d0", "d1")


def same_as(calm: Sequence[StormAnswer | None]) -> Judge:
    """The answers of a run in peace, or their beginnings before an error."""

    def wrong_of(number: int, seen: StormAnswer) -> str:
        expected = calm[number]
        assert expected is not None
        if expected.error is not None:
            return f"failed in peace: {expected.error!r}"
        for index in sorted({*expected.parts, *seen.parts}):
            found = seen.parts.get(index, Part()).differs_from(
                expected.parts.get(index, Part()), is_whole=seen.error is None
            )
            if found:
                return f"answer {index}: {found}"
        return ""

    return wrong_of


def of_toy(request: StormRequest) -> StormAnswer:
    """What the engine toy answers to a prompt of token ids. All of its logprobs are 0. Its text is not predicted."""
    answer, n = StormAnswer(), request.options.get("n", 1)
    for index, sampling in enumerate(samplings(Sampling(seed=request.options.get("seed", 0)), n, n)):
        seed = sampling.seed if "seed" in request.options else None
        token_ids = toy.answer(request.prompt, request.options["max_tokens"], seed=seed)
        logprobs = [0.0] * len(token_ids) if request.kind is Kind.LOGPROBS else []
        answer.parts[index] = Part(token_ids=token_ids, text=None, logprobs=logprobs)
    return answer


def same_as_float64(asked: Sequence[StormRequest], oracle: Oracle, verdict: Verdict) -> Judge:
    """The choices of the oracle. `verdict` collects the near-ties of all answers."""

    def wrong_of(number: int, seen: StormAnswer) -> str:
        request, token_ids = asked[number], seen.part(0).token_ids
        if seen.error is None and len(token_ids) != request.options["max_tokens"]:
            return f"{len(token_ids)} tokens of {request.options['max_tokens']}"
        if not token_ids:
            return ""
        sampling = Sampling(**request.options) if request.options["temperature"] else None
        found = oracle.judge([request.prompt], [token_ids], sampling=sampling)
        verdict.num_positions += found.num_positions
        verdict.ties += found.ties
        return f"{len(found.wrong)} tokens are not those of float64: {found.wrong[:3]}" if found.wrong else ""

    return wrong_of

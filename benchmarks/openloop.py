"""An open loop of requests against a router: arrivals do not wait for answers.

`open_loop` speaks the wire protocol directly, so that little of the client is measured.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from pdserve.core.results import nearest_rank
from pdserve.core.types import Slo
from pdserve.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One request; None where it failed."""

    ttft_s: float  # send to first token, at the client
    total_s: float
    added_s: float  # ttft_s less what the prefilling worker says that it took
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The router rejected the request as overloaded."""

    after_s: float  # from send to the status, at the client


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    rate_rps: float
    sent: int
    failed: int  # rejections included
    late_start_s: float  # worst delay of a send against its arrival time: the client's own saturation
    wall_s: float
    answers: list[TimedAnswer]
    rejections: list[Rejection]


def poisson(draw: random.Random, rate_rps: float, seconds: float) -> Iterator[float]:
    """Times of arrival before `seconds`."""
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(rate_rps)) < seconds:
        yield at_s


async def drive(sends: Iterable[tuple[float, Callable[[], Coroutine[Any, Any, T]]]]) -> tuple[list[T], float]:
    """Sends each request at its time, all that are late at once. Also returns the longest delay of a send, which shows
    whether the client is saturated."""
    begin_s, late_start_s, tasks = time.perf_counter(), 0.0, []
    for at_s, send in sends:
        wait_s = begin_s + at_s - time.perf_counter()
        late_start_s = max(late_start_s, -wait_s)
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(send()))
    return await asyncio.gather(*tasks), late_start_s


async def open_loop(
    target: str,
    rate_rps: float,
    duration_s: float,
    prompt_tokens: int | Sequence[int],
    max_tokens: int,
    seed: int,
    channels: int = 4,
    slo: Slo | None = None,
) -> OfferedLoad:
    """Poisson arrivals at `rate_rps` for `duration_s`. Prompts differ; the length of each is one of `prompt_tokens`.
    Without `slo` the router's default targets hold."""
    draw = random.Random(seed)
    conns = [
        grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(channels)
    ]
    stubs = [inference_pb2_grpc.InferenceServiceStub(conn) for conn in conns]
    lengths = (prompt_tokens,) if isinstance(prompt_tokens, int) else tuple(prompt_tokens)
    arrivals = list(poisson(draw, rate_rps, duration_s))
    requests = [make_request(draw, draw.choice(lengths), max_tokens, slo) for _ in arrivals]
    sends = [partial(ask, stubs[index % channels], request) for index, request in enumerate(requests)]
    begin = time.perf_counter()
    answers, late_start_s = await drive(zip(arrivals, sends, strict=True))
    wall_s = time.perf_counter() - begin
    for conn in conns:
        await conn.close(None)
    good = [one for one in answers if isinstance(one, TimedAnswer)]
    return OfferedLoad(
        rate_rps=rate_rps,
        sent=len(answers),
        failed=len(answers) - len(good),
        late_start_s=late_start_s,
        wall_s=wall_s,
        answers=good,
        rejections=[one for one in answers if isinstance(one, Rejection)],
    )


async def closed_loop(
    target: str,
    callers: int,
    duration_s: float,
    prompt_tokens: Sequence[int],
    max_tokens: int,
    seed: int,
    slo: Slo,
    warm_s: float = 0.0,
) -> OfferedLoad:
    """`callers` that each send the next request when the last one has ended: what the cluster can do.

    Counts what ends in the `duration_s` after `warm_s`, while all callers go on: neither their common start nor the
    end, when only some of them still wait, is measured.
    """
    begins_s = time.perf_counter() + warm_s
    ends_s = begins_s + duration_s
    draw = random.Random(seed)

    async with grpc.aio.insecure_channel(target) as conn:
        stub = inference_pb2_grpc.InferenceServiceStub(conn)

        async def call() -> list[TimedAnswer | Rejection | None]:
            found = []
            while time.perf_counter() < ends_s:
                one = await ask(stub, make_request(draw, draw.choice(prompt_tokens), max_tokens, slo))
                if begins_s <= time.perf_counter() < ends_s:
                    found.append(one)
            return found

        found = [one for each in await asyncio.gather(*(call() for _ in range(callers))) for one in each]
    good = [one for one in found if isinstance(one, TimedAnswer)]
    return OfferedLoad(
        rate_rps=len(found) / duration_s,
        sent=len(found),
        failed=len(found) - len(good),
        late_start_s=0.0,
        wall_s=duration_s,
        answers=good,
        rejections=[one for one in found if isinstance(one, Rejection)],
    )


def make_request(
    draw: random.Random, prompt_tokens: int, max_tokens: int, slo: Slo | None
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[draw.randrange(32, 127) for _ in range(prompt_tokens)]),
        sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        slo=None if slo is None else inference_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
    )


async def ask(
    stub: inference_pb2_grpc.InferenceServiceStub, request: inference_pb2.GenerateRequest
) -> TimedAnswer | Rejection | None:
    begin = time.perf_counter()
    first = 0.0
    tokens = 0
    finished = None
    try:
        async for message in stub.Generate(request, timeout=60):
            if message.WhichOneof("event") == "delta" and message.delta.token_ids:
                first = first or time.perf_counter()
                tokens += len(message.delta.token_ids)
            elif message.WhichOneof("event") == "finished":
                finished = message.finished
    except grpc.aio.AioRpcError as error:
        is_rejected = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return Rejection(after_s=time.perf_counter() - begin) if is_rejected else None
    if finished is None:
        return None
    ttft_s = first - begin
    # queue_s does not separate the worker's share from the router's, so only the compute time is subtracted.
    added_s = ttft_s - finished.timings.phases.prefill_s
    return TimedAnswer(
        ttft_s=ttft_s,
        total_s=time.perf_counter() - begin,
        added_s=added_s,
        tokens=tokens,
        prompt_tokens=len(request.token_ids.ids),
        cached_tokens=finished.usage.cached_prompt_tokens,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; nan where there are no values."""
    if not values:
        return math.nan
    return nearest_rank(sorted(values), share)

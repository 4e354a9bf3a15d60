"""An open loop of requests against a router: arrivals come when they come, whatever the answers do.

Used by the router and tracing benchmarks. Speaks the wire directly, so that little of the client is measured.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pdserve.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request; None where it failed."""

    ttft_s: float  # send to first token, at the client
    total_s: float
    added_s: float  # ttft_s less what the prefilling worker says that it took
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    rate_rps: float
    sent: int
    failed: int
    late_start_s: float  # worst delay of a send against its arrival time: the client's own saturation
    wall_s: float
    answers: list[Answer]


async def open_loop(
    target: str, rate_rps: float, duration_s: float, prompt_tokens: int, max_tokens: int, seed: int, channels: int = 4
) -> Load:
    """Poisson arrivals at `rate_rps` for `duration_s`, every prompt different."""
    draw = random.Random(seed)
    conns = [
        grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(channels)
    ]
    stubs = [inference_pb2_grpc.InferenceServiceStub(conn) for conn in conns]
    arrivals: list[float] = []
    at = 0.0
    while True:
        at += draw.expovariate(rate_rps)
        if at >= duration_s:
            break
        arrivals.append(at)
    requests = [
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[draw.randrange(32, 127) for _ in range(prompt_tokens)]),
            sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        for _ in arrivals
    ]
    begin = time.perf_counter()
    late_start_s = 0.0
    tasks = []
    for i, (arrival, request) in enumerate(zip(arrivals, requests, strict=True)):
        wait_s = begin + arrival - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        else:
            late_start_s = max(late_start_s, -wait_s)
        tasks.append(asyncio.create_task(_one(stubs[i % channels], request)))
    answers = await asyncio.gather(*tasks)
    wall_s = time.perf_counter() - begin
    for conn in conns:
        await conn.close(None)
    good = [answer for answer in answers if answer is not None]
    return Load(
        rate_rps=rate_rps,
        sent=len(answers),
        failed=len(answers) - len(good),
        late_start_s=late_start_s,
        wall_s=wall_s,
        answers=good,
    )


async def _one(stub: inference_pb2_grpc.InferenceServiceStub, request: inference_pb2.GenerateRequest) -> Answer | None:
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
    except grpc.aio.AioRpcError:
        return None
    if finished is None:
        return None
    ttft_s = first - begin
    # The worker's own share of queue_s is not told apart from the router's, so only computing is taken off.
    added_s = ttft_s - finished.timings.prefill_s
    return Answer(ttft_s=ttft_s, total_s=time.perf_counter() - begin, added_s=added_s, tokens=tokens)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; nan where there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

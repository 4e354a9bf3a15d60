"""One contender of the goodput benchmark: a real cluster on this machine under an open loop at one rate after another.

A request meets its targets if its whole answer came, its first token within the TTFT target, and the others within the
TPOT target on average, on the client's clock. Rejected, failed and incomplete answers do not.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from benchmarks.goodput import vllm_server
from benchmarks.goodput.load import MIXED, PATIENCE_S, Lengths, Planned, Seen, plan
from benchmarks.goodput.vllm_server import VLLM
from benchmarks.openloop import drive
from pdserve.core.cost.latency import CostModel
from pdserve.core.protocol import BatchTimed
from pdserve.core.types import Slo
from pdserve.launch.running import Running
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.recording import replay
from router.state.interface import WorkerConnected
from simulator.cluster.world import simulate
from simulator.traces.files import FileTrace

REPEATED = ((92, 40), (700, 40))  # prompt and answer of the requests that are repeated on the idle cluster
REPEATS = 24


@dataclass(frozen=True, slots=True)
class Contender:
    policy: str  # of the router; VLLM: a server of vllm
    prefill: int
    decode: int
    dtype: str = ""  # of the peer

    @property
    def label(self) -> str:
        if self.policy == VLLM:
            return f"{VLLM} {self.dtype}"
        return f"{self.policy} {self.prefill}P+{self.decode}D"


@dataclass(frozen=True, slots=True)
class Floor:
    """How far the same request, repeated on the idle cluster, is from its own median: |seconds - median| / median of
    each. A prediction of that median has this error; none can have less."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Cell:
    """One rate with one seed."""

    contender: str
    rate_rps: float
    seed: int
    rows: list[Seen]
    late_start_s: float  # longest delay of a send, which shows whether the client is saturated
    ttft_errors: list[float] = field(default_factory=list)  # |predicted - actual| / actual, as the router explains
    tpot_errors: list[float] = field(default_factory=list)
    floor: Floor = Floor()
    batch_errors: dict[str, float] = field(
        default_factory=dict
    )  # error of each worker's fitted cost over the whole run
    simulated: list[bool] = field(default_factory=list)  # attainment of the same requests in the simulator

    def kept(self, slo: Slo) -> float:
        return sum(row.ttft_s <= slo.ttft_s and row.tpot_s <= slo.tpot_s for row in self.rows) / len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The load that each policy gets."""

    model: str
    rates: Sequence[float]
    seconds: float
    settle_s: float  # of the warm-up; predictions count only for requests that arrive so long after the first
    slo: Slo
    lengths: Lengths = MIXED
    sets: Sequence[str] = ()
    peer_python: str = ""  # of an environment with vllm


def run(contender: Contender, course: Course, seed: int, record: Path | None, on_cell: Callable[[Cell], None]) -> None:
    """Starts the cluster, warms it up, and runs the rates in ascending order; calls `on_cell` after each."""
    if contender.policy == VLLM:
        with vllm_server.serve(course.peer_python, course.model, contender.dtype) as server:
            asyncio.run(_run_peer(server, contender, course, seed, on_cell))
        return
    threads = max((os.cpu_count() or 1) // (contender.prefill + contender.decode), 1)
    record_flags = () if record is None else ("--record", str(record))
    words = [f"router.policy={contender.policy}", "router.request_timeout_s=60", *course.sets]
    flags = ["--model", course.model, "--prefill", str(contender.prefill), "--decode", str(contender.decode)]
    for word in words:
        flags += ["--set", word]
    with Running.start(
        *flags, *record_flags, timeout_s=vllm_server.START_S, env={"OMP_NUM_THREADS": str(threads)}
    ) as cluster:
        asyncio.run(_run(cluster.target, contender, course, seed, on_cell))


async def _run(target: str, contender: Contender, course: Course, seed: int, on_cell: Callable[[Cell], None]) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        begin_s = time.perf_counter()
        ask = partial(_ask, inference_pb2_grpc.InferenceServiceStub(channel), course.slo)
        if course.settle_s:
            await _send(plan(course.rates[0], course.settle_s, seed, "warm", course.lengths), ask)
        await _until_idle(channel)
        floor = await _floor(channel, course.slo)
        for rate_rps in course.rates:
            await _until_idle(channel)
            planned = plan(rate_rps, course.seconds, seed, f"{rate_rps}-{seed}", course.lengths)
            cell_s = time.perf_counter() - begin_s
            rows, late_start_s = await _send(planned, ask)
            cell = Cell(
                contender=contender.label,
                rate_rps=rate_rps,
                seed=seed,
                rows=rows,
                late_start_s=late_start_s,
                floor=floor,
            )
            settled = [one for one in planned if cell_s + one.at_s >= course.settle_s]
            await _explain(channel, settled, cell)
            on_cell(cell)


async def _send(
    planned: Sequence[Planned], ask: Callable[[Planned], Coroutine[Any, Any, Seen]]
) -> tuple[list[Seen], float]:
    return await drive((one.at_s, partial(ask, one)) for one in planned)


async def _run_peer(
    server: vllm_server.Server, contender: Contender, course: Course, seed: int, on_cell: Callable[[Cell], None]
) -> None:
    client = server.client()
    await client.connect()
    ask = partial(vllm_server.ask, client)
    if course.settle_s:
        await _send(plan(course.rates[0], course.settle_s, seed, "warm", course.lengths), ask)
    for rate_rps in course.rates:
        planned = plan(rate_rps, course.seconds, seed, f"{rate_rps}-{seed}", course.lengths)
        rows, late_start_s = await _send(planned, ask)
        server.check()
        on_cell(Cell(contender=contender.label, rate_rps=rate_rps, seed=seed, rows=rows, late_start_s=late_start_s))
    await client.close()


async def _ask(stub: inference_pb2_grpc.InferenceServiceStub, slo: Slo, one: Planned) -> Seen:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=one.prompt),
        sampling=inference_pb2.SamplingParams(
            max_tokens=one.max_tokens, temperature=1.0, seed=len(one.prompt), ignore_eos=True
        ),
        slo=inference_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
        request_id=one.request_id,
    )
    begin_s = time.perf_counter()
    times_s: list[float] = []
    tokens, is_finished = 0, False
    try:
        async for message in stub.Generate(request, timeout=PATIENCE_S):
            if message.WhichOneof("event") == "delta" and message.delta.token_ids:
                times_s.append(time.perf_counter())
                tokens += len(message.delta.token_ids)
            is_finished = is_finished or message.WhichOneof("event") == "finished"
    except grpc.aio.AioRpcError as error:
        return Seen(outcome=error.code().name, tokens=tokens)
    if not is_finished or tokens < one.max_tokens:
        return Seen(outcome="cut", tokens=tokens)
    return Seen.served(begin_s, times_s, tokens)


async def _floor(channel: grpc.aio.Channel, slo: Slo) -> Floor:
    """One at a time; each shape's requests take turns with the other's, and are compared with those of their path."""
    ask, explain = inference_pb2_grpc.InferenceServiceStub(channel), cluster_pb2_grpc.ClusterServiceStub(channel)
    texts = random.Random("floor")
    took: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for number in range(REPEATS):
        for tokens, answer in REPEATED:
            prompt = [texts.randrange(32, 127) for _ in range(tokens)]
            name = f"floor-{tokens}-{number}"
            await _ask(ask, slo, Planned(request_id=name, at_s=0.0, prompt=prompt, max_tokens=answer))
            await _until_idle(channel, pause_s=0.005)
            explained = await explain.Explain(cluster_pb2.ExplainRequest(request_id=name))
            for chosen in (each for each in explained.candidates if each.is_chosen):
                took[tokens, chosen.prefill_worker].append((explained.actual_ttft_s, explained.actual_tpot_s))
    return Floor(*([one for like in took.values() for one in _off([each[i] for each in like])] for i in range(2)))


def _off(seconds: Sequence[float]) -> list[float]:
    middle = statistics.median(seconds)
    return [abs(one - middle) / middle for one in seconds] if len(seconds) > 1 and middle > 0.0 else []


async def _explain(channel: grpc.aio.Channel, planned: Sequence[Planned], cell: Cell) -> None:
    """Adds the errors of the router's predictions. The router keeps the last thousand requests."""
    stub = cluster_pb2_grpc.ClusterServiceStub(channel)
    for one in planned:
        try:
            explained = await stub.Explain(cluster_pb2.ExplainRequest(request_id=one.request_id))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            continue
        for chosen in (each for each in explained.candidates if each.is_chosen and not explained.is_resumed):
            if explained.HasField("actual_ttft_s"):
                predicted_s = explained.waited_s + chosen.predicted_ttft_s
                cell.ttft_errors.append(abs(predicted_s - explained.actual_ttft_s) / explained.actual_ttft_s)
            if explained.HasField("actual_tpot_s") and explained.actual_tpot_s > 0.0:
                cell.tpot_errors.append(
                    abs(chosen.predicted_tpot_s - explained.actual_tpot_s) / explained.actual_tpot_s
                )


async def _until_idle(channel: grpc.aio.Channel, within_s: float = 90.0, pause_s: float = 0.1) -> None:
    stub, until_s = cluster_pb2_grpc.ClusterServiceStub(channel), time.monotonic() + within_s
    while True:
        now = await stub.GetTopology(cluster_pb2.GetTopologyRequest())
        if now.queued_requests == now.running_requests == 0:
            return
        if time.monotonic() > until_s:
            raise TimeoutError(f"{now.running_requests} requests still run after {within_s:.0f} s")
        await asyncio.sleep(pause_s)


def attained(rates: Sequence[float], shares: Sequence[float], target: float = 0.9) -> float:
    """The highest rate with attainment `target`, interpolated between two rates; 0 if no rate has it."""
    points = list(zip(rates, shares, strict=True))
    best = 0.0
    for (rate, share), after in zip(points, [*points[1:], None], strict=True):
        if share < target:
            continue
        best = rate
        if after is not None and after[1] < target:
            best += (after[0] - rate) * (share - target) / (share - after[1])
    return best


def add_simulated(record: Path, cells: Sequence[Cell]) -> None:
    """Adds to each cell the attainment of its requests in a simulation of the whole recording.

    Requests of the warm-up come first in the recording and belong to no cell.
    """
    trace = FileTrace(record)
    cluster = trace.cluster()
    assert cluster is not None, "a recording knows its cluster"
    kept = [row.has_met_slo for row in simulate(trace, cluster.config()).requests]
    end, batch_errors = len(kept), _batch_errors(record)
    for cell in reversed(cells):
        cell.batch_errors = batch_errors
        cell.simulated = kept[end - len(cell.rows) : end]
        end -= len(cell.rows)


def _batch_errors(record: Path) -> dict[str, float]:
    """Median |predicted - actual| / actual of single batches, a limit for any prediction on this machine."""
    models: dict[str, CostModel] = {}
    errors: defaultdict[str, list[float]] = defaultdict(list)
    with record.open(encoding="utf-8") as lines:
        next(lines)  # the settings
        for step in replay.read(lines):
            match step.event:
                case WorkerConnected() as hello:
                    models[hello.worker_id] = CostModel(hello.cost)
                case BatchTimed() as batch if batch.step_s > 0.0 and batch.worker_id in models:
                    model = models[batch.worker_id]
                    work = (batch.rows, batch.context_tokens, batch.prefill_tokens, batch.prefill_token_context)
                    errors[batch.worker_id].append(abs(model.step_s(*work) / batch.step_s - 1.0))
                    model.observe(
                        rows=batch.rows,
                        prefill_tokens=batch.prefill_tokens,
                        prefill_token_context=batch.prefill_token_context,
                        context_tokens=batch.context_tokens,
                        step_s=batch.step_s,
                    )
    return {worker_id: statistics.median(found) for worker_id, found in sorted(errors.items())}

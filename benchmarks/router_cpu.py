"""CPU per token and per request of the router in one process, from a worker's message to the client.

    python -m benchmarks.router_cpu [MODE ...] [--rows 8] [--rounds 16] [--profile] [--json]

Streamed chats of some 210 tokens with a Hugging Face tokenizer (the bundled model's). The workers are replaced by a
script that calls `Workers.received` on the router's event loop, so neither engines nor their streams are measured.
Everything else is real. The modes, all by default:

- `http`: SDK, gateway, uvicorn, and sockets whose client is another process. As by default on one host, no bytes are
  between gateway and router.
- `http-grpc`: the same, with gRPC between gateway and router.
- `off`, `metrics`, `traces-0`, `traces-1`: the router alone, called in the process: without metrics and traces, with
  metrics, also with traces of which none is kept, or all.
- `recording`: for each of these four, what is recorded of a request and of a token, without the request.

CPU is that of this process with all its threads, without the child process that applies the template. The cost of a
token is the difference between long and short answers, and that of a request is the rest. Other load on the machine
inflates the figures somewhat, so the least of several rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import logging
import multiprocessing
import os
import pstats
import selectors
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.build import FULL_VERSION
from pdserve.config import GatewayConfig, RouterConfig
from pdserve.core.json_text import to_json
from pdserve.core.results import Timings, Usage
from pdserve.core.types import FinishReason, Path, Sampling, Slo
from pdserve.gateway.server import GatewayServer
from pdserve.launch.settings import bundled_model
from pdserve.telemetry import names
from pdserve.telemetry.logs import FieldFormatter
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.tracing import Service, Tracing, make_tracing
from pdserve.v1 import inference_pb2, inference_pb2_grpc, transfer_pb2, worker_pb2
from router.service.measure import Measure, RequestFacts
from router.service.server import RouterServer
from router.service.worker_stream import WorkerStream
from router.state.interface import FinishRequest, Outcome, RequestArrived

MODEL: Final = bundled_model()
STEP_S: Final = 0.005  # between two messages of the decode worker; the process sleeps in it
SHORT_TOKENS: Final = 4
LONG_TOKENS: Final = 68
PROMPT: Final = "def main(arguments): return the sum of the lengths of them " * 12
WAIT_S: Final = 60.0
SLO: Final = Slo(ttft_s=120.0, tpot_s=20.0)  # other load on the machine makes no trace notable
NO_COLLECTOR: Final = "127.0.0.1:9"  # spans are built and queued, and cannot be sent
RECORDINGS: Final = 2000
TELEMETRY: Final[dict[str, tuple[bool, float | None]]] = {  # metrics, and share of the traces; None: no endpoint
    "off": (False, None),
    "metrics": (True, None),
    "traces-0": (True, 0.0),
    "traces-1": (True, 1.0),
}
MODES: Final = ("http", "http-grpc", *TELEMETRY, "recording")


# --- workers --------------------------------------------------------------------------------------------------


@dataclass
class Running:
    attempt: int
    max_tokens: int
    num_tokens: int = 1


class ScriptedStream:
    """A worker's stream without a worker: answers commands on the event loop."""

    def __init__(self, worker_id: str, on_command: Callable[[worker_pb2.AttachRequest], None]) -> None:
        self.worker_id, self.incarnation, self.endpoint = worker_id, "1", f"{worker_id}:1"
        self.is_attached, self._on_command = True, on_command

    def send(self, message: worker_pb2.AttachRequest) -> bool:
        asyncio.get_running_loop().call_soon(self._on_command, message)
        return True

    def hang_up(self) -> None:
        raise AssertionError("the router found a message invalid")


@dataclass
class ScriptedWorkers:
    """One prefill and one decode worker. Every prompt is prefilled at once; a step gives each answer a token."""

    router: RouterServer
    max_tokens: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    num_ended: int = 0

    def attach(self) -> None:
        shape = transfer_pb2.KvShape(
            layout="block-major.v1", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16
        )
        shape.tp_degree = 1
        self._streams = {name: ScriptedStream(name, self._answer) for name in ("p0", "d0")}
        for name, role in (("p0", worker_pb2.ROLE_PREFILL), ("d0", worker_pb2.ROLE_DECODE)):
            hello = worker_pb2.WorkerHello(
                worker_id=name,
                incarnation="1",
                role=role,
                model=MODEL.name,
                version=FULL_VERSION,
                max_context_tokens=4096,
                inbox_depth=512,
                block_size=16,
                vocab_size=4096,
                num_blocks=100_000,
                max_batch=512,
                max_batch_tokens=65_536,
                hash_seed=b"0" * 16,
                fingerprint=transfer_pb2.Fingerprint(protocol=1, model=MODEL.name, engine="toy", shape=shape),
            )
            assert self.router._workers.attached(self._stream(name), hello) is None

    def step(self) -> None:
        """One message of the decode worker, as pdserve's own sends it."""
        plain, rows = worker_pb2.PlainTokens(), []
        for request_id, one in list(self.running.items()):
            token_id = 32 + (one.num_tokens * 7 + len(request_id)) % 60
            if one.num_tokens + 1 < one.max_tokens:
                plain.request_ids.append(request_id)
                plain.attempts.append(one.attempt)
                plain.output_indexes.append(one.num_tokens)
                plain.token_ids.append(token_id)
                one.num_tokens += 1
            else:
                row = worker_pb2.TokenRow(
                    request_id=request_id,
                    attempt=one.attempt,
                    output_index=one.num_tokens,
                    tokens=[worker_pb2.Token(token_id=token_id)],
                    finish=inference_pb2.FINISH_REASON_LENGTH,
                    decode_s=0.1,
                )
                rows.append(row)
                del self.running[request_id]
        self._send("d0", tokens=worker_pb2.Tokens(plain=plain, rows=rows))
        for row in rows:
            released = worker_pb2.Released(request_id=row.request_id, attempt=row.attempt)
            self._send("d0", released=released)
            self._send("p0", released=released)
            self.num_ended += 1

    def _answer(self, message: worker_pb2.AttachRequest) -> None:
        kind, key = message.WhichOneof("message"), dict[str, Any]()
        if kind == "reserve":
            sequence, is_local = message.reserve.sequence, message.reserve.is_local
            key = {"request_id": sequence.request_id, "attempt": sequence.attempt}
            self.max_tokens = sequence.sampling.max_tokens
            if is_local:
                self.running[sequence.request_id] = Running(sequence.attempt, self.max_tokens, num_tokens=0)
            self._send("d0", granted=worker_pb2.Granted(**key, grant=None if is_local else b"grant", grant_s=1e-4))
        elif kind == "prefill":
            sequence = message.prefill.sequence
            key = {"request_id": sequence.request_id, "attempt": sequence.attempt}
            token = worker_pb2.Token(token_id=65)
            self._send("p0", first_token=worker_pb2.FirstToken(**key, token=token, queue_s=1e-4, prefill_s=1e-3))
            ended = worker_pb2.TransferEnded(**key, is_committed=True, transfer_s=1e-3, num_bytes=1000, busy_s=1e-3)
            self._send("d0", transfer_ended=ended)
        elif kind == "admit":
            self.running[message.admit.request_id] = Running(message.admit.attempt, self.max_tokens)

    def _send(self, worker_id: str, **message: Any) -> None:
        # Encoded and decoded, as on the wire: a parsed message is read in another way than a built one.
        data = worker_pb2.AttachResponse(**message).SerializeToString()
        self.router._workers.received(self._stream(worker_id), worker_pb2.AttachResponse.FromString(data))

    def _stream(self, worker_id: str) -> WorkerStream:
        return self._streams[worker_id]  # type: ignore[return-value]  # the part of it that Workers uses


# --- client ---------------------------------------------------------------------------------------------------


def read_answers(port: int, pipe: Any, num_rows: int) -> None:
    """A process: for each number of tokens, sends a request on each connection and reads the answers."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_rows)]
    selector = selectors.DefaultSelector()
    for one in connections:
        selector.register(one, selectors.EVENT_READ)
    numbers = itertools.count()
    while num_tokens := pipe.recv():
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        for one in connections:
            body = json.dumps(
                {
                    "model": MODEL.name,
                    "messages": [{"role": "user", "content": f"{next(numbers)} {PROMPT}"}],
                    "max_tokens": num_tokens,
                    "stream": True,
                    "ignore_eos": True,
                }
            ).encode()
            one.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        read = {one: bytearray() for one in connections}
        left = len(connections)
        while left:
            for key, _ in selector.select(WAIT_S):
                data = read[key.fileobj]  # type: ignore[index]
                data += key.fileobj.recv(65_536)  # type: ignore[union-attr]
                if not data.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(data.decode())
                left -= data.endswith(b"0\r\n\r\n")
        pipe.send([data.count(b"data: ") for data in read.values()])


# One call sends `rows` requests for so many tokens; a second one returns the number of messages of each answer, or None
# while they are not complete.
Send = Callable[[int], Callable[[], list[int] | None]]


@asynccontextmanager
async def over_http(router: RouterServer, address: str, num_rows: int) -> AsyncIterator[Send]:
    """`address` is the router's; empty: the gateway calls it in the process."""
    gateway = GatewayServer(GatewayConfig(router=address, port=0), None if address else router.transport)
    port = int((await gateway.start()).rpartition(":")[2])
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=read_answers, args=(port, there, num_rows), daemon=True).start()

    def send(num_tokens: int) -> Callable[[], list[int] | None]:
        here.send(num_tokens)
        return lambda: here.recv() if here.poll() else None

    try:
        yield send
    finally:
        here.send(0)
        await gateway.stop()


@asynccontextmanager
async def in_process(router: RouterServer, num_rows: int) -> AsyncIterator[Send]:
    channel = router.transport.open_aio(None)
    stub, numbers = inference_pb2_grpc.InferenceServiceStub(channel), itertools.count()

    async def ask(request: inference_pb2.GenerateRequest) -> int:
        return len([message async for message in stub.Generate(request)])

    def send(num_tokens: int) -> Callable[[], list[int] | None]:
        tasks = [asyncio.create_task(ask(a_request(next(numbers), num_tokens))) for _ in range(num_rows)]
        return lambda: [one.result() for one in tasks] if all(one.done() for one in tasks) else None

    yield send
    await channel.close()


def a_request(number: int, num_tokens: int) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content=f"{number} {PROMPT}")
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=(message,)),
        sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
    )


# --- measurement ----------------------------------------------------------------------------------------------


async def measure(mode: str, flags: argparse.Namespace) -> dict[str, float]:
    has_metrics, share = TELEMETRY.get(mode, (False, None))
    config = RouterConfig(
        model=str(MODEL),
        port=0,
        cluster_secret="s" * 32,
        slo_ttft_s=SLO.ttft_s,
        slo_tpot_s=SLO.tpot_s,
        otlp="" if share is None else NO_COLLECTOR,
        trace_share=share or 0.0,
    )
    router = RouterServer(config, metrics=Metrics("router") if has_metrics else None)
    address = await router.start()
    workers = ScriptedWorkers(router)
    workers.attach()
    profile = cProfile.Profile(time.thread_time) if flags.profile else None

    async def answers(send: Send, num_tokens: int) -> float:
        """CPU seconds of `rows` answers at once."""
        ended, before_s = workers.num_ended + flags.rows, time.process_time()
        received = send(num_tokens)
        async with asyncio.timeout(WAIT_S):
            while workers.num_ended < ended:
                await asyncio.sleep(STEP_S)
                if len(workers.running) == ended - workers.num_ended:
                    workers.step()
            while (messages := received()) is None:
                await asyncio.sleep(STEP_S)
        used_s = time.process_time() - before_s
        assert min(messages) > num_tokens / 2, f"{messages} messages: tokens were merged"
        return used_s

    is_http = mode.startswith("http")
    client = over_http(router, address if mode == "http-grpc" else "", flags.rows) if is_http else None
    try:
        async with client or in_process(router, flags.rows) as send:
            for _ in range(2):  # warm-up
                await answers(send, LONG_TOKENS)
            if profile is not None:
                profile.enable()
            rounds = [
                (await answers(send, SHORT_TOKENS), await answers(send, LONG_TOKENS)) for _ in range(flags.rounds)
            ]
            if profile is not None:
                profile.disable()
    finally:
        await router.stop()
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(70)
    short_s, long_s = (min(times) / flags.rows for times in zip(*rounds, strict=True))
    token_s = (long_s - short_s) / (LONG_TOKENS - SHORT_TOKENS)
    return {"request_s": short_s - SHORT_TOKENS * token_s, "token_s": token_s}


def recording(mode: str, rounds: int) -> dict[str, float]:
    has_metrics, share = TELEMETRY[mode]
    tracing = Tracing.off()
    if share is not None:
        tracing = make_tracing(Service("pdserve-router", "benchmark"), NO_COLLECTOR, share=share)
        assert tracing.is_on, "install pdserve[otel]"
    measure = Measure(Metrics("router") if has_metrics else Metrics.off(), tracing)
    measure.listens_at("127.0.0.1", 1)
    request = a_request(0, 16)
    timings = Timings(
        ttft_s=0.02, tpot_s=0.005, total_s=0.1, path=Path.REMOTE, prefill_worker="p0", decode_worker="d0", attempts=1
    )
    usage = Usage(prompt_tokens=210, completion_tokens=16, cached_prompt_tokens=0)
    end = FinishRequest(
        request_id="r", reason=FinishReason.LENGTH, usage=usage, timings=timings, outcome=Outcome.SERVED
    )
    arrival = RequestArrived(request_id="r", num_prompt_tokens=210, sampling=Sampling(max_tokens=16), slo=SLO)

    def facts_in(span: Any) -> RequestFacts:
        return RequestFacts(span=span, arrived_s=0.0, slo=SLO, operation=names.CHAT, model=MODEL.name)

    def of_a_request() -> None:
        with measure.call_span(request, MODEL.name, "") as span:
            facts = facts_in(span)
            measure.looked_up(span, 0.0001, 0)
            measure.arrived(facts, arrival)
            measure.placed("remote", 1)
            for _ in range(8):  # events of a request besides its tokens
                measure.decided(0.00002)
            measure.finished(facts, end)
            measure.answered(span)
            measure.delivered(span, 0.1)

    def of_a_token() -> None:
        measure.decided(0.00002)
        measure.emitted(facts, 1)

    def each_s(record: Callable[[], None]) -> float:
        began_s = time.process_time()
        for _ in range(RECORDINGS):
            record()
        return (time.process_time() - began_s) / RECORDINGS

    with measure.call_span(request, MODEL.name, "") as span:
        facts = facts_in(span)
        found = {
            name: min(each_s(record) for _ in range(rounds))
            for name, record in (("request_s", of_a_request), ("token_s", of_a_token))
        }
    tracing.close(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--rows", type=int, default=8, help="answers at a time")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    if unknown := set(flags.modes) - set(MODES):
        parser.error(f"MODE: {', '.join(sorted(unknown))}; known are {', '.join(MODES)}")
    found = dict[str, dict[str, float]]()
    with open(os.devnull, "w") as nowhere:  # formatted as the router's log, and written
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s router %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # there is no collector
        print("CPU, us              request     token")
        for mode in flags.modes or MODES:
            if mode == "recording":
                found |= {f"recording {one}": recording(one, flags.rounds) for one in TELEMETRY}
            else:
                found[mode] = asyncio.run(measure(mode, flags))
        for name, costs in found.items():
            print(f"{name:<18}{costs['request_s'] * 1e6:10.1f}{costs['token_s'] * 1e6:10.2f}")
    if flags.json:
        print(to_json(found))


if __name__ == "__main__":
    main()

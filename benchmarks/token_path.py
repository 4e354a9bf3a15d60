"""CPU per token and per request of gateway and router in one process, from a worker's message to the client's socket.

    python -m benchmarks.token_path [--channel local|grpc] [--rows 8] [--rounds 16] [--profile] [--json]

Streamed chats with a Hugging Face tokenizer (the bundled model's). The workers are replaced by a script that calls
`Workers.received` on the router's event loop, so neither engines nor their streams are measured. Everything else is
real: admission, state machine, answers, SDK, gateway, uvicorn, and sockets whose client is another process. With
`--channel local`, as by default on one host, no bytes are between gateway and router; with `grpc`, they use gRPC
within the process. CPU is that of this process with all its threads. The cost of a token is the difference between
long and short answers, and that of a request is the rest. Other load on the machine inflates the figures somewhat, so
the least of several rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pdserve
from pdserve.build import FULL_VERSION
from pdserve.config import GatewayConfig, RouterConfig
from pdserve.core.json_text import to_json
from pdserve.gateway.server import GatewayServer
from pdserve.v1 import inference_pb2, transfer_pb2, worker_pb2
from router.service.server import RouterServer
from router.service.worker_stream import WorkerStream

MODEL: Final = Path(pdserve.__file__).parent / "models" / "stdlib-5m"
STEP_S: Final = 0.005  # between two messages of the decode worker; the process sleeps in it
SHORT_TOKENS: Final = 4
LONG_TOKENS: Final = 68
PROMPT: Final = "def main(arguments): return the sum of the lengths of them " * 12
WAIT_S: Final = 60.0


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
            key = {"request_id": message.reserve.sequence.request_id, "attempt": message.reserve.sequence.attempt}
            self._send("d0", granted=worker_pb2.Granted(**key, grant=b"grant", grant_s=1e-4))
        elif kind == "prefill":
            sequence = message.prefill.sequence
            key = {"request_id": sequence.request_id, "attempt": sequence.attempt}
            token = worker_pb2.Token(token_id=65)
            self.max_tokens = sequence.sampling.max_tokens
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
    while num_tokens := pipe.recv():
        body = json.dumps(
            {
                "model": MODEL.name,
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": num_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        for one in connections:
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
        chunks = [data.count(b"data: ") for data in read.values()]
        pipe.send((chunks, sum(map(len, read.values()))))


# --- measurement ----------------------------------------------------------------------------------------------


async def measure(flags: argparse.Namespace) -> dict[str, float]:
    router = RouterServer(
        RouterConfig(model=str(MODEL), port=0, cluster_secret="s" * 32, slo_ttft_s=120.0, slo_tpot_s=20.0)
    )
    address = await router.start()
    workers = ScriptedWorkers(router)
    workers.attach()
    config = GatewayConfig(router="" if flags.channel == "local" else address, port=0)
    gateway = GatewayServer(config, router.transport if flags.channel == "local" else None)
    port = int((await gateway.start()).rpartition(":")[2])
    here, there = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(
        target=read_answers, args=(port, there, flags.rows), daemon=True
    )
    reader.start()
    profile = cProfile.Profile(time.thread_time) if flags.profile else None

    async def answers(num_tokens: int) -> float:
        """CPU seconds of `rows` answers at once."""
        here.send(num_tokens)
        ended = workers.num_ended + flags.rows
        before_s = time.process_time()
        while workers.num_ended < ended:
            await asyncio.sleep(STEP_S)
            if len(workers.running) == ended - workers.num_ended:
                workers.step()
        while not here.poll():
            await asyncio.sleep(STEP_S)
        used_s = time.process_time() - before_s
        chunks, _ = here.recv()
        assert min(chunks) > num_tokens / 2, f"{chunks} chunks: tokens were merged"
        return used_s

    try:
        await answers(LONG_TOKENS)  # warm-up
        await answers(LONG_TOKENS)
        if profile is not None:
            profile.enable()
        rounds = [(await answers(SHORT_TOKENS), await answers(LONG_TOKENS)) for _ in range(flags.rounds)]
        if profile is not None:
            profile.disable()
    finally:
        here.send(0)
        await gateway.stop()
        await router.stop()
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(70)
    short_s, long_s = (min(times) / flags.rows for times in zip(*rounds, strict=True))
    token_s = (long_s - short_s) / (LONG_TOKENS - SHORT_TOKENS)
    return {"token_s": token_s, "request_s": short_s - SHORT_TOKENS * token_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel", choices=("local", "grpc"), default="local")
    parser.add_argument("--rows", type=int, default=8, help="answers at a time")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    found = asyncio.run(measure(flags))
    print(f"{found['token_s'] * 1e6:7.1f} us a token, {found['request_s'] * 1e3:6.3f} ms a request ({flags.channel})")
    if flags.json:
        print(to_json(found))


if __name__ == "__main__":
    main()

"""Real worker processes, and a router that sends one request at a time."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pdserve.core.types import Sampling
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.convert import sampling_to_proto
from tests.support.cluster_secret import ENVIRONMENT, ROUTER

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
# A shape with few operations and much KV, like long contexts on a fast device.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 4096,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_shape(folder: Path) -> Path:
    """Writes only a config; `--load dummy` makes random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request: seconds on the driver's clock since its Prefill message."""

    first_s: float
    second_s: float
    gap_s: float  # between them
    exposed_s: float  # by the prefill worker
    busy_s: float  # by the decode worker
    num_tokens: int  # of the prompt
    num_bytes: int
    saved_bytes: int
    plan: str  # that the prefill worker chose
    tokens: tuple[int, ...]


class OverlapWorker:
    """A process, and an Attach stream to it."""

    def __init__(self, role: str, name: str, flags: Sequence[str], bytes_per_s: float, seen: queue.SimpleQueue[Any]):
        command = [sys.executable, "-m", "benchmarks.overlap.worker", role, str(int(bytes_per_s))]
        self._metrics_port = free_port()
        command += ["--worker-id", name, "--heartbeat-s", "0.01", "--metrics-port", str(self._metrics_port), *flags]
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start: {' '.join(command)}")
        self.name, self._seen = name, seen
        options = (("grpc.max_receive_message_length", 2**26), ("grpc.max_send_message_length", 2**26))
        address = line.split()[-1]
        self._channel = grpc.insecure_channel(address, options=options)
        self._outbox: queue.SimpleQueue[worker_pb2.AttachRequest | None] = queue.SimpleQueue()
        self.send(hello=worker_pb2.RouterHello(router_id="driver", router_incarnation="1"))
        proof = peers.prove_blocking(self._channel, peers.introduce(ROUTER, peers.ATTACH, address), WAIT_S)
        self._stream = worker_pb2_grpc.WorkerServiceStub(self._channel).Attach(self._requests(), metadata=proof)
        self.hello = next(self._stream).hello
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, **message: Any) -> None:
        self._outbox.put(worker_pb2.AttachRequest(**message))

    def plans(self) -> Counter[str]:
        """Number of prompts whose KV was sent by each plan so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=WAIT_S) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith("pdserve_kv_pushes_total{")]
        return Counter({line.split('"')[1]: int(float(line.split()[-1])) for line in found})

    def close(self) -> None:
        self._outbox.put(None)
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._channel.close()

    def _requests(self) -> Iterator[worker_pb2.AttachRequest]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for message in self._stream:
                now_s = time.perf_counter()
                kind = message.WhichOneof("message")
                self._seen.put((now_s, self.name, kind, getattr(message, kind)))
        except grpc.RpcError:
            self._seen.put((time.perf_counter(), self.name, "gone", None))


class Pairs:
    """One decode worker, and a prefill worker for each push setting."""

    def __init__(self, model: Path, transport: str, bytes_per_s: float, pushes: Sequence[str], flags: Sequence[str]):
        common = ["--model", str(model), "--load", "dummy", "--threads", "1", "--transport", transport, *flags]
        self._seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers: list[OverlapWorker] = []
        self._number = 0
        self.batches: dict[str, list[worker_pb2.BatchTimed]] = {push: [] for push in pushes}
        try:
            self.decode = self._start("decode", "d0", [*common, "--speculation", "off"], 0)
            self.prefill = {
                push: self._start("prefill", f"p-{push}", [*common, "--push", push], bytes_per_s) for push in pushes
            }
        except BaseException:
            self.close()
            raise

    def _start(self, role: str, name: str, flags: Sequence[str], bytes_per_s: float) -> OverlapWorker:
        self._workers.append(OverlapWorker(role, name, flags, bytes_per_s, self._seen))
        return self._workers[-1]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def ask(self, push: str, prompt: Sequence[int], max_tokens: int = 2) -> Seen:
        """Runs one request until all its blocks are free; nothing else runs at that time."""
        self._number += 1
        name = f"r{self._number}"
        sampling = sampling_to_proto(Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        sequence = worker_pb2.Sequence(request_id=name, attempt=1, prompt_token_ids=prompt, sampling=sampling)
        prefill = self.prefill[push]
        first_s = second_s = began_s = 0.0
        tokens: list[int] = []
        ends: dict[str, worker_pb2.TransferEnded] = {}
        released: set[str] = set()
        before = prefill.plans()
        self.decode.send(reserve=worker_pb2.Reserve(sequence=sequence))
        while released != {"d0", prefill.name} or len(ends) < 2:
            now_s, by, kind, message = self._seen.get(timeout=WAIT_S)
            if kind == "granted":
                began_s = time.perf_counter()
                prefill.send(prefill=worker_pb2.Prefill(sequence=sequence, grant=message.grant))
            elif kind == "first_token":
                first_s = now_s
                tokens.append(message.token.token_id)
                admit = worker_pb2.Admit(request_id=name, attempt=1, first_token_id=message.token.token_id)
                self.decode.send(admit=admit)
            elif kind == "tokens":
                second_s = second_s or now_s
                tokens += [token.token_id for row in message.rows for token in row.tokens]
            elif kind == "transfer_ended":
                assert message.is_committed, message.error
                ends[by] = message
            elif kind == "released":
                released.add(by)
            elif kind == "batch_timed" and by == prefill.name:
                self.batches[push].append(message)
            elif kind in ("failed", "refused", "gone"):
                raise RuntimeError(f"{by}: {kind} {message}")
        return Seen(
            first_s=first_s - began_s,
            second_s=second_s - began_s,
            gap_s=second_s - first_s,
            num_tokens=len(prompt),
            exposed_s=ends[prefill.name].exposed_s,
            busy_s=ends["d0"].busy_s,
            num_bytes=ends["d0"].num_bytes,
            saved_bytes=ends["d0"].saved_bytes,
            plan=next(iter(prefill.plans() - before)),
            tokens=tuple(tokens),
        )

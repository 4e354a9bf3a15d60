"""What HTTP adds to gRPC: latency of the gateway, and its CPU time per request and per 100 streamed tokens.

    python -m benchmarks.http [--rate 50] [--seconds 10] [--rounds 3] [--json]
    python -m benchmarks.http --peer http://127.0.0.1:8001/v1 --peer-pid PID

Both protocols reach the same cluster of toy workers, which compute in microseconds. They take turns of `--seconds`
with equal Poisson arrivals. Client and servers share this machine's cores. The clients write and read the protocols
themselves, so that little of a client library is measured. CPU is that of the gateway's process, all its threads: per
request from short answers, per 100 tokens from the difference between long and short ones. `--peer` measures the
process of another server of OpenAI's API, such as vLLM's, in the same turns; its own model then computes too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from benchmarks.openloop import percentile
from pdserve import AsyncClient
from pdserve.core.json_text import to_json
from pdserve.launch.running import Running

PROMPT_CHARS: Final = 64
SHORT_TOKENS: Final = 4
LONG_TOKENS: Final = 104
Ask = Callable[[str, int], Awaitable[float]]  # prompt and tokens to seconds until the first token


@dataclass(slots=True)
class Seen:
    """Of all turns of one protocol."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    failed: int = 0


class HttpClient:
    """Streams completions over kept connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = f"{parts.path}/completions"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str, tokens: int) -> float:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        began_s = time.perf_counter()
        connection = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        reader, writer = connection
        head = f"POST {self._path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            writer.close()
            raise ConnectionError(status.decode(errors="replace"))
        while await reader.readline() != b"\r\n":
            pass
        first_s = 0.0
        while True:
            size = int(await reader.readline(), 16)
            chunk = await reader.readexactly(size + 2)
            if not first_s:
                first_s = time.perf_counter() - began_s
            if size == 0:
                self._idle.append(connection)
                return first_s
            del chunk

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def turn(ask: Ask, rate_rps: float, seconds: float, tokens: int, seed: int, seen: Seen) -> int:
    """One turn; returns the number of requests."""
    draw = random.Random(seed)
    begin_s, at_s, tasks = time.perf_counter(), 0.0, []

    async def one(prompt: str) -> None:
        began_s = time.perf_counter()
        try:
            seen.first_s.append(await ask(prompt, tokens))
            seen.whole_s.append(time.perf_counter() - began_s)
        except Exception:  # counted, whatever it is
            seen.failed += 1

    while (at_s := at_s + draw.expovariate(rate_rps)) < seconds:
        await asyncio.sleep(max(begin_s + at_s - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(one("".join(draw.choices("abcdefgh ", k=PROMPT_CHARS)))))
    await asyncio.gather(*tasks)
    return len(tasks)


async def measure(flags: argparse.Namespace, cluster: Running) -> dict[str, Any]:
    sdk, http = AsyncClient(cluster.target), HttpClient(cluster.http_url)

    async def over_grpc(prompt: str, tokens: int) -> float:
        began_s = time.perf_counter()
        stream = sdk.stream(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        await anext(stream)
        first_s = time.perf_counter() - began_s
        async for _ in stream:
            pass
        return first_s

    servers: dict[str, tuple[Ask, int]] = {
        "grpc": (over_grpc, cluster.pid("router")),
        "http": (http.ask, cluster.pid("gateway")),
    }
    peer = HttpClient(flags.peer) if flags.peer else None
    if peer is not None:
        servers["peer"] = (peer.ask, flags.peer_pid)
    found: dict[str, dict[str, Any]] = {name: {} for name in servers}
    for tokens in (SHORT_TOKENS, LONG_TOKENS):
        seen = {name: Seen() for name in servers}
        used = dict.fromkeys(servers, 0.0)
        sent = dict.fromkeys(servers, 0)
        for number in range(flags.rounds + 1):
            for name, (ask, pid) in servers.items():
                process = psutil.Process(pid)
                before_s = cpu_s(process)
                results = seen[name] if number else Seen()  # the first round warms up
                count = await turn(ask, flags.rate, flags.seconds if number else 2.0, tokens, number, results)
                if number:
                    used[name] += cpu_s(process) - before_s
                    sent[name] += count
        for name in servers:
            found[name][f"{tokens} tokens"] = {
                "requests": sent[name],
                "failed": seen[name].failed,
                "first_p50_s": percentile(seen[name].first_s, 0.5),
                "first_p95_s": percentile(seen[name].first_s, 0.95),
                "whole_p50_s": percentile(seen[name].whole_s, 0.5),
                "cpu_s_per_request": used[name] / max(sent[name], 1),
            }
    await sdk.close()
    http.close()
    if peer is not None:
        peer.close()
    return found


def cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", default="", metavar="URL", help="base URL of another server")
    parser.add_argument("--peer-pid", type=int, default=0, help="its process")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with Running.start("--model", "toy", "--http", "0") as cluster:
        found = asyncio.run(measure(flags, cluster))
    print(f"{flags.rate:g} requests/s, {flags.rounds} turns of {flags.seconds:g} s each; CPU of router, gateway, peer")
    print("server  tokens  requests  failed  first p50 ms  first p95 ms  whole p50 ms  CPU ms/request")
    for name, rows in found.items():
        for tokens, row in rows.items():
            print(
                f"{name:7} {tokens.split()[0]:>6} {row['requests']:9d} {row['failed']:7d} "
                f"{row['first_p50_s'] * 1e3:13.2f} {row['first_p95_s'] * 1e3:13.2f} "
                f"{row['whole_p50_s'] * 1e3:13.2f} {row['cpu_s_per_request'] * 1e3:15.2f}"
            )
    short, long = f"{SHORT_TOKENS} tokens", f"{LONG_TOKENS} tokens"
    added_s = found["http"][short]["first_p50_s"] - found["grpc"][short]["first_p50_s"]
    print(f"HTTP adds {added_s * 1e3:.2f} ms to the p50 of the first token")
    for name in [name for name in found if name != "grpc"]:
        rows = found[name]
        tokens_s = (rows[long]["cpu_s_per_request"] - rows[short]["cpu_s_per_request"]) / (LONG_TOKENS - SHORT_TOKENS)
        request_s = rows[short]["cpu_s_per_request"] - SHORT_TOKENS * tokens_s
        print(f"{name}: {request_s * 1e3:.2f} ms of CPU per request and {tokens_s * 1e5:.2f} ms per 100 tokens")
    if flags.json:
        print(to_json(found))


if __name__ == "__main__":
    main()

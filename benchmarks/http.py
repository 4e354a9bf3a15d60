"""Measures the gateway's overhead over gRPC: latency, CPU time per request, and CPU time per 100 streamed tokens.

    python -m benchmarks.http [--rate 50] [--seconds 10] [--rounds 3] [--json]
    python -m benchmarks.http --rate 5 --model pdserve/models/stdlib-5m --peer http://127.0.0.1:8001/v1 --peer-pid PID

Both protocols reach the same cluster. Its default is toy workers, which compute in microseconds. They take turns of
`--seconds` with equal Poisson arrivals. Client and servers share this machine's cores. The clients write and read the
protocols themselves, so that little of a client library is measured. CPU is that of a process with all its threads: per
request from short answers, per 100 tokens from the difference between long and short ones.

`--peer` measures the process of another server of OpenAI's API in the same turns, such as vLLM's API server. That
process tokenizes and detokenizes, which the router does here, so the router's CPU during HTTP turns is shown too. Give
both servers the same model with `--model`: a server that streams faster than a client reads writes fewer chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.harness import cpu_s
from benchmarks.openloop import drive, percentile, poisson
from pdserve import AsyncClient
from pdserve.core.json_text import to_json
from pdserve.launch.running import Running

PROMPT_CHARS: Final = 64
SHORT_TOKENS: Final = 4
LONG_TOKENS: Final = 104
Ask = Callable[[str, int], Awaitable[tuple[float, int]]]  # prompt and tokens to seconds until the first, and messages


@dataclass(slots=True)
class Seen:
    """Times of all requests of one protocol, over all turns."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    messages: int = 0
    failed: int = 0


class HttpClient:
    """Streams completions over kept connections, as long as the server keeps them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = f"{parts.path}/completions"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str, tokens: int) -> tuple[float, int]:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        began_s = time.perf_counter()
        connection = await self._connection()
        reader, writer = connection
        head = f"POST {self._path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            writer.close()
            raise ConnectionError(status.decode(errors="replace"))
        while await reader.readline() != b"\r\n":
            pass
        first_s, chunks = 0.0, 0
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
            chunks += 1
            first_s = first_s or time.perf_counter() - began_s
        await reader.readline()
        self._idle.append(connection)
        return first_s, chunks

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def turn(ask: Ask, rate_rps: float, seconds: float, tokens: int, seed: int, seen: Seen) -> int:
    """One turn; returns the number of requests."""
    draw = random.Random(seed)

    async def one(prompt: str) -> None:
        began_s = time.perf_counter()
        try:
            first_s, messages = await ask(prompt, tokens)
            seen.first_s.append(first_s)
            seen.whole_s.append(time.perf_counter() - began_s)
            seen.messages += messages
        except Exception:  # counted, whatever it is
            seen.failed += 1

    ended, _ = await drive(
        (at_s, partial(one, "".join(draw.choices("abcdefgh ", k=PROMPT_CHARS))))
        for at_s in poisson(draw, rate_rps, seconds)
    )
    return len(ended)


async def measure(flags: argparse.Namespace, cluster: Running) -> dict[str, Any]:
    sdk, http = AsyncClient(cluster.target), HttpClient(cluster.http_url)

    async def over_grpc(prompt: str, tokens: int) -> tuple[float, int]:
        began_s = time.perf_counter()
        stream = sdk.stream(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        await anext(stream)
        first_s, messages = time.perf_counter() - began_s, 1
        async for _ in stream:
            messages += 1
        return first_s, messages

    router, gateway = cluster.pid("router"), cluster.pid("gateway")
    servers: dict[str, tuple[Ask, dict[str, int]]] = {
        "grpc": (over_grpc, {"router": router}),
        "http": (http.ask, {"router": router, "gateway": gateway}),
    }
    peer = HttpClient(flags.peer) if flags.peer else None
    if peer is not None:
        servers["peer"] = (peer.ask, {"peer": flags.peer_pid})
    found: dict[str, dict[str, Any]] = {name: {} for name in servers}
    for tokens in (SHORT_TOKENS, LONG_TOKENS):
        seen = {name: Seen() for name in servers}
        used = {name: dict.fromkeys(processes, 0.0) for name, (_, processes) in servers.items()}
        sent = dict.fromkeys(servers, 0)
        for number in range(flags.rounds + 1):
            for name, (ask, processes) in servers.items():
                before_s = {one: cpu_s(pid) for one, pid in processes.items()}
                results = seen[name] if number else Seen()  # the first round warms up
                count = await turn(ask, flags.rate, flags.seconds if number else 2.0, tokens, number, results)
                if number:
                    sent[name] += count
                    for one, pid in processes.items():
                        used[name][one] += cpu_s(pid) - before_s[one]
        for name in servers:
            count = max(sent[name], 1)
            found[name][f"{tokens} tokens"] = {
                "requests": sent[name],
                "failed": seen[name].failed,
                "first_p50_s": percentile(seen[name].first_s, 0.5),
                "first_p95_s": percentile(seen[name].first_s, 0.95),
                "whole_p50_s": percentile(seen[name].whole_s, 0.5),
                "messages_per_request": seen[name].messages / count,
                "cpu_s_per_request": {one: seconds / count for one, seconds in used[name].items()},
            }
    await sdk.close()
    http.close()
    if peer is not None:
        peer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="toy", metavar="DIR", help="of our cluster")
    parser.add_argument("--peer", default="", metavar="URL", help="base URL of another server")
    parser.add_argument("--peer-pid", type=int, default=0, help="its process")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with Running.start("--model", flags.model, "--http", "0", "--http-process") as cluster:
        found = asyncio.run(measure(flags, cluster))
    print(f"{flags.rate:g} requests/s, {flags.rounds} turns of {flags.seconds:g} s each, model {flags.model}")
    print("server  tokens  requests  failed  messages  first p50 ms  first p95 ms  whole p50 ms")
    for name, rows in found.items():
        for tokens, row in rows.items():
            print(
                f"{name:7} {tokens.split()[0]:>6} {row['requests']:9d} {row['failed']:7d} "
                f"{row['messages_per_request']:9.1f} {row['first_p50_s'] * 1e3:13.2f} "
                f"{row['first_p95_s'] * 1e3:13.2f} {row['whole_p50_s'] * 1e3:13.2f}"
            )
    short, long = f"{SHORT_TOKENS} tokens", f"{LONG_TOKENS} tokens"
    added_s = found["http"][short]["first_p50_s"] - found["grpc"][short]["first_p50_s"]
    print(f"HTTP adds {added_s * 1e3:.2f} ms to the p50 of the first token")
    for name, rows in found.items():
        for process, short_s in rows[short]["cpu_s_per_request"].items():
            tokens_s = (rows[long]["cpu_s_per_request"][process] - short_s) / (LONG_TOKENS - SHORT_TOKENS)
            request_s = short_s - SHORT_TOKENS * tokens_s
            print(
                f"{name}, CPU of {process}: {request_s * 1e3:.2f} ms per request, {tokens_s * 1e5:.2f} per 100 tokens"
            )
    if flags.json:
        print(to_json(found))


if __name__ == "__main__":
    main()

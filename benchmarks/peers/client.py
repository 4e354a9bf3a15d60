"""The client of the comparison: streamed chats over raw connections, at Poisson times, in one process.

    python -m benchmarks.peers.client --port 9401 [--step-s 0.005]

starts a server of such chats that only waits: with it, the client measures itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from benchmarks.openloop import drive, percentile, poisson

TIMEOUT_S: Final = 30.0
OUTPUT_TOKENS: Final = 16
SERVED: Final = "served"
_CONTENT: Final = re.compile(rb'"content"\s*:\s*"(?!")')
_LENGTH: Final = re.compile(rb"content-length: *(\d+)")

# --- prompts --------------------------------------------------------------------------------------------------

_TEXT: Final = (
    "return value of the function is used when a list or dict object has no other name in this module and self class "
    "method import error string file path open read write line data index key item type none true false raise example "
    "default argument should not be set if it was given as an option to call with each number from first last next "
    "time result test case code user system process thread queue lock event message client server request response "
    "header body length size start stop end begin state count total average minimum maximum"
)
WORDS: Final = tuple(_TEXT.split())
#: Words of a prompt: those that the prompts of a group share, and its own. The bundled model's tokenizer makes 1.05
#: tokens of each.
WORKLOADS: Final = {"w1": (0, 198), "w2": (3321, 474), "w3": (0, 28468)}
_GROUP: Final = 8  # prompts that share words; those of two groups alternate


def prompts(workload: str, count: int, seed: str) -> list[str]:
    """Prompts that no other seed has."""
    shared, own = WORKLOADS[workload]
    draw = random.Random(f"{workload} {seed}")
    starts = [f"{seed} {group} {_words(draw, shared)}" for group in range(count // _GROUP + 2)]
    groups = [number // (2 * _GROUP) * 2 + number % 2 for number in range(count)] if shared else range(count)
    return [
        f"{starts[group] if shared else seed} {number} {_words(draw, own)}"
        for number, group in zip(range(count), groups, strict=True)
    ]


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


# --- one request ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: served, the status of a rejection, or how it failed. `first_s`: until the first chunk with content."""

    kind: str
    first_s: float
    whole_s: float


@final
class Connection(asyncio.Protocol):
    """One request at a time. Reads the body without decoding it, so that little of the client is measured."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Outcome] | None = None
        self._early = b""  # what the server sends before a request: that it takes none

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end("closed")

    def send(self, request: bytes) -> asyncio.Future[Outcome]:
        assert self._transport is not None
        self._head, self._status, self._size, self._first_s = b"", 0, -1, 0.0
        self._is_last = False
        self._received, self._start, self._tail = 0, b"", b""
        self._done = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(request)
        if self._early:
            self.data_received(self._early)
        if not self.is_open:
            self._end("closed")
        return self._done

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._done is None:
            self._early += data
            return
        if not self._status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._status = int(head[9:12])
            head = head.lower()
            self._is_last = b"\r\nconnection: close" in head
            length = _LENGTH.search(head)
            self._size = int(length.group(1)) if length else -1
        self._received += len(data)
        self._tail = (self._tail + data)[-256:]
        if not self._first_s:
            self._start += data
            if _CONTENT.search(self._start):
                self._first_s = now_s - self._sent_s
        if self._received >= self._size if self._size >= 0 else self._tail.endswith(b"0\r\n\r\n"):
            is_whole = self._first_s and b"data: [DONE]" in self._tail
            if self._is_last:
                self.close()
            self._end(str(self._status) if self._status != 200 else SERVED if is_whole else "cut")

    def _end(self, kind: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Outcome(kind, self._first_s, time.perf_counter() - self._sent_s))


@final
class Connections:
    """Kept connections to one server; as many as requests run at the same time."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> Outcome:
        connection = next((one for one in iter(self._take, None) if one.is_open), None)
        try:
            if connection is None:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(Connection, self._host, self._port)
            outcome = await asyncio.wait_for(connection.send(request), TIMEOUT_S)
        except OSError as error:  # TimeoutError is one
            if connection is not None:
                connection.close()
            return Outcome("timeout" if isinstance(error, TimeoutError) else "no connection", 0.0, TIMEOUT_S)
        if connection.is_open:
            self._idle.append(connection)
        return outcome

    def close(self) -> None:
        for one in self._idle:
            one.close()

    def _take(self) -> Connection | None:
        return self._idle.pop() if self._idle else None


def chat_request(model: str, prompt: str) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


# --- one load -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    sent: int
    outcomes: dict[str, int]  # number of requests by kind
    ttft_s: tuple[float, float, float]  # p50, p95, p99 of the served ones; nan if there is none
    whole_s: tuple[float, float]  # p50, p95
    rejected_s: float  # median time of answers with another status than 200
    late_s: float  # worst delay of a send: the client's own saturation
    wall_s: float
    client_cpu_s: float  # for each request


async def run_load(
    host: str, port: int, model: str, workload: str, rate_rps: float, seconds: float, seed: str
) -> LoadResult:
    arrivals = list(poisson(random.Random(f"{seed} {rate_rps}"), rate_rps, seconds))
    requests = [chat_request(model, prompt) for prompt in prompts(workload, len(arrivals), seed)]
    connections = Connections(host, port)
    sends = [partial(connections.ask, request) for request in requests]
    gc.collect()
    gc.disable()
    try:
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        outcomes, late_s = await drive(zip(arrivals, sends, strict=True))
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    finally:
        gc.enable()
        connections.close()
    return summary(outcomes, late_s=late_s, wall_s=wall_s, cpu_s=cpu_s)


def summary(outcomes: Sequence[Outcome], *, late_s: float, wall_s: float, cpu_s: float) -> LoadResult:
    served = [one for one in outcomes if one.kind == SERVED]
    rejected = [one.whole_s for one in outcomes if one.kind.isdigit()]
    firsts, wholes = [one.first_s for one in served], [one.whole_s for one in served]
    return LoadResult(
        sent=len(outcomes),
        outcomes=dict(Counter(one.kind for one in outcomes)),
        ttft_s=(percentile(firsts, 0.5), percentile(firsts, 0.95), percentile(firsts, 0.99)),
        whole_s=(percentile(wholes, 0.5), percentile(wholes, 0.95)),
        rejected_s=statistics.median(rejected) if rejected else 0.0,
        late_s=late_s,
        wall_s=wall_s,
        client_cpu_s=cpu_s / max(len(outcomes), 1),
    )


# --- a server that only waits ---------------------------------------------------------------------------------

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@final
class Answering(asyncio.Protocol):
    """A server's side of a connection: streamed chats."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self._buffer.clear()
            self._transport.write(_HEAD)
            self._write_token(0)

    def _write_token(self, number: int) -> None:
        event = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        if number + 1 == OUTPUT_TOKENS:
            self._transport.write(chunk + _END)
            return
        self._transport.write(chunk)
        self._timer = asyncio.get_running_loop().call_later(self._step_s, self._write_token, number + 1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.005)
    flags = parser.parse_args()
    loop = asyncio.get_running_loop()
    await (await loop.create_server(lambda: Answering(flags.step_s), "127.0.0.1", flags.port)).serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

"""What a pull of a prefix from another worker costs and saves, for `python -m benchmarks.tiers --pull`.

A cluster of two decode workers, processes of their own, which also compute prompts; each decodes two answers at a time.
In each round a long prompt is computed on one worker, where its answer then runs, and another answer starts. Then
requests with the same prompt come, until one is placed on the other worker, which pulls the prompt's KV. Clusters with
`kv_pull` off alternate with it: there it computes the prompt.

Beside the engines' work, which needs both cores of a small machine, nothing is as fast as alone. So each round also
sends the same bytes over a plain socket between two processes of their own, while the same answers run. Pulls over TCP
are compared with it, as between two hosts. On one host, workers choose shared memory: that is compared with a copy of
as many bytes within one process, while nothing else runs.

- *GB/s of the bytes* counts the time with bytes on their way, *of the pull* from the request to the source to the last
  verified block; both from the router's recording, and so is the predicted time. The memory of both ends of the socket
  has been used before.
- *Time between tokens* of the answers on both workers during the pull, or during the socket's transfers, as a share of
  the same stream's time between tokens before. Steps that a pull or transfer overlaps count whole.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.harness import spread
from pdserve import AsyncClient
from pdserve.launch.running import Running

PATIENT: Final = ("--set", "router.slo_ttft_s=3600", "--set", "router.slo_tpot_s=60")
LONG: Final = 1_500  # tokens of an answer that is cancelled
SETTLED_S: Final = 0.5
QUIET_TOKENS: Final = 15  # of the first answer, before a request
ARRIVES_S: Final = 0.005  # the tokens of a worker's step reach the client so long after its other messages


WHERE: Final = ("source", "destination")
SENDS: Final = 4  # over the socket, and copies, one after the other


@dataclass(slots=True)
class Round:
    request_id: str
    before: tuple[float, float]  # when only the answers ran
    beside: tuple[float, float]  # until the first token of the request
    ttft_s: float
    streams: tuple[Stream, Stream | None]  # on the source, and on the destination, if one runs there
    socket: list[tuple[float, float]]  # of each transfer of as many bytes


@dataclass(slots=True)
class Found:
    rounds: list[Round] = field(default_factory=list)
    predicted_s: dict[str, float] = field(default_factory=dict)  # by request
    pulls: dict[str, dict[str, Any]] = field(default_factory=dict)  # PullEnded, and when the router got it

    def slower(self, windows: Sequence[tuple[Round, tuple[float, float]]]) -> dict[str, list[float]]:
        """The time between tokens in each window, over that before."""
        found: dict[str, list[float]] = {name: [] for name in WHERE}
        for one, window in windows:
            for name, stream in zip(WHERE, one.streams, strict=True):
                if stream is None:
                    continue
                before_s, beside_s = stream.per_token_s(*one.before), stream.per_token_s(*window)
                if before_s is not None and beside_s is not None:
                    found[name].append(beside_s / before_s)
        return found


class Stream:
    """An answer that runs until the end of the round, and when its tokens came."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], output: int = LONG) -> None:
        self._client = client
        self._stream = client.stream(list(prompt), max_tokens=output, temperature=0.0, ignore_eos=True)
        self.at_s: list[float] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for piece in self._stream:
            self.at_s += [time.monotonic()] * len(piece.token_ids)

    async def has(self, count: int) -> None:
        while len(self.at_s) < count:
            assert not self._task.done(), self._task
            await asyncio.sleep(0.002)

    def per_token_s(self, begin_s: float, end_s: float) -> float | None:
        """From the last token before the window to the last one in it. Several tokens may come together. None: no
        token came in it."""
        times = [one for one in self.at_s if one <= end_s]
        first_s = max((one for one in times if one <= begin_s), default=None)
        num_after = sum(one > begin_s for one in times)
        return None if first_s is None or not num_after else (times[-1] - first_s) / num_after

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    async def worker(self) -> str:
        """On which it runs."""
        chosen = (await self._client.explain(self.request_id)).chosen
        return "" if chosen is None else chosen.decode_worker

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def one_round(target: str, tokens: int, draw: random.Random, plain: Socket) -> Round | None:
    """None: no request was placed where the prompt is not cached."""
    prompt = [draw.randrange(3, 4000) for _ in range(tokens)]
    async with AsyncClient(target) as client:
        streams = [Stream(client, prompt)]
        try:
            await streams[0].has(2)
            streams.append(Stream(client, [draw.randrange(3, 4000) for _ in range(64)]))  # where there is more room
            await streams[1].has(2)
            source, other = [await one.worker() for one in streams]
            for ending in (7, 8, 9):  # until the place of the first answer is full
                quiet_s = time.monotonic()
                await streams[0].has(len(streams[0].at_s) + QUIET_TOKENS)
                began_s = time.monotonic()
                last = Stream(client, [*prompt, ending])
                streams.append(last)
                await last.has(1)
                if await last.worker() == source:
                    continue
                ended_s = last.at_s[0]
                await last.end()
                sent = await asyncio.to_thread(plain.send)
                await asyncio.sleep(SETTLED_S)  # for the tokens of the steps beside it
                pair = streams[0], streams[1] if other != source else None
                window = began_s, ended_s
                return Round(last.request_id, (quiet_s, began_s), window, ended_s - began_s, pair, sent)
            return None
        finally:
            for stream in streams:
                await stream.end()


def measure(model: Path, tokens: int, rounds: int, folder: Path, num_bytes: int, transport: str) -> Found:
    """With pulls over the transport; empty: without pulls."""
    record = folder / f"pull-{transport or 'off'}.jsonl"
    settings = (
        "worker.max_batch=2",
        f"worker.kv_blocks={6 * (tokens + LONG) // 16}",
        f"worker.kv_pull={'true' if transport else 'false'}",
        f"worker.transport={transport or 'auto'}",
    )
    sets = [flag for one in settings for flag in ("--set", one)]
    flags = ["--model", str(model), "--prefill", "0", "--decode", "2", "--record", str(record), *PATIENT, *sets]
    found, draw = Found(), random.Random(1)
    running = Running.start(*flags, timeout_s=300.0, env={"OMP_NUM_THREADS": "1"})

    async def all_rounds() -> None:
        with Socket(num_bytes) as plain:
            for _ in range(rounds):
                one = await one_round(running.target, tokens, draw, plain)
                if one is not None:
                    found.rounds.append(one)

    try:
        asyncio.run(all_rounds())
    finally:
        running.stop(60.0)
    ours = {one.request_id for one in found.rounds}
    with record.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            event = line.get("event", {})
            if event.get("is") == "PullEnded" and event.get("num_tokens") and event["key"][1] in ours:
                found.pulls[event["key"][1]] = {**event, "ended_s": line["now_s"]}
            for command in line.get("commands", ()):
                source = command.get("source") if command.get("is") == "Reserve" else None
                if source:
                    found.predicted_s[command["key"][1]] = source["predicted_s"]
    return found


def _send(port: int, num_bytes: int) -> None:
    data = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            connection.sendall(data)


def _receive(pipe: Connection, num_bytes: int) -> None:
    into = memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while pipe.recv():
                began_s, got = time.monotonic(), 0
                connection.sendall(b"x")
                while got < num_bytes:
                    got += connection.recv_into(into[got:])
                pipe.send((began_s, time.monotonic()))


class Socket:
    """A plain socket between two processes."""

    def __init__(self, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._ends = [context.Process(target=_receive, args=(theirs, num_bytes))]
        self._ends[0].start()
        self._ends.append(context.Process(target=_send, args=(self._pipe.recv(), num_bytes)))
        self._ends[1].start()
        self.send()  # its memory gets its pages

    def send(self) -> list[tuple[float, float]]:
        """When each transfer began and ended."""
        times = []
        for _ in range(SENDS):
            self._pipe.send(True)
            times.append(self._pipe.recv())
        return times

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(False)
        for end in self._ends:
            end.join(10.0)


def copied(num_bytes: int) -> list[float]:
    """GB/s of copies between memory that has been used before."""
    source, into = memoryview(bytearray(b"x" * num_bytes)), memoryview(bytearray(b"y" * num_bytes))
    speeds = []
    for _ in range(SENDS):
        began_s = time.monotonic()
        into[:] = source
        speeds.append(num_bytes / (time.monotonic() - began_s) / 1e9)
    return speeds


def pulls(model: Path, tokens: int, rounds: int, folder: Path, block_bytes: int) -> list[list[str]]:
    num_bytes = tokens // 16 * block_bytes
    with Socket(num_bytes) as plain:
        alone = [num_bytes / (end - begin) / 1e9 for begin, end in plain.send()]
    copies = copied(num_bytes)
    computed = measure(model, tokens, rounds, folder, num_bytes, "")
    pulled = measure(model, tokens, rounds, folder, num_bytes, "tcp")
    shared = measure(model, tokens, rounds, folder, num_bytes, "shm")
    beside = [num_bytes / (end - begin) / 1e9 for one in pulled.rounds for begin, end in one.socket]
    rows = [
        ["", "median (least-most)"],
        ["pulls over TCP", f"{len(pulled.pulls)} of {len(pulled.rounds)}, {num_bytes / 2**20:.0f} MiB each"],
    ]
    rows.append(["GB/s of a socket, alone", spread(alone, "{:.2f}")])
    rows.append(["GB/s of a socket, beside the answers", spread(beside, "{:.2f}")])
    if pulled.pulls:
        ended = list(pulled.pulls.values())
        busy = [one["num_bytes"] / one["busy_s"] / 1e9 for one in ended]
        whole = [one["num_bytes"] / one["pull_s"] / 1e9 for one in ended]
        rows.append(["GB/s of the bytes over TCP", spread(busy, "{:.2f}")])
        rows.append(["GB/s of the pull over TCP", spread(whole, "{:.2f}")])
        for name, speeds in (("alone", alone), ("beside the answers", beside)):
            rows.append(
                [f"bytes over TCP, of a socket {name}", f"{statistics.median(busy) / statistics.median(speeds):.2f}"]
            )
        errors = [one["pull_s"] / pulled.predicted_s[name] for name, one in pulled.pulls.items()]
        rows.append(["seconds of the first pull, of the predicted", f"{errors[0]:.2f}"])
        if errors[1:]:
            rows.append(["seconds of a later pull, of the predicted", spread(errors[1:], "{:.2f}")])
    rows.append(["GB/s of a copy, alone", spread(copies, "{:.2f}")])
    rows.append(["pulls over shared memory", f"{len(shared.pulls)} of {len(shared.rounds)}"])
    if shared.pulls:
        busy = [one["num_bytes"] / one["busy_s"] / 1e9 for one in shared.pulls.values()]
        rows.append(["GB/s of the bytes over shared memory", spread(busy, "{:.2f}")])
        share = statistics.median(busy) / statistics.median(copies)
        rows.append(["bytes over shared memory, of a copy alone", f"{share:.2f}"])
    for name, found in (("computed", computed), ("pulled over TCP", pulled), ("pulled over shared memory", shared)):
        rows.append([f"TTFT ms, {name}", spread([one.ttft_s * 1e3 for one in found.rounds], "{:.0f}")])
    windows = {
        "computing the prompt": computed.slower([(one, one.beside) for one in computed.rounds]),
        "a pull": pulled.slower(
            [
                (one, (one.beside[0], pulled.pulls[one.request_id]["ended_s"] + ARRIVES_S))
                for one in pulled.rounds
                if one.request_id in pulled.pulls
            ]
        ),
        "the socket": pulled.slower([(one, (one.socket[0][0], one.socket[-1][1])) for one in pulled.rounds]),
    }
    for what, slower in windows.items():
        for where, ratios in slower.items():
            shown = spread(ratios, "{:.2f}") if ratios else "no token came meanwhile"
            rows.append([f"time between tokens beside {what}, {where}", shown])
    return rows

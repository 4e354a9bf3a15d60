"""What a pull of a prefix from another worker costs and saves, for `python -m benchmarks.tiers --pull`.

A cluster of two decode workers, processes of their own, which also compute prompts; each decodes two answers at a time.
In each round a long prompt is computed on one worker, where two answers then run, and one answer runs on the other.
The next request with the same prompt can only start on the other worker, which pulls the prompt's KV. Clusters with
`kv_pull` off alternate with it: there it computes the prompt.

- *GB/s of the bytes* counts the time with bytes on their way, *of the pull* from the request to the source to the last
  verified block; both from the router's recording. The socket sends as many bytes between two processes.
- *Time between tokens* of the answers on both workers while the request waits for its first token, as a share of the
  same stream's time between tokens before.
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
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import spread
from pdserve import AsyncClient
from pdserve.launch.running import Running

PATIENT: Final = ("--set", "router.slo_ttft_s=3600", "--set", "router.slo_tpot_s=60")
LONG: Final = 1_500  # tokens of an answer that is cancelled


@dataclass(slots=True)
class Found:
    ttft_s: list[float] = field(default_factory=list)
    slower: dict[str, list[float]] = field(default_factory=lambda: {"source": [], "destination": []})
    predicted_s: dict[str, float] = field(default_factory=dict)  # by request
    pulls: list[dict[str, Any]] = field(default_factory=list)  # PullEnded of these requests


class Stream:
    """An answer that runs until the end of the round, and when its tokens came."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], output: int = LONG) -> None:
        self._stream = client.stream(list(prompt), max_tokens=output, temperature=0.0, ignore_eos=True)
        self.at_s: list[float] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for piece in self._stream:
            self.at_s += [time.perf_counter()] * len(piece.token_ids)

    async def has(self, count: int) -> None:
        while len(self.at_s) < count:
            assert not self._task.done(), self._task
            await asyncio.sleep(0.002)

    def per_token_s(self, begin_s: float, end_s: float) -> float | None:
        """Several tokens may come together. None: fewer than two times of arrival."""
        times = [one for one in self.at_s if begin_s <= one <= end_s]
        num_after = sum(one > times[0] for one in times) if times else 0
        return (times[-1] - times[0]) / num_after if num_after else None

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def one_round(target: str, tokens: int, draw: random.Random, found: Found) -> None:
    prompt = [draw.randrange(3, 4000) for _ in range(tokens)]
    async with AsyncClient(target) as client:
        streams = [Stream(client, prompt)]
        try:
            await streams[0].has(2)
            streams.append(Stream(client, [draw.randrange(3, 4000) for _ in range(64)]))  # on the other, which is empty
            await streams[1].has(2)
            streams.append(Stream(client, [*prompt, 7]))  # where the prompt is cached
            await streams[2].has(20)
            began_s = time.perf_counter()
            last = client.stream([*prompt, 8], max_tokens=2, temperature=0.0, ignore_eos=True)
            ended_s = 0.0
            async for _ in last:
                ended_s = ended_s or time.perf_counter()
            found.ttft_s.append(ended_s - began_s)
            explained = (await client.explain(last.request_id)).chosen
            if explained is not None and explained.pull is not None and explained.pull.is_pulled:
                found.predicted_s[last.request_id] = explained.pull.pull_s
            for name, stream in (("source", streams[0]), ("destination", streams[1])):
                before, beside = (
                    stream.per_token_s(*between)
                    for between in ((streams[2].at_s[2], began_s), (began_s, max(ended_s, began_s)))
                )
                if before is not None and beside is not None:
                    found.slower[name].append(beside / before)
        finally:
            for stream in streams:
                await stream.end()


def measure(model: Path, tokens: int, rounds: int, folder: Path, *, is_on: bool) -> Found:
    record = folder / f"pull-{is_on}.jsonl"
    settings = (
        "worker.max_batch=2",
        f"worker.kv_blocks={6 * (tokens + LONG) // 16}",
        f"worker.kv_pull={str(is_on).lower()}",
    )
    sets = [flag for one in settings for flag in ("--set", one)]
    flags = ["--model", str(model), "--prefill", "0", "--decode", "2", "--record", str(record), *PATIENT, *sets]
    found, draw = Found(), random.Random(1)
    running = Running.start(*flags, timeout_s=300.0, env={"OMP_NUM_THREADS": "1"})

    async def all_rounds() -> None:
        for _ in range(rounds):
            await one_round(running.target, tokens, draw, found)

    try:
        asyncio.run(all_rounds())
    finally:
        running.stop(60.0)
    with record.open(encoding="utf-8") as lines:
        events = [json.loads(line).get("event", {}) for line in lines]
    ended = [one for one in events if one.get("is") == "PullEnded" and one.get("num_tokens")]
    found.pulls = [one for one in ended if one["key"][1] in found.predicted_s]
    return found


def _send(port: int, num_bytes: int, count: int) -> None:
    data = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(count):
            connection.sendall(data)
            connection.recv(1)


def socket_bytes_s(num_bytes: int, count: int = 5) -> list[float]:
    """Of a plain socket between two processes."""
    into, speeds = memoryview(bytearray(num_bytes)), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = multiprocessing.get_context("spawn").Process(
            target=_send, args=(server.getsockname()[1], num_bytes, count)
        )
        sender.start()
        connection, _ = server.accept()
        with connection:
            for _ in range(count):
                left = into[: connection.recv_into(into[:1])]
                began_s, got = time.perf_counter(), len(left)
                while got < num_bytes:
                    got += connection.recv_into(into[got:])
                speeds.append(num_bytes / (time.perf_counter() - began_s))
                connection.sendall(b"x")
        sender.join()
    return speeds[1:]


def pulls(model: Path, tokens: int, rounds: int, folder: Path) -> list[list[str]]:
    computed = measure(model, tokens, rounds, folder, is_on=False)
    pulled = measure(model, tokens, rounds, folder, is_on=True)
    num_bytes = pulled.pulls[0]["num_bytes"] if pulled.pulls else 0
    rows = [["", "median (least-most)"]]
    rows.append(["pulls", f"{len(pulled.pulls)} of {rounds}, {num_bytes / 2**20:.0f} MiB each"])
    if pulled.pulls:
        busy = [one["num_bytes"] / one["busy_s"] / 1e9 for one in pulled.pulls]
        whole = [one["num_bytes"] / one["pull_s"] / 1e9 for one in pulled.pulls]
        plain = [one / 1e9 for one in socket_bytes_s(num_bytes)]
        rows.append(["GB/s of the bytes", spread(busy, "{:.2f}")])
        rows.append(["GB/s of the pull", spread(whole, "{:.2f}")])
        rows.append(["GB/s of a socket", spread(plain, "{:.2f}")])
        rows.append(["bytes, of a socket", f"{statistics.median(busy) / statistics.median(plain):.2f}"])
        errors = [one["pull_s"] / pulled.predicted_s[one["key"][1]] for one in pulled.pulls]
        rows.append(["seconds of a pull, of the predicted", spread(errors, "{:.2f}")])
    rows.append(["TTFT ms, computed", spread([one * 1e3 for one in computed.ttft_s], "{:.0f}")])
    rows.append(["TTFT ms, pulled", spread([one * 1e3 for one in pulled.ttft_s], "{:.0f}")])
    for name, found in (("computed", computed), ("pulled", pulled)):
        for where, slower in found.slower.items():
            shown = spread(slower, "{:.2f}") if slower else "no token came meanwhile"
            rows.append([f"time between tokens beside it, {where}, {name}", shown])
    return rows
